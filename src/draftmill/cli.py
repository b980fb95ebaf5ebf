"""The command line: one command a module, and the one place where errors become messages and exit codes."""

import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from draftmill import (
    compute,
    contract,
    doctor,
    evaluate,
    extract,
    image,
    patches,
    pins,
    prepare,
    release,
    report,
    serve,
    store,
    train,
)
from draftmill.errors import DiskError, DraftmillError, Interrupted, PatchError, RecipeError, StoreError
from draftmill.files import FULL
from draftmill.process import foreground
from draftmill.recipe import Recipe

# What a user of `run` waits for, in this order. Each runs in a process of its own, so that its memory is given back.
STAGES = ("prepare", "extract", "train", "evaluate", "report")


class _Commands(typer.core.TyperGroup):
    """Commands that Ctrl-C and SIGTERM end as an error of ours, with its message: click itself only says Aborted."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _interrupted() from None


app = typer.Typer(
    cls=_Commands,
    help="From conversations to a measured EAGLE-3 draft model. `draftmill run` does all five stages; without "
    "--recipe, on a small real model (the demo).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
patches_app = typer.Typer(help="The patches for speculators.", no_args_is_help=True)
pins_app = typer.Typer(help="The pinned versions and the locks made from them.", no_args_is_help=True)
store_app = typer.Typer(help="Look into a store of hidden states.", no_args_is_help=True)
app.add_typer(patches_app, name="patches")
app.add_typer(pins_app, name="pins")
app.add_typer(store_app, name="store")
app.add_typer(contract.app, name="audit")
app.add_typer(image.app, name="image")
app.add_typer(release.node_app, name="node")
app.command("doctor", help="Whether this machine is fit for a run.")(doctor.doctor)

RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", "-r", help="The run's settings (TOML). Left out: the demo.", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override one setting, as in: --set train.steps=100", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Extract even if the disk looks too small.")]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Keep what is whole of a damaged input, and count the rest.")
]
PatchFolder = Annotated[Path, typer.Option(help="The folder that holds `series`.")]


def _recipe(file: Path | None, settings: list[str] | None) -> Recipe:
    overrides = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or "." not in key:
            raise RecipeError(
                f"--set {setting}: not of the form section.key=value", next_step="as in: --set train.steps=100"
            )
        overrides[key] = value
    recipe = Recipe.load(file, overrides)
    if (
        Path(recipe.target_folder).is_absolute()
        or recipe.target_folder.exists()
        or recipe.target_folder == recipe.folder.target
    ):
        os.environ.setdefault(
            "HF_HUB_OFFLINE", "1"
        )  # a local target needs no hub, and a machine without one must not wait
    return recipe


@app.command("prepare", help="Conversations to token ids and loss masks.")
def prepare_(recipe: RecipeFile = None, settings: Settings = None, keep_going: KeepGoing = False) -> None:
    prepare.prepare(_recipe(recipe, settings), keep_going=keep_going)


@app.command("extract", help="Token ids to the target's hidden states, in a store. Resumes.")
def extract_(recipe: RecipeFile = None, settings: Settings = None, yes: Yes = False) -> None:
    extract.extract(_recipe(recipe, settings), yes=yes)


@app.command("train", help="A store to a draft that vLLM loads. Checkpoints; resumes.")
def train_(recipe: RecipeFile = None, settings: Settings = None) -> None:
    train.train(_recipe(recipe, settings))


@app.command("evaluate", help="The draft's acceptance length on prompts, and that it changes no output.")
def evaluate_(recipe: RecipeFile = None, settings: Settings = None) -> None:
    evaluate.evaluate(_recipe(recipe, settings))


@app.command("report", help="One HTML page and one JSON file on all of it.")
def report_(recipe: RecipeFile = None, settings: Settings = None) -> None:
    report.report(_recipe(recipe, settings))


@app.command(
    "serve",
    help="vLLM's OpenAI server, with the draft. What follows -- goes to `vllm serve`, as in: -- --port 8001",
)
def serve_(
    recipe: RecipeFile = None,
    settings: Settings = None,
    options: Annotated[list[str] | None, typer.Argument(help="For `vllm serve`.", show_default=False)] = None,
) -> None:
    serve.serve(_recipe(recipe, settings), options or [])


@app.command("run", help="All five stages. What an earlier run finished is kept.")
def run_(recipe: RecipeFile = None, settings: Settings = None, yes: Yes = False, keep_going: KeepGoing = False) -> None:
    folder = _recipe(recipe, settings).folder
    options = [*(["--recipe", str(recipe)] if recipe else []), *(w for s in settings or [] for w in ("--set", s))]
    extra = {"extract": ["--yes"] * yes, "prepare": ["--keep-going"] * keep_going}
    for number, stage in enumerate(STAGES, start=1):
        _console().rule(f"{number}/{len(STAGES)} {stage}")
        code = foreground([sys.executable, "-m", "draftmill", stage, *options, *extra.get(stage, [])])
        if code:
            raise typer.Exit(code)
    _console().print(f"\nThe report: {folder.report_html}", highlight=False)


@patches_app.command("check", help="Format, headers, series, and that all apply to the pristine release.")
def patches_check(folder: PatchFolder = patches.FOLDER) -> None:
    wheel = patches.pristine()
    findings = patches.check(folder, wheel)
    for finding in findings:
        _console().print(str(finding), markup=False)
    if findings:
        raise typer.Exit(PatchError.exit_code)
    _console().print(
        f"{len(patches.read_series(folder))} patches apply to {wheel.name}; series {patches.series_digest(folder)}"
    )


@patches_app.command("build", help="The patched wheel, with its stamped version.")
def patches_build(
    folder: PatchFolder = patches.FOLDER,
    out: Annotated[Path, typer.Option(help="Where the wheel goes.")] = Path("dist"),
) -> None:
    _console().print(str(patches.build(folder, patches.pristine(), out)), markup=False)


@patches_app.command("tree", help="A git repository with a commit for each patch, in which to write the next.")
def patches_tree(out: Path, folder: PatchFolder = patches.FOLDER) -> None:
    names = patches.read_series(folder)
    _console().print(str(patches.tree(folder, patches.pristine(), out, names)), markup=False)


@pins_app.command("check", help="Fail when a lock is stale.")
def pins_check() -> None:
    pins.check()
    _console().print("every lock was made from these pins")


@pins_app.command("lock", help="Resolve every lock anew.")
def pins_lock() -> None:
    for path in pins.make():
        _console().print(f"wrote {path}")


@store_app.command("verify", help="Check every sample's checksum.")
def store_verify(path: Path) -> None:
    findings = store.Store.open(path, partial=True).verify()
    for finding in findings:
        _console().print(str(finding), markup=False)
    if findings:
        raise StoreError(f"{path}: {len(findings)} faults", next_step="run `draftmill extract` again: it repairs them")
    _console().print(f"{path}: whole", markup=False)


@store_app.command("info", help="What it holds and of whom; no shard is read.")
def store_info(path: Path) -> None:
    table = Table(show_header=False, box=None)
    for name, value in store.Store.open(path, partial=True).facts().items():
        table.add_row(name, value)
    _console().print(table)


@store_app.command("sample", help="One sample's tensors, and how large their values are.")
def store_sample(path: Path, index: int) -> None:
    opened = store.Store.open(path, partial=True)
    if not 0 <= index < len(opened):
        raise StoreError(f"{path} has no sample {index}", next_step=f"name one from 0 to {len(opened) - 1}")
    table = Table("tensor", "dtype", "shape", "root mean square", "largest")
    for name, tensor in opened[index].tensors().items():
        values = tensor.double()
        size, largest = values.square().mean().sqrt(), values.abs().max()
        dtype = str(tensor.dtype).removeprefix("torch.")
        table.add_row(name, dtype, str(list(tensor.shape)), f"{size:.4g}", f"{largest:.4g}")
    _console().print(table)


def _version(show: bool) -> None:
    if not show:
        return
    rows = [f"draftmill {importlib.metadata.version('draftmill')}", f"python {platform.python_version()}"]
    rows += [f"{name} {version}" for name, version in compute.stack_versions().items()]
    typer.echo("\n".join(rows))
    raise typer.Exit


@app.callback()
def _top(
    version: Annotated[  # noqa: ARG001 (its callback does the work)
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Versions of the stack, and the patches' digest."
        ),
    ] = False,
) -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is for those who write code with it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait take the cores from others


def _console() -> Console:
    return Console(soft_wrap=True)


def main(command: Callable[..., object] = app) -> None:
    """Runs the command line; every expected failure ends here as a message and its own exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        command()
    except DraftmillError as error:
        _complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _complain(_interrupted())
        sys.exit(Interrupted.exit_code)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _complain(DiskError(f"the disk is full: {error}", next_step="make room and run the same command again"))
        sys.exit(DiskError.exit_code)


def _interrupted() -> Interrupted:
    return Interrupted("interrupted", next_step="run the same command again: what is finished is kept")


def _interrupt(*_: object) -> None:
    """SIGTERM, by which a container is stopped, ends a stage as Ctrl-C does."""
    raise KeyboardInterrupt


def _complain(error: DraftmillError) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(error.what, markup=False)
    for label, text in (("cause", error.cause), ("next", error.next_step)):
        if text:
            console.print(f"{label + ':':7}{text}", markup=False)
