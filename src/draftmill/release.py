"""The prebuilt image: published and signed, pulled by its digest, and refused unless it is what this checkout is of.

`image.lock` says what was published; a node's checkout carries it, with the public half of the key, `image.pub`.
"""

import contextlib
import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from draftmill import archive, cosign, doctor, engine, image, node, patches, pins
from draftmill.doctor.rows import Profile
from draftmill.errors import EngineError, NodeError, ReleaseError
from draftmill.files import write_whole

LOCK = Path("image.lock")
KEY = Path("image.pub")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# What a registry that is away for a moment makes the engine say. Anything else will not pass by itself.
_PASSING = re.compile(
    r"connection (refused|reset)|EOF|timeout|deadline exceeded|temporar|no such host|: 50[0-4]\b", re.I
)
_TRIES, _PAUSE = 60, 5.0  # seconds between them


class Published(BaseModel):
    """What `image.lock` says of a variant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    repository: str
    tag: str
    digest: str
    content: str  # as in the image's label: of all that it is made from

    @property
    def reference(self) -> str:
        return f"{self.repository}@{self.digest}"


def read_lock(path: Path = LOCK) -> dict[str, Published]:
    """The published images by variant; none where there is no such file.

    Raises:
        ReleaseError: it is not as `publish` writes it.
    """
    if not path.exists():
        return {}
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        return {variant: Published.model_validate(table) for variant, table in tree.items()}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ReleaseError(
            f"{path} is not as it should be: {error}", next_step="compare it with the last commit, or publish again"
        ) from error


def write_lock(published: Mapping[str, Published], path: Path = LOCK) -> None:
    """Writes `image.lock`, whole or not at all."""
    tables = [
        f"\n[{variant}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.model_dump().items())
        for variant, one in sorted(published.items())
    ]
    text = "# The published images. Made by `draftmill image publish`.\n" + "".join(tables)
    write_whole(path, text.encode())


def bill_of_materials(tag: str) -> dict[str, Any]:
    """CycloneDX 1.6 of the packages in an image, Python's and Debian's."""
    python = engine.run(tag, "cat", ["/opt/draftmill/manifest.txt"], user=image.UID).split()
    debian = engine.run(tag, "dpkg-query", ["-W", "-f", "${Package}==${Version}\n"], user=image.UID).split()
    listed = [("pypi", line) for line in python] + [("deb/debian", line) for line in debian]
    components = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:{kind}/{name}@{version}"}
        for kind, line in listed
        for name, _, version in (line.partition("=="),)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": tag.partition(":")[0], "version": tag}},
        "components": components,
    }


def provenance(planned: image.Plan, pinned: pins.Pins) -> dict[str, Any]:
    """SLSA's provenance, version 1: what the image was built from."""
    bases = [value for value in planned.arguments.values() if "@sha256:" in value]
    return {
        "buildDefinition": {
            "buildType": "urn:draftmill:docker-buildx:v1",
            "externalParameters": {"arguments": planned.arguments},
            "internalParameters": {"labels": planned.labels},
            "resolvedDependencies": [
                {"uri": f"pkg:docker/{base.partition('@')[0]}", "digest": {"sha256": base.rpartition(":")[2]}}
                for base in bases
            ]
            + [
                {"uri": "git+https://github.com/vllm-project/vllm", "digest": {"gitCommit": pinned.vllm["commit"]}},
                {"uri": "pkg:pypi/speculators", "digest": {"sha256": pinned.speculators["sha256"]}},
            ],
        },
        "runDetails": {"builder": {"id": "urn:draftmill:image-build"}},
    }


