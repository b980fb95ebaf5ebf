"""Folders that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftmill.files import sync


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A fresh folder to write into, which takes the name `final` when the block ends without an error.

    Its files are on the disk before it does, so that a crash leaves the old folder or the new one. A folder that had
    the name is deleted.
    """
    work = final.with_name(f".{final.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        for path in (*work.iterdir(), work):
            sync(path)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
