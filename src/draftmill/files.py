"""Files that appear whole or not at all, and what the file system refuses as an error that says what to do."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftmill.errors import DiskError, DraftmillError

FULL = (errno.ENOSPC, errno.EDQUOT)
_SPARE = 1 << 20  # less than this left, and what failed to be written failed for that


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all.

    Raises:
        DiskError: it cannot be written; what was there before still is.
    """
    part = path.with_name(path.name + ".part")
    with disk_errors(path, part):
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        sync(path.parent)


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A fresh folder to write into, which replaces `final` when the block ends without an error.

    Its files are on the disk before it does, so that a crash leaves the old folder or the new one.

    Raises:
        DiskError: it cannot be written; what was there before still is.
    """
    work = final.with_name(f".{final.name}.part")
    try:
        with disk_errors(final):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            yield work
            for path in (*work.iterdir(), work):
                sync(path)
            if final.exists():
                shutil.rmtree(final)
            work.rename(final)
            sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(place: Path, part: Path | None = None) -> Iterator[None]:
    """Turns what the file system refuses into a DiskError, and takes the unfinished file away.

    Libraries report a full disk by errors of their own (torch.save by a RuntimeError); they are told by what is free.
    """
    try:
        yield
    except DraftmillError:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in FULL or free(place) < _SPARE
        if part is not None:
            part.unlink(missing_ok=True)
        if not full and not isinstance(error, OSError):
            raise
        raise DiskError(
            f"cannot write to {place}: {'the disk is full' if full else error}",
            cause="" if full else "the file system is read-only, or not ours to write",
            next_step="make room and run the same command again: what was written is valid, and it resumes",
        ) from error


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hexadecimal, read a piece at a time.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free(place: Path) -> int:
    """The bytes free on the disk that holds a path, or would if it were made."""
    there = next((folder for folder in (place, *place.parents) if folder.exists()), Path())
    return shutil.disk_usage(there).free
