"""The patches: checked, applied with zero fuzz, and built into a wheel that says in its version that it is patched.

The pristine tree is the release's wheel, unpacked under `src/`. No build backend and no network is needed to make the
patched wheel from it, and the same patches give the same bytes.
"""

import base64
import hashlib
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from draftmill import pins
from draftmill.errors import Finding, PatchError, PinError, ProcessError
from draftmill.process import run

FOLDER = Path("patches") / "speculators"
CACHE = Path(".tools") / "wheels"
FIELDS = ("Description", "Origin", "Bug", "Forwarded", "Removal")  # DEP-3, and the condition under which the patch goes
DATE = "2026-01-01T00:00:00+0000"
_ZIP_TIME = (2026, 1, 1, 0, 0, 0)
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "draftmill"), ("EMAIL", "draftmill@localhost"), ("DATE", DATE))
}


def read_series(folder: Path = FOLDER) -> list[str]:
    """The patches' file names in the order in which they are applied.

    Raises:
        PatchError: there is no `series`.
    """
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PatchError(
            f"cannot read {folder}/series: {error.strerror}", next_step="run this from the checkout"
        ) from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def series_digest(folder: Path = FOLDER) -> str:
    """sha256 over the names and bytes of the patches in their order: two series with one digest patch alike."""
    digest = hashlib.sha256()
    for name in read_series(folder):
        path = folder / name
        if not path.exists():
            raise PatchError(
                f"{folder}/series names {name}, which is not there", next_step="add the file, or take the line out"
            )
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def pristine(folder: Path = pins.FOLDER, cache: Path = CACHE) -> Path:
    """The pinned release's wheel, downloaded once and checked by its hash.

    Raises:
        PinError: the file that the package index has is not the pinned one.
        ProcessError: the download failed.
    """
    pinned = pins.load(folder).speculators
    version = pinned["version"]
    path = cache / f"speculators-{version}-py3-none-any.whl"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        run([*command, "--dest", cache, f"speculators=={version}"], next_step="check the network, then run it again")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pinned["sha256"]:
        path.unlink()
        raise PinError(
            f"{path.name} has sha256 {found}, pinned is {pinned['sha256']}",
            next_step="run it again; if it stays, do not use it",
        )
    return path


def check(folder: Path, wheel: Path) -> list[Finding]:
    """Everything that is wrong with the patches in `folder`; nothing is when all apply to `wheel` with zero fuzz."""
    findings = [*_series_findings(folder)]
    names = [name for name in dict.fromkeys(read_series(folder)) if (folder / name).exists()]
    for name in names:
        findings += _patch_findings(folder / name)
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = _unpack(wheel, Path(temporary))
        for name in names:
            if rejected := _apply(unpacked, folder / name):
                findings.append(
                    Finding(kind="does not apply", place=name, expected="every hunk, zero fuzz", found=rejected)
                )
                break  # those after it were written on top of it
    return findings


def _series_findings(folder: Path) -> Iterator[Finding]:
    listed = read_series(folder)
    present = {path.name for path in folder.glob("*.patch")}
    for name in sorted(set(listed)):
        if (times := listed.count(name)) > 1:
            yield Finding(kind="listed twice", place=name, expected="one line in series", found=f"{times} lines")
        if name not in present:
            yield Finding(kind="missing", place=name, expected="the file that series names", found="no such file")
    for name in sorted(present - set(listed)):
        yield Finding(kind="unused", place=name, expected="a line in series", found="none")


def _patch_findings(path: Path) -> Iterator[Finding]:
    text = path.read_text(encoding="utf-8", errors="replace")
    head, _, diff = text.partition("\n---\n")
    if not re.match(r"From 0{40} Mon Sep 17 00:00:00 2001\nFrom: .+\nDate: .+\nSubject: \[PATCH\] \S", text):
        wanted = "git format-patch --zero-commit --no-signature -N"
        yield Finding(kind="format", place=path.name, expected=wanted, found=text.partition("\n")[0][:80])
    if text.rstrip().rpartition("\n-- \n")[1]:
        yield Finding(kind="format", place=path.name, expected="no signature at its end", found="-- ")
    for field in FIELDS:
        if not re.search(rf"^{field}: *\S", head, re.MULTILINE):
            yield Finding(kind="header", place=path.name, expected=f"{field}: …", found="nothing")
    try:
        changed = PatchSet(diff)
    except UnidiffParseError as error:
        yield Finding(kind="format", place=path.name, expected="a unified diff", found=str(error))
        return
    if not changed:
        yield Finding(kind="format", place=path.name, expected="a unified diff", found="no change of a file")


