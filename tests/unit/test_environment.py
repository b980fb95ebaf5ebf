from pathlib import Path

import pytest

from draftmill import environment, pins

ROOT = Path(__file__).parents[2]
FILES = ("lockfiles/pylock.cpu.toml", "lockfiles/pylock.demo.toml", "lockfiles/pins.toml", "pyproject.toml")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*FILES, "patches/speculators/series", "patches/speculators/0001-a.patch"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", [*FILES, "patches/speculators/series", "patches/speculators/0001-a.patch"])
def test_whatever_the_environment_is_made_from_makes_it_anew(checkout: Path, name: str) -> None:
    before = environment.inputs(checkout)
    (checkout / name).write_text("changed")
    assert environment.inputs(checkout) != before


def test_a_patch_added_or_renamed_makes_it_anew(checkout: Path) -> None:
    before = environment.inputs(checkout)
    patch = checkout / "patches/speculators/0001-a.patch"
    renamed = patch.rename(patch.with_name("0002-a.patch"))
    between = environment.inputs(checkout)
    renamed.rename(patch)
    assert before != between
    assert environment.inputs(checkout) == before


def test_what_is_installed_is_locked() -> None:
    for name in environment.LOCKS:
        assert (ROOT / pins.FOLDER / name).exists()
    assert not (set(environment.LOCKS) - {lock.file for lock in pins.load(ROOT / pins.FOLDER).locks})


def test_nothing_is_done_when_nothing_changed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    environment.STAMP.parent.mkdir()
    environment.STAMP.write_text(environment.inputs())
    monkeypatch.setenv("PATH", "")  # whatever it tried to run would fail
    environment.setup()
