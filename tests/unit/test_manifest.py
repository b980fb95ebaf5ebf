import struct
from pathlib import Path

import pytest

from draftmill import fatbin, manifest

LOCKFILES = Path(__file__).parents[2] / "lockfiles"


@pytest.mark.parametrize("name", ["cpu", "cuda", "host"])
def test_the_parts_of_a_lock_are_the_lock(name: str, tmp_path: Path) -> None:
    lock = LOCKFILES / f"pylock.{name}.toml"
    parts = [manifest.locked(path) for path in manifest.split(lock, tmp_path)]
    whole = {name: version for part in parts for name, version in part.items()}
    assert whole == manifest.locked(lock)
    assert sum(map(len, parts)) == len(whole)


def test_the_files_can_come_from_elsewhere(tmp_path: Path) -> None:
    lock = LOCKFILES / "pylock.cuda.toml"
    paths = manifest.split(lock, tmp_path, files="https://mirror.example/files/")
    text = "".join(path.read_text() for path in paths)
    assert "pythonhosted" not in text
    assert "https://mirror.example/files/packages/" in text


@pytest.mark.parametrize(
    ("wanted", "found", "places"),
    [
        ({"a": "1"}, {"a": "1", "ours": "0"}, []),
        ({"a": "1"}, {"a": "2", "ours": "0"}, ["a"]),
        ({"a": "1"}, {"ours": "0"}, ["a"]),
        ({}, {"b": "1", "ours": "0"}, ["b"]),
        ({}, {}, ["ours"]),
    ],
)
def test_what_differs_is_found(wanted: dict[str, str], found: dict[str, str], places: list[str]) -> None:
    findings = manifest.compare(wanted, found, frozenset({"ours"}))
    assert [finding.place for finding in findings] == places


def fat(*entries: tuple[int, int]) -> bytes:
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 257, 64, 8, 0, 0, 0, 0, arch) + b"\0" * 40 for kind, arch in entries
    )
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"no code", {}),
        (fat((2, 120)), {"sm_120": 1}),
        (b"xx" + fat((2, 90), (1, 120)) + b"between" + fat((2, 90)), {"sm_90": 2, "compute_120": 1}),
        (struct.pack("<I", fatbin.MAGIC) + b"by chance", {}),
        (fat((2, 120))[:-1], {}),
    ],
)
def test_architectures_are_read(data: bytes, found: dict[str, int]) -> None:
    assert fatbin.architectures(data) == found


@pytest.mark.parametrize(
    ("wanted", "code"), [("12.0", 0), ("12.0a", 0), ("9.0;12.0", 0), ("9.0 12.0", 0), ("10.0", 1), ("12.0;10.0", 1)]
)
def test_a_library_without_the_asked_architecture_is_a_failure(wanted: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "_C.so").write_bytes(fat((2, 90), (2, 120)))
    (tmp_path / "plain.so").write_bytes(b"no code")
    assert fatbin.main([wanted, str(tmp_path)]) == code


def test_libraries_with_no_device_code_at_all_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "plain.so").write_bytes(b"no code")
    assert fatbin.main(["12.0", str(tmp_path)]) == 1