def _unpack(wheel: Path, folder: Path) -> Path:
    """A git repository with the wheel's contents under `src/`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "src")
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", wheel.name]):
        _git(folder, *command)
    return folder


def _git(folder: Path, *command: str) -> str:
    return run(["git", *command], cwd=folder, env={**_IDENTITY, **_no_other_git(folder.resolve())})


def _no_other_git(folder: Path) -> dict[str, str]:
    """Variables that keep git to the repository in `folder`, and to no settings but its own.

    In a hook git sets GIT_DIR and its like to the user's repository, which our commits must never reach; and settings
    of the user's could sign them, change their lines, or let a patch apply with fuzz.
    """
    own = folder / ".git"
    return {
        "GIT_DIR": str(own),
        "GIT_COMMON_DIR": str(own),
        "GIT_WORK_TREE": str(folder),
        "GIT_INDEX_FILE": str(own / "index"),
        "GIT_OBJECT_DIRECTORY": str(own / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": "",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_PARAMETERS": "",
        "GIT_CONFIG_COUNT": "0",
    }


def _apply(tree: Path, patch: Path) -> str:
    """Applies one patch, and returns what git says when it does not apply. `git am` allows no fuzz by itself."""
    try:
        _git(tree, "am", "--quiet", "--committer-date-is-author-date", str(patch.resolve()))
    except ProcessError as error:
        return next((line for line in error.what.splitlines() if line.startswith("error:")), error.what)
    return ""


def build(folder: Path, wheel: Path, out: Path) -> Path:
    """Makes the patched wheel in `out`, its version stamped with the digest of the series.

    Raises:
        PatchError: `check` finds something.
    """
    if findings := check(folder, wheel):
        rows = "\n".join(str(finding) for finding in findings)
        raise PatchError(
            f"the patches in {folder} cannot be used:\n{rows}", next_step="correct these; patches/README.md says how"
        )
    name, version = wheel.name.split("-")[:2]
    stamped = f"{version}+draftmill.{series_digest(folder)[:12]}"
    with tempfile.TemporaryDirectory() as temporary:
        root = tree(folder, wheel, Path(temporary), read_series(folder)) / "src"
        _stamp(root, f"{name}-{version}.dist-info", f"{name}-{stamped}.dist-info", stamped)
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{name}-{stamped}-py3-none-any.whl"
        _pack(root, path)
    return path


def tree(folder: Path, wheel: Path, out: Path, names: Sequence[str]) -> Path:
    """A git repository in the empty folder `out`: the wheel's contents under `src/`, and a commit for each named patch.

    Raises:
        PatchError: one does not apply; those before it are in the repository.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise PatchError(f"{out} is not empty", next_step="name an empty folder")
    _unpack(wheel, out)
    for name in names:
        if rejected := _apply(out, folder / name):
            raise PatchError(f"{name} does not apply: {rejected}", next_step=f"make it anew in {out}")
    return out


def _stamp(root: Path, old: str, new: str, version: str) -> None:
    metadata = root / old / "METADATA"
    text = re.sub(
        r"^Version: .*$", f"Version: {version}", metadata.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE
    )
    metadata.write_text(text, encoding="utf-8")
    (root / old).rename(root / new)
    record = root / new / "RECORD"
    rows = []
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != record):
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(root).as_posix()},sha256={digest},{len(data)}")
    rows.append(f"{record.relative_to(root).as_posix()},,")
    record.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _pack(root: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(p for p in root.rglob("*") if p.is_file()):
            entry = zipfile.ZipInfo(file.relative_to(root).as_posix(), _ZIP_TIME)
            entry.external_attr = 0o644 << 16
            with file.open("rb") as source, archive.open(entry, "w") as target:
                shutil.copyfileobj(source, target)
