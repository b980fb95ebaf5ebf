"""A folder with all that a build of the image downloads, so that it can be built with no network."""

import http.client
import shutil
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, parse_wheel_filename

from draftmill import manifest, patches, pins
from draftmill.errors import EngineError, PinError
from draftmill.files import disk_errors, sha256
from draftmill.process import run

PYTHON = (3, 12)
GLIBC = 39  # Ubuntu 24.04's 2.39, the newest of the bases'
AT_ONCE = 4
TRIES = 3


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of an index: `path` is that of its URL, and of its place in the folder."""

    path: str
    size: int
    sha256: str


def suited() -> frozenset[Tag]:
    """The wheels' tags that Python 3.12 in one of the bases takes."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return frozenset([*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp312", platforms)])


def files(lock: Path) -> Iterator[File]:
    """Yields each wheel of a lock that an installer may choose: of two that differ in their build, the newer.

    Raises:
        PinError: a package has no such wheel.
    """
    tags = suited()
    for package in tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]:
        newest: dict[frozenset[Tag], tuple[BuildTag, File]] = {}
        for wheel in package.get("wheels", []):
            path = wheel["url"].removeprefix(manifest.FILES + "/")
            _, _, build, supported = parse_wheel_filename(urllib.request.url2pathname(path.rpartition("/")[2]))
            found = File(path=path, size=wheel["size"], sha256=wheel["hashes"]["sha256"])
            if supported & tags and (supported not in newest or newest[supported][0] < build):
                newest[supported] = build, found
        if not newest:
            raise PinError(
                f"{lock} has no wheel of {package['name']} for Python 3.12 on Linux", next_step="pin a release with one"
            )
        yield from (file for _, file in newest.values())


def download(file: File, out: Path, base: str) -> int:
    """Brings one file to its place, unless it is there; returns the bytes that were downloaded.

    Raises:
        EngineError: it did not come, or another one did.
        DiskError: it cannot be written.
    """
    path = out / file.path
    if path.exists() and path.stat().st_size == file.size and sha256(path) == file.sha256:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    url = f"{base.rstrip('/')}/{file.path}"
    said = ""
    with disk_errors(path, partial):
        for _ in range(TRIES):
            try:
                with urllib.request.urlopen(url, timeout=120) as reply, partial.open("wb") as target:
                    shutil.copyfileobj(reply, target, 1 << 20)
                if (found := sha256(partial)) == file.sha256:
                    partial.replace(path)
                    return file.size
                said = f"its sha256 is {found}, locked is {file.sha256}"
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                said = str(error)
    partial.unlink(missing_ok=True)
    raise EngineError(f"cannot fetch {url}: {said}", next_step="check the network; what is there is kept")


def fetch(variant: str, out: Path, *, root: Path, files_url: str, index_url: str) -> int:
    """Fetches the packages that `lockfiles/` names for a variant; returns the bytes that were downloaded.

    `out` then holds `packages/` as the index has them, and `index/` for pip: the tools, and speculators' release.

    Raises:
        EngineError, ProcessError: a file did not come.
        PinError: a lock has no wheel for a package.
    """
    folder = root / pins.FOLDER
    wanted = {file.path: file for name in ("host", variant) for file in files(folder / f"pylock.{name}.toml")}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        total = sum(pool.map(lambda file: download(file, out, files_url), wanted.values()))
    index = out / "index"
    index.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux2014_x86_64"]
    command += ["--index-url", index_url, "--require-hashes", "-r", folder / "tools.txt", "--dest", index]
    run(command, next_step="check the network; what is there is kept")
    patches.pristine(folder, index)
    return total
