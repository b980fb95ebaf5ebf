"""The package index: which file a name==version is, and its Python sources, without the rest of a large wheel."""

import base64
import csv
import hashlib
import io
import itertools
import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from draftmill.contract.archives import unpack, write_tree
from draftmill.errors import AuditError, ProcessError
from draftmill.files import sha256
from draftmill.process import run

DEFAULT = "https://pypi.org/simple"
WHOLE = 32 << 20  # bytes: a file up to this size is fetched whole and checked against the index's hash
GAP = 1 << 18  # bytes: two wanted parts closer than this are fetched as one
TAIL = 1 << 20  # bytes of a wheel's end in which its directory is looked for first
TIMEOUT = 120  # seconds without an answer


@dataclass(frozen=True, kw_only=True)
class Remote:
    """One file of the index."""

    name: str
    version: Version
    filename: str
    url: str
    sha256: str
    size: int


def versions(name: str) -> list[Version]:
    """Every release that the index has of `name`, oldest first, without pre-releases and yanked ones."""
    return sorted({file.version for file in _files(name) if not file.version.is_prerelease})


def fetch(name: str, version: str, cache: Path) -> Path:
    """The folder with the Python sources of name==version, from the cache or the index.

    Raises:
        AuditError: the index lacks it, cannot be reached, or sent something else than it promised.
    """
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise AuditError(f"{name}=={version}: {version} is no version", next_step="as in: vllm==0.17.0") from error
    note = cache / "index" / f"{canonicalize_name(name)}-{wanted}.json"
    if note.is_file():
        kept: Path = cache / str(json.loads(note.read_text())["sha256"])
        if kept.is_dir():
            return kept
    candidates = [file for file in _files(name) if file.version == wanted]
    if not candidates:
        folder = _through_pip(name, str(wanted), cache)
        sha256 = folder.name
    else:
        file = min(candidates, key=_preference)
        folder, sha256 = cache / file.sha256, file.sha256
        if not folder.is_dir():
            _download(file, folder)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"sha256": sha256}))
    return folder


def _preference(file: Remote) -> tuple[int, str]:
    name = file.filename
    order = [name.endswith("-none-any.whl"), name.endswith("x86_64.whl"), name.endswith(".whl")]
    return (order.index(True) if True in order else len(order), name)


def _settings() -> dict[str, str]:
    try:
        text = run([sys.executable, "-m", "pip", "config", "list"])
    except ProcessError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.rpartition(".")[2].replace("_", "-"): value.strip().strip("'\"") for key, _, value in pairs}


def _open(url: str, headers: dict[str, str]) -> Any:
    if not url.startswith(("https://", "http://")):
        raise AuditError(f"the index names a file that is not on the web: {url}")
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise AuditError(f"{url}: the index answered {error.code}", next_step="try again later") from error
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise AuditError(
            f"the package index cannot be reached: {error}",
            cause="no network, or pip's index settings",
            next_step="give a folder, a wheel or an sdist instead",
        ) from error


def _files(name: str) -> list[Remote]:
    base = _settings().get("index-url", DEFAULT).rstrip("/")
    url = f"{base}/{canonicalize_name(name)}/"
    answer = _open(url, {"Accept": "application/vnd.pypi.simple.v1+json"})
    if answer is None:
        return []
    with answer:
        data = answer.read()
    try:
        listed = json.loads(data)["files"]
    except (ValueError, KeyError, TypeError):
        return []  # an index that answers in HTML only: pip reads those
    found = []
    for file in listed:
        version = _version(file["filename"])
        if version is not None and not file.get("yanked") and file.get("hashes", {}).get("sha256"):
            found.append(
                Remote(
                    name=name,
                    version=version,
                    filename=file["filename"],
                    url=urljoin(url, file["url"]),
                    sha256=file["hashes"]["sha256"],
                    size=file.get("size") or 0,
                )
            )
    return found


