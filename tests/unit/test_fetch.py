import hashlib
from pathlib import Path

import pytest

from draftmill import fetch
from draftmill.errors import EngineError, PinError

LOCKFILES = Path(__file__).parents[2] / "lockfiles"


@pytest.mark.parametrize("name", ["cpu", "cuda", "host"])
def test_every_package_of_a_lock_has_a_wheel(name: str) -> None:
    paths = [file.path for file in fetch.files(LOCKFILES / f"pylock.{name}.toml")]
    assert len(paths) == len(set(paths))
    assert all(path.startswith("packages/") and path.endswith(".whl") for path in paths)


def test_of_two_builds_of_a_wheel_the_newer_is_fetched() -> None:
    names = [file.path.rpartition("/")[2] for file in fetch.files(LOCKFILES / "pylock.cpu.toml")]
    assert [name for name in names if name.startswith("torch-")] == [
        "torch-2.10.0-3-cp312-cp312-manylinux_2_28_x86_64.whl"
    ]


@pytest.mark.parametrize(
    ("wheel", "suits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp38-abi3-manylinux1_x86_64.manylinux_2_5_x86_64.whl", True),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_41_x86_64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_28_aarch64.whl", False),
    ],
)
def test_a_wheel_that_no_base_takes_is_not_fetched(wheel: str, suits: bool, tmp_path: Path) -> None:
    entry = f'{{ url = "https://files.pythonhosted.org/packages/aa/{wheel}", size = 1, hashes = {{ sha256 = "0" }} }}'
    lock = tmp_path / "pylock.toml"
    lock.write_text(f'[[packages]]\nname = "a"\nversion = "1"\nwheels = [{entry}]\n')
    if suits:
        assert [file.path for file in fetch.files(lock)] == [f"packages/aa/{wheel}"]
    else:
        with pytest.raises(PinError, match="no wheel of a"):
            list(fetch.files(lock))


def served(folder: Path, data: bytes) -> fetch.File:
    place = folder / "index" / "packages" / "a.whl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return fetch.File(path="packages/a.whl", size=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_a_file_is_downloaded_once(tmp_path: Path) -> None:
    file, out, base = served(tmp_path, b"wheel"), tmp_path / "out", (tmp_path / "index").as_uri()
    assert fetch.download(file, out, base + "/") == 5
    assert fetch.download(file, out, base) == 0
    (out / file.path).write_bytes(b"whee")
    assert fetch.download(file, out, base) == 5
    assert (out / file.path).read_bytes() == b"wheel"


def test_another_file_than_the_locked_one_is_refused(tmp_path: Path) -> None:
    file, out, base = served(tmp_path, b"wheel"), tmp_path / "out", (tmp_path / "index").as_uri()
    served(tmp_path, b"other")
    with pytest.raises(EngineError, match="locked is"):
        fetch.download(file, out, base)
    assert not list(out.rglob("*.*"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    file, base = served(tmp_path, b"wheel"), (tmp_path / "nowhere").as_uri()
    with pytest.raises(EngineError, match=r"packages/a\.whl"):
        fetch.download(file, tmp_path / "out", base)
