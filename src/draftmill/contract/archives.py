"""Archives of Python packages: their sources are taken out, and nothing is written outside the folder."""

import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from draftmill.errors import AuditError

MEMBER_LIMIT, TOTAL_LIMIT = 32 << 20, 2 << 30  # bytes: above these an archive is no package of sources


def unpack(archive: Path, folder: Path) -> None:
    """Puts an archive's Python sources into `folder`, which appears whole or not at all."""
    reader = _zip_members if archive.name.endswith((".whl", ".zip")) else _tar_members
    write_tree(folder, lambda: reader(archive))


def write_tree(folder: Path, members: Callable[[], Iterator[tuple[str, bytes]]]) -> None:
    """Writes (name, bytes) pairs under `folder`: into a temporary one first, then renamed.

    Raises:
        AuditError: a name climbs out of the folder, or the archive is broken or far too large.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpack-"))
    total = 0
    try:
        for name, data in members():
            target = temporary / safe(name)
            total += len(data)
            if total > TOTAL_LIMIT:
                raise AuditError(f"{folder.name}: more than {TOTAL_LIMIT >> 30} GiB of sources: no Python package")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        temporary.chmod(0o755)
        if not folder.is_dir():
            temporary.rename(folder)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise AuditError(
            f"cannot unpack the archive: {error}",
            cause="it is damaged, or no archive of that kind",
            next_step="download it again",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def safe(name: str) -> PurePosixPath:
    """The name of an archive's member, if it stays inside.

    Raises:
        AuditError: it is absolute, or climbs.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or "\0" in name:
        raise AuditError(
            f"the archive holds a path that leaves its folder: {name!r}",
            cause="it was made to overwrite other files",
            next_step="do not use this archive",
        )
    return path


def _zip_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            safe(info.filename)
            link = stat.S_ISLNK(info.external_attr >> 16)
            if info.filename.endswith(".py") and not link and info.file_size <= MEMBER_LIMIT:
                yield info.filename, file.read(info)


def _tar_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as file:
        for member in file:
            safe(member.name)
            if not (member.isfile() and member.name.endswith(".py") and member.size <= MEMBER_LIMIT):
                continue
            data = file.extractfile(member)
            if data is not None:
                yield member.name, data.read()