def publish(planned: image.Plan, repository: str, key: Path, *, lock: Path = LOCK) -> Published:
    """Pushes the image of this checkout, signs it, attaches its bill of materials and provenance, and notes its digest.

    Raises:
        EngineError: it is not built, or the registry refused it.
        ProcessError: cosign is missing, or failed.
    """
    if engine.labels(planned.tag) is None:
        raise EngineError(
            f"there is no image {planned.tag}", next_step=f"run `draftmill image build {planned.variant}`"
        )
    known, tag = read_lock(lock), planned.tag.rpartition(":")[2]
    with _bar(f"pushing {planned.tag}") as show:
        digest = engine.push(planned.tag, repository, tag, show)
    found = Published(repository=repository, tag=tag, digest=digest, content=planned.labels["CONTENT"])
    cosign.sign(found.reference, key)
    cosign.attest(found.reference, key, "cyclonedx", bill_of_materials(planned.tag))
    cosign.attest(found.reference, key, "slsaprovenance1", provenance(planned, pins.load()))
    write_lock({**known, planned.variant: found}, lock)
    return found


def by_digest(reference: str, known: Mapping[str, Published]) -> str:
    """An image's name with a digest. A tag is looked up in `image.lock`, since a registry lets anyone move one.

    Raises:
        ReleaseError: the tag is not in `image.lock`, or the registry has it for another digest.
        EngineError: the registry does not answer.
    """
    if "@" in reference:
        if not _DIGEST.fullmatch(reference.rpartition("@")[2]):
            raise ReleaseError(f"{reference} ends with no sha256 digest", next_step="write NAME@sha256:...")
        return reference
    mine = [one for one in known.values() if f"{one.repository}:{one.tag}" == reference]
    if not mine:
        raise ReleaseError(
            f"{reference} names no digest, and {LOCK} does not have it",
            next_step="write NAME@sha256:..., or use the checkout that it was published from",
        )
    if (there := engine.published(reference)) != mine[0].digest:
        raise ReleaseError(
            f"the tag {reference} is {there} in the registry, {mine[0].digest} in {LOCK}",
            cause="someone moved the tag after the image was published",
            next_step=f"name {mine[0].reference} to have the published one; do not run the other",
        )
    return mine[0].reference


def pull(reference: str, *, tries: int = _TRIES, pause: float = _PAUSE) -> None:
    """Pulls an image; a registry that is away is waited for.

    Args:
        tries, pause: how often it is asked, and how many seconds lie between.

    Raises:
        ReleaseError: what came is not what its digest says.
        EngineError: the registry refused it, or stayed away.
    """
    for left in reversed(range(tries)):
        try:
            with _bar("pulling") as show:
                engine.pull(reference, show)
            return
        except EngineError as error:
            if "verification failed" in error.what or "unexpected digest" in error.what:
                raise ReleaseError(
                    f"{reference} is not what its digest says: {error.what}",
                    cause="a layer was changed in the registry, or on its way",
                    next_step="do not use that registry; publish the image again",
                ) from error
            if not left or not _PASSING.search(error.what):
                raise
            typer.echo(f"{error.what}; trying again in {pause:.0f} s", err=True)
            time.sleep(pause)


def belongs(labels: Mapping[str, str], *, root: Path = Path()) -> None:
    """Checks that an image was built from this checkout's pins and patches.

    Raises:
        ReleaseError: it was built from others; they are named.
    """
    here = {
        "draftmill.pins": pins.load(root / pins.FOLDER).digest,
        "draftmill.patches": patches.series_digest(root / patches.FOLDER),
    }
    if wrong := [key for key, digest in here.items() if labels.get(key) != digest]:
        rows = "\n".join(f"  {key}: {labels.get(key, 'none')} in the image, {here[key]} here" for key in wrong)
        raise ReleaseError(
            f"the image is of another checkout:\n{rows}",
            next_step="check out the commit of its label org.opencontainers.image.revision, or run ./just image",
        )


