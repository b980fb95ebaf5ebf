"""A pair of packages written on the spot, and their audit."""

import base64
import hashlib
import http.server
import itertools
import json
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftmill.contract import index
from draftmill.contract.audit import Audit, audit
from draftmill.contract.findings import Finding
from draftmill.contract.sources import open_tree

Sources = dict[str, str]
Pair = Callable[..., list[Finding]]


def write(folder: Path, package: str, files: Sources | str) -> Path:
    """Writes `files` (name -> source; a plain text is the package's only module) as a package."""
    root = folder / package
    root.mkdir(parents=True, exist_ok=True)
    (root / "__init__.py").touch()
    for name, text in ({"__init__.py": files} if isinstance(files, str) else files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(root).parents:
            (root / parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def audited(tmp_path: Path) -> Callable[..., Audit]:
    count = itertools.count()

    def run(provider: Sources | str, consumer: Sources | str) -> Audit:
        folder = tmp_path / str(next(count))
        trees = [open_tree(str(write(folder, n, s))) for n, s in (("consumer", consumer), ("provider", provider))]
        return audit(*trees)

    return run


@pytest.fixture
def pair(audited: Callable[..., Audit]) -> Pair:
    """The findings on a consumer and a provider, each given as a text or as files."""
    return lambda provider, consumer: audited(provider, consumer).report.findings


def wheel_of(
    folder: Path, files: dict[str, str], *, record: bool = True, name: str = "thing-1.0-py3-none-any.whl"
) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        rows = []
        for file, text in files.items():
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{file},sha256={digest if record else 'x'},{len(text)}")
        archive.writestr("thing-1.0.dist-info/RECORD", "\n".join(rows))
    return path


@pytest.fixture
def wheel() -> Callable[..., Path]:
    """Makes a wheel: (folder, its files) -> its path."""
    return wheel_of


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """A package index on the loopback, that serves the files of a folder and answers ranges."""
    folder, asked = tmp_path / "index", []
    folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
            status, body = 200, b""
            if self.path == "/simple/thing/":
                body = json.dumps({"files": [self.row(path) for path in sorted(folder.iterdir())]}).encode()
            elif (folder / self.path[1:]).is_file():
                body = (folder / self.path[1:]).read_bytes()
                if wanted := self.headers.get("Range"):
                    first, last = wanted.removeprefix("bytes=").split("-")
                    status, body = 206, body[int(first) : int(last) + 1]
            else:
                status = 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def row(self, path: Path) -> dict[str, object]:
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            return {"filename": path.name, "url": f"/{path.name}", "hashes": {"sha256": digest}, "size": len(data)}

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(index, "_settings", lambda: {"index-url": f"http://127.0.0.1:{server.server_port}/simple"})
    yield folder, asked
    server.shutdown()
    server.server_close()
    thread.join()