def _version(filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _through_pip(name: str, version: str, cache: Path) -> Path:
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", temporary]
        try:
            run([*command, f"{name}=={version}"])
        except ProcessError as error:
            raise AuditError(
                f"the package index has no {name}=={version}",
                cause="a misspelt name, or a version that was never released",
                next_step="look the name up, or give a folder",
            ) from error
        archive = next(Path(temporary).iterdir())
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if not (cache / digest).is_dir():
            unpack(archive, cache / digest)
        return cache / digest


def _download(file: Remote, folder: Path) -> None:
    if file.filename.endswith(".whl") and file.size > WHOLE:
        parts = _wheel_sources(file)
        if parts is not None:
            write_tree(folder, lambda: iter(parts))
            return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        archive = Path(temporary) / file.filename
        answer = _open(file.url, {})
        if answer is None:
            raise AuditError(f"{file.filename}: listed by the index, but not there", next_step="try again later")
        with answer, archive.open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)
        if sha256(archive) != file.sha256:
            raise AuditError(
                f"{file.filename}: not the file that the index promised",
                cause="the download was cut off or changed",
                next_step="run it again",
            )
        unpack(archive, folder)


class _Ranges(io.RawIOBase):
    """A remote file, read by ranges. `parts` holds what was fetched, as (first byte, bytes)."""

    def __init__(self, file: Remote) -> None:
        self.file, self.at, self.parts = file, 0, [(0, b"")]

    def load(self, first: int, last: int) -> bool:
        answer = _open(self.file.url, {"Range": f"bytes={first}-{last}"})
        if answer is None:
            return False
        with answer:
            if answer.status != 206:
                return False
            self.parts.insert(0, (first, answer.read()))
        return True

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.file.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        size = self.file.size - self.at if size < 0 else min(size, self.file.size - self.at)
        for first, data in self.parts:
            if first <= self.at and self.at + size <= first + len(data):
                piece = data[self.at - first : self.at - first + size]
                self.at += size
                return piece
        if not self.load(self.at, max(self.at + size, min(self.at + (1 << 16), self.file.size)) - 1):
            raise OSError("the server stopped sending ranges")
        return self.read(size)


def _wheel_sources(file: Remote) -> list[tuple[str, bytes]] | None:
    """A wheel's Python files, each checked against the wheel's RECORD; None where the server sends no ranges."""
    remote = _Ranges(file)
    if not remote.load(max(0, file.size - TAIL), file.size - 1):
        return None
    with zipfile.ZipFile(remote) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        wanted = [i for i in infos if i.filename.endswith(".py") or i.filename.endswith(".dist-info/RECORD")]
        for first, last in _spans(infos, wanted, archive.start_dir):
            if not remote.load(first, last):
                return None
        record = next((i for i in wanted if i.filename.endswith("RECORD")), None)
        sums = _record(archive.read(record)) if record else {}
        return [_checked(i.filename, archive.read(i), sums) for i in wanted if i is not record]


def _spans(infos: list[zipfile.ZipInfo], wanted: list[zipfile.ZipInfo], end: int) -> Iterator[tuple[int, int]]:
    following = {a.header_offset: b.header_offset for a, b in itertools.pairwise(infos)}
    first = last = -1
    for info in wanted:
        stop = following.get(info.header_offset, end)
        if first >= 0 and info.header_offset - last <= GAP:
            last = stop
            continue
        if first >= 0:
            yield first, last - 1
        first, last = info.header_offset, stop
    if first >= 0:
        yield first, last - 1


def _record(data: bytes) -> dict[str, str]:
    return {row[0]: row[1] for row in csv.reader(io.StringIO(data.decode())) if len(row) > 1}


def _checked(name: str, data: bytes, sums: dict[str, str]) -> tuple[str, bytes]:
    kind, _, expected = sums.get(name, "").partition("=")
    found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    if kind == "sha256" and found != expected:
        raise AuditError(f"{name}: its bytes are not those of the wheel's RECORD", next_step="run it again")
    return name, data
