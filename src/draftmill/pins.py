"""The pins: `lockfiles/pins.toml` read as values, and the locks made from it by uv.

Uses the standard library alone, since it runs before anything is installed.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import PinError
from draftmill.process import run

FOLDER = Path("lockfiles")
PLATFORM = "x86_64-manylinux_2_31"
_INPUTS, _CONTENT = "# inputs: sha256:", "# content: sha256:"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What one lock is resolved from."""

    name: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    dependencies: bool = True

    @property
    def file(self) -> str:
        return f"pylock.{self.name}.toml"


@dataclass(frozen=True, kw_only=True)
class Pins:
    """`pins.toml`. `digest` is the sha256 of the file's bytes."""

    digest: str
    exclude_newer: str
    tools: dict[str, str]
    vllm: dict[str, str]
    speculators: dict[str, str]
    sources: dict[str, str]
    bases: dict[str, str]
    locks: tuple[Lock, ...]

    def inputs(self, lock: Lock) -> str:
        """The digest of everything that the lock is made from; a lock that does not carry it is stale."""
        parts = [
            lock.requirements,
            lock.overrides,
            lock.dependencies,
            self.exclude_newer,
            self.tools["python"],
            PLATFORM,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(folder: Path = FOLDER) -> Pins:
    """Reads `folder`/pins.toml.

    Raises:
        PinError: the file is missing, no TOML, or a table or key is missing or unknown.
    """
    path = folder / "pins.toml"
    try:
        data = path.read_bytes()
        tree = tomllib.loads(data.decode())
        locks = tuple(_lock(name, tree["locks"]) for name in tree["locks"])
        tree.pop("locks")
        return Pins(digest=hashlib.sha256(data).hexdigest(), locks=locks, **tree)
    except OSError as error:
        raise PinError(
            f"cannot read {path}: {error.strerror}", next_step="run this from draftmill's checkout"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise PinError(
            f"{path} is not as it should be: {error}", next_step="compare it with the last commit"
        ) from error


def _lock(name: str, tables: dict[str, dict[str, Any]]) -> Lock:
    table = dict(tables[name])
    parents = [_lock(parent, tables) for parent in table.pop("extends", ())]
    without = table.pop("without", ())
    requirements = {r for parent in parents for r in parent.requirements if _project(r) not in without}
    requirements.update(table.pop("requirements"))
    overrides = tuple(table.pop("overrides", ()))
    return Lock(name=name, requirements=tuple(sorted(requirements)), overrides=overrides, **table)


def _project(requirement: str) -> str:
    return requirement.partition("==")[0].partition("[")[0]


def make(folder: Path = FOLDER) -> list[Path]:
    """Resolves every lock with uv and writes it, with the command and the digests of its inputs and content on top."""
    pins = load(folder)
    written = []
    for lock in pins.locks:
        content = _resolve(pins, lock)
        path = folder / lock.file
        path.write_text(_header(pins, lock, content) + content, encoding="utf-8")
        written.append(path)
    tools = [f"{name}=={version}" for name, version in pins.tools.items() if name != "python"]
    compile_tools = ["uv", "pip", "compile", "--quiet", "--no-header", "--generate-hashes", "--universal", "-"]
    text = run([*compile_tools, "--exclude-newer", pins.exclude_newer], stdin="\n".join(tools))
    (folder / "tools.txt").write_text("# What ./just fetches first. Made by `./just lock`.\n" + text, encoding="utf-8")
    return [*written, folder / "tools.txt"]


def _resolve(pins: Pins, lock: Lock) -> str:
    command: list[str | Path] = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--format",
        "pylock.toml",
    ]
    command += ["--python-version", pins.tools["python"], "--python-platform", PLATFORM]
    command += ["--exclude-newer", pins.exclude_newer, "-"]
    if not lock.dependencies:
        command.append("--no-deps")
    if not lock.overrides:
        return run(command, stdin="\n".join(lock.requirements))
    overrides = FOLDER / f".{lock.name}.overrides"
    overrides.write_text("\n".join(lock.overrides), encoding="utf-8")
    try:
        return run([*command, "--overrides", overrides], stdin="\n".join(lock.requirements))
    finally:
        overrides.unlink()


def _header(pins: Pins, lock: Lock, content: str) -> str:
    digest = hashlib.sha256(content.encode()).hexdigest()
    return (
        f"# Made by `./just lock` from pins.toml; not for editing.\n{_INPUTS}{pins.inputs(lock)}\n{_CONTENT}{digest}\n"
    )


def stale(folder: Path = FOLDER) -> Iterator[str]:
    """Yields a line for every lock that is missing, older than its pins, or edited by hand."""
    pins = load(folder)
    for lock in pins.locks:
        path = folder / lock.file
        if not path.exists():
            yield f"{path} is missing"
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n", 3)
        if len(lines) < 4 or lines[1] != _INPUTS + pins.inputs(lock):
            yield f"{path} was not made from these pins"
        elif lines[2] != _CONTENT + hashlib.sha256(lines[3].encode()).hexdigest():
            yield f"{path} was edited by hand"
    tools = folder / "tools.txt"
    known = tools.read_text(encoding="utf-8") if tools.exists() else ""
    for name, version in pins.tools.items():
        if name != "python" and f"{name}=={version}" not in known:
            yield f"{tools} lacks {name}=={version}"


def check(folder: Path = FOLDER) -> None:
    """Raises:
    PinError: a lock is stale; every stale one is named."""
    if rows := list(stale(folder)):
        raise PinError(
            "\n".join(rows), cause="pins.toml and the locks differ", next_step="run ./just lock, and commit both"
        )
