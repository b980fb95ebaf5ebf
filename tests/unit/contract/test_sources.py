"""SPECs: what is read, what is refused, and that nothing of either side ever runs."""

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from draftmill.contract import index
from draftmill.contract.archives import safe
from draftmill.contract.audit import Audit, audit
from draftmill.contract.sources import open_tree
from draftmill.errors import AuditError

Wheel = Callable[..., Path]


def sdist(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "thing-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            info = tarfile.TarInfo(file)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def test_a_wheel_an_sdist_and_a_folder_give_the_same_modules(tmp_path: Path, wheel: Wheel) -> None:
    files = {"thing/__init__.py": "x = 1\n", "thing/a/b.py": "", "thing/c.so": "binary"}
    of_wheel = open_tree(str(wheel(tmp_path, files)), tmp_path / "cache")
    source = {f"thing-1.0/src/{name}": text for name, text in files.items()} | {
        "thing-1.0/setup.py": "raise SystemExit"
    }
    of_sdist = open_tree(str(sdist(tmp_path, source)), tmp_path / "cache")
    of_folder = open_tree(str(of_wheel.root / "thing"))
    names = [[name for name, _ in tree.files()] for tree in (of_wheel, of_sdist, of_folder)]
    assert names == [["thing", "thing.a.b"]] * 3
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d, wheel: wheel(d, {"thing/core.so": "binary"}), "no Python sources"),
        (lambda d, wheel: wheel(d, {"../../evil.py": "x"}), "leaves its folder"),
        (lambda d, wheel: wheel(d, {"/etc/evil.py": "x"}), "leaves its folder"),
        (lambda d, _: sdist(d, {"thing-1.0/../../evil.py": "x"}), "leaves its folder"),
        (lambda d, _: _write(d / "no.whl", "not a zip"), "cannot unpack"),
        (lambda d, _: _write(d / "no.tar.gz", "not a tar"), "cannot unpack"),
        (lambda d, _: _write(d / "no.txt", "text"), "neither a folder"),
        (lambda d, _: d / "missing", "no such file"),
        (lambda d, _: _write(d / "empty" / "readme.md", "x").parent, "no Python sources"),
    ],
)
def test_what_is_no_package_is_refused_with_a_message(
    tmp_path: Path, make: Callable[..., Path], words: str, wheel: Wheel
) -> None:
    with pytest.raises(AuditError, match=words) as caught:
        open_tree(str(make(tmp_path, wheel)), tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert not list(tmp_path.parent.rglob("evil.py"))
    assert not list((tmp_path / "cache").glob("*/*.py"))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "thing-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("thing/passwd.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        real = tarfile.TarInfo("thing/__init__.py")
        archive.addfile(real, io.BytesIO())
    assert [name for name, _ in open_tree(str(path), tmp_path / "cache").files()] == ["thing"]


@pytest.mark.parametrize("name", ["a/b.py", "./a.py", "a..b/c.py"])
def test_plain_names_are_safe(name: str) -> None:
    assert not safe(name).is_absolute()


def test_a_version_is_fetched_once_and_then_read_from_the_cache(
    served: tuple[Path, list[str]], tmp_path: Path, wheel: Wheel
) -> None:
    folder, asked = served
    wheel(folder, {"thing/__init__.py": "x = 1\n"})
    first = open_tree("thing==1.0", tmp_path / "cache")
    count = len(asked)
    assert open_tree("thing==1.0", tmp_path / "cache").files() == first.files()
    assert len(asked) == count
    assert first.version == "1.0"


def test_of_a_large_wheel_only_the_sources_are_fetched(
    served: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Wheel
) -> None:
    folder, asked = served
    monkeypatch.setattr(index, "WHOLE", 1000)
    monkeypatch.setattr(index, "TAIL", 2000)
    monkeypatch.setattr(index, "GAP", 10)
    path = wheel(folder, {"thing/__init__.py": "x = 1\n", "thing/core.so": "b" * 50_000, "thing/z.py": "y = 2\n"})
    tree = open_tree("thing==1.0", tmp_path / "cache")
    assert [file.read_text() for _, file in tree.files()] == ["x = 1\n", "y = 2\n"]
    ranges = [line.rpartition("=")[2].split("-") for line in asked if "bytes=" in line]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert fetched < 5_000 < path.stat().st_size
    assert not [line for line in asked if line == f"/{path.name}"]


def test_sources_that_differ_from_the_wheel_s_record_are_refused(
    served: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Wheel
) -> None:
    monkeypatch.setattr(index, "WHOLE", 10)
    wheel(served[0], {"thing/__init__.py": "x = 1\n"}, record=False)
    with pytest.raises(AuditError, match="not those of the wheel's RECORD"):
        open_tree("thing==1.0", tmp_path / "cache")


def test_a_version_that_does_not_exist(
    served: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Wheel
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel(served[0], {"thing/__init__.py": ""})
    with pytest.raises(AuditError, match=r"has no thing==9\.9"):
        open_tree("thing==9.9", tmp_path / "cache")
    with pytest.raises(AuditError, match="is no version"):
        open_tree("thing==x.y", tmp_path / "cache")


def test_no_index_within_reach_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_settings", lambda: {"index-url": "http://127.0.0.1:9/simple"})
    with pytest.raises(AuditError, match="cannot be reached"):
        open_tree("thing==1.0", tmp_path / "cache")


BAD = {
    "does not parse": "def f(:\n",
    "a Python newer than this one": "def f(x) -> int:\n    return match <<< x\n",
    "null bytes": "x = 1\0\n",
    "nested too deeply": "x = " + "(" * 500 + ")" * 500 + "\n",
    "a long sum": "x = " + "+".join(["1"] * 3000) + "\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_named_on_either_side(audited: Callable[..., Audit], name: str) -> None:
    good = "def f(a): ...\n"
    used = "from provider.bad import x\nfrom provider.good import f\nf()\nx\n"
    for provider, consumer in (
        ({"bad.py": BAD[name], "good.py": good}, used),
        ({"bad.py": "x = 1\n", "good.py": good}, {"bad.py": BAD[name], "good.py": used}),
    ):
        report = audited(provider, consumer).report
        assert report.count("broken") == 1
        unresolved = [finding.message for finding in report.findings if finding.verdict == "unresolved"]
        assert name == "a long sum" or any("bad.py" in text for text in [*report.unreadable, *unresolved])


ENDLESS = {
    "a cycle of re-exports": {"a.py": "from provider.b import f\n", "b.py": "from provider.a import f\n"},
    "a cycle of stars": {"a.py": "from provider.b import *\n", "b.py": "from provider.a import *\n"},
    "a class that is its own base": {"a.py": "class f(f): ...\n", "b.py": ""},
    "classes in a circle": {
        "a.py": "from provider.b import g\nclass f(g): ...\n",
        "b.py": "from provider.a import f\nclass g(f): ...\n",
    },
    "a value defined by itself": {"a.py": "f = f.g\n", "b.py": ""},
    "functions that return each other": {"a.py": "def f(): return g()\ndef g(): return f()\n", "b.py": ""},
    "an endless chain of types": {
        "a.py": "class f:\n    def __init__(self): self.x = f()\n    def y(self): return self.x.y()\n",
        "b.py": "",
    },
    "a long chain of aliases": {"a.py": "".join(f"a{i} = a{i + 1}\n" for i in range(2000)) + "f = a0\n", "b.py": ""},
    "an alias that annotates itself": {
        "a.py": "from typing import Union\nf = Union['f', int]\ndef g() -> f: ...\n",
        "b.py": "",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.timeout(60)
def test_circles_end(audited: Callable[..., Audit], name: str) -> None:
    consumer = "from provider.a import f\nf().x.x.x.y().z\nf.x\nclass C(f): ...\n"
    assert audited(ENDLESS[name], consumer).report.findings


def test_nothing_of_either_side_is_imported_or_run(tmp_path: Path, wheel: Wheel) -> None:
    mark = tmp_path / "mark"
    leave = f"open({str(mark)!r}, 'a').write('x')\n"
    body = leave + "class A:\n    def f(self, x): ...\n"
    provider = wheel(tmp_path, {"thing/__init__.py": body, "thing/sub.py": body})
    consumer = tmp_path / "marked"
    for name in ("setup.py", "conftest.py", "sitecustomize.py", "marked/__init__.py"):
        _write(consumer / name, leave + "from thing import A\nimport thing.sub\nA().f()\n")
    before = set(sys.modules)
    result = audit(open_tree(str(consumer)), open_tree(str(provider), tmp_path / "cache"))
    assert result.report.count("broken") >= 1
    assert not mark.exists()
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"thing", "marked"}