def up(
    reference: str,
    variant: image.Variant,
    key: Path,
    profile: Profile,
    runs: Path,
    known: Mapping[str, Published],
) -> str:
    """Judges the machine, checks, pulls and tries an image, and gives it the tag that compose.yaml runs.

    Returns:
        What is ready.

    Raises:
        NodeError: the machine is not fit.
        ReleaseError: the image is not what it should be.
        EngineError: no engine or registry answers, or the image does not work.
    """
    rows = doctor.judge(node.node(runs), profile)
    doctor.show(rows, every=False)
    if doctor.exit_code(rows) == 1:
        lacking = ", ".join(one.what for one in rows if one.verdict == "critical")
        raise NodeError(f"this machine is not usable as {profile.name}: {lacking}", next_step="see what to do above")
    exact = by_digest(reference, known)
    cosign.verify(exact, key)
    pull(exact)
    labels = engine.labels(exact) or {}
    if labels.get("draftmill.variant") != variant:
        raise ReleaseError(
            f"{exact} is the variant {labels.get('draftmill.variant')}, not {variant}",
            next_step="name the other with --variant",
        )
    belongs(labels)
    image.smoke(exact)
    engine.name(exact, f"{image.NAME}:{variant}")
    return f"{image.NAME}:{variant} is {exact}"


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[engine.Progress], None]]:
    """A bar over all parts of a transfer, of those that have begun; on a terminal alone."""
    parts: dict[str, engine.Progress] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(one: engine.Progress) -> None:
            parts[one.part] = one
            done, total = (sum(getattr(part, key) for part in parts.values()) for key in ("done", "total"))
            progress.update(task, completed=done, total=total)

        yield show


node_app = typer.Typer(help="A fresh node, from its check to an image that runs.", no_args_is_help=True)
Secret = Annotated[Path, typer.Option(help="cosign's private key; its password is COSIGN_PASSWORD.", exists=True)]
Variant = Annotated[str, typer.Option(help="cuda or cpu")]


@image.app.command("publish", help="Push this checkout's image, sign it, and write its digest into image.lock.")
def publish_(
    repository: Annotated[str, typer.Argument(help="Where to, with no tag, as in: registry.example/team/draftmill")],
    key: Secret,
    variant: Variant = "cuda",
    argument: image.Arguments = None,
) -> None:
    planned = image.plan(image.variant_of(variant), overrides=image.arguments_of(argument))
    typer.echo(f"published and signed: {publish(planned, repository, key).reference}; {LOCK} has it")


@image.app.command("save", help="Write an image into a file, for a machine that reaches no registry.")
def save_(
    path: Annotated[Path, typer.Argument(help="The file, as in: draftmill-cuda.tar.zst", dir_okay=False)],
    tag: Annotated[str, typer.Option(help="An image's tag.")] = f"{image.NAME}:cuda",
) -> None:
    found = archive.save(tag, path)
    typer.echo(f"{path} and {path.name}.json hold {tag}: sha256 {found.sha256}")


@image.app.command("load", help="Take an image from a file of `save`, and check that it is this checkout's.")
def load_(path: Annotated[Path, typer.Argument(help="The file; its .json lies beside it.", dir_okay=False)]) -> None:
    found = archive.load(path)
    belongs(found.labels)
    typer.echo(f"loaded {found.tag}")


@node_app.command("up", help="Check the machine, then pull, verify and try the published image: ready, or why not.")
def up_(
    reference: Annotated[
        str | None, typer.Argument(help="NAME@sha256:... or a tag of image.lock", show_default=LOCK.name)
    ] = None,
    variant: Variant = "cuda",
    key: Annotated[Path, typer.Option(help="The public key of who published it.")] = KEY,
    profile: Annotated[
        str | None, typer.Option(help="As in `draftmill doctor`.", show_default="of the variant")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs will go.")] = Path("runs"),
) -> None:
    chosen, known = image.variant_of(variant), read_lock()
    if reference is None:
        if chosen not in known:
            raise ReleaseError(f"{LOCK} has no image of {chosen}", next_step="name one, or build it: ./just image")
        reference = known[chosen].reference
    wanted = doctor.profile_of(profile or {"cuda": "any-gpu", "cpu": "cpu"}[chosen])
    typer.echo(f"ready: {up(reference, chosen, key, wanted, runs, known)}")
