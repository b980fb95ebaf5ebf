"""Makes `.venv`: the locked CPU stack, the demo's data, draftmill itself and the patched speculators.

Runs before anything is installed (`python -m draftmill.environment`), so it uses the standard library and uv alone.
"""

import hashlib
import shutil
import sys
from pathlib import Path

from draftmill import pins
from draftmill.errors import DraftmillError
from draftmill.process import run

VENV = Path(".venv")
STAMP = VENV / "draftmill.stamp"
WHEELS = Path(".tools") / "wheels"
LOCKS = ("pylock.cpu.toml", "pylock.demo.toml")


def inputs(root: Path = Path()) -> str:
    """The digest of everything that `.venv` is made from."""
    found = [root / pins.FOLDER / name for name in (*LOCKS, "pins.toml")]
    found += [
        root / "pyproject.toml",
        *sorted((root / "patches").rglob("*.patch")),
        *sorted((root / "patches").rglob("series")),
    ]
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def setup() -> None:
    """Makes `.venv`, or leaves it as it is when nothing that it is made from has changed.

    Raises:
        DraftmillError: a download or an installation failed.
    """
    wanted = inputs()
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    pinned = pins.load()
    if not (VENV / "bin" / "python").exists():
        say(f"making {VENV} with Python {pinned.tools['python']}")
        run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, VENV])
    STAMP.unlink(missing_ok=True)
    say("installing the locked CPU stack (8 GB unpacked; several minutes the first time)")
    uv("sync", pins.FOLDER / "pylock.cpu.toml")
    say("installing the demo's model, conversations and prompts")
    uv("install", "--no-deps", "-r", pins.FOLDER / "pylock.demo.toml")
    uv("install", "--no-deps", "--no-build-isolation", "--editable", ".")
    say("building and installing the patched speculators")
    shutil.rmtree(WHEELS / "patched", ignore_errors=True)
    run([VENV / "bin" / "draftmill", "patches", "build", "--out", WHEELS / "patched"])
    uv("install", "--no-deps", "--reinstall", *sorted((WHEELS / "patched").glob("*.whl")))
    STAMP.write_text(wanted, encoding="utf-8")
    say(f"{VENV} is ready")


def uv(command: str, *arguments: str | Path) -> None:
    """One `uv pip` command on `.venv`."""
    run(
        ["uv", "pip", command, "--quiet", "--python", VENV, *arguments],
        next_step="check the network and the free disk, then run it again",
    )


def say(text: str) -> None:
    sys.stderr.write(f"setup: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        setup()
    except DraftmillError as error:
        say(f"{error.what}\n{error.next_step}")
        sys.exit(error.exit_code)
