from pathlib import Path

import pytest

from draftmill.errors import RecipeError
from draftmill.recipe import Recipe, resolve

MINIMAL = """
[run]
name = "mine"
[target]
path = "/models/target"
[[data.sources]]
format = "messages"
path = "a.jsonl"
[data]
[[evaluate.prompts]]
name = "own"
format = "messages"
path = "p.jsonl"
"""
MINIMAL = MINIMAL.replace(
    '[[data.sources]]\nformat = "messages"\npath = "a.jsonl"\n[data]',
    '[data]\n[[data.sources]]\nformat = "messages"\npath = "a.jsonl"',
)


def test_the_demo_is_a_valid_recipe() -> None:
    recipe = Recipe.load(None)
    assert recipe.run.name == "demo"
    assert {p.name for p in recipe.evaluate.prompts} == {"humaneval", "mt_bench"}
    assert recipe.evaluate.draft_tokens == 3


def test_a_minimal_recipe_has_defaults() -> None:
    recipe = Recipe.parse(MINIMAL, name="r")
    assert recipe.extract.layers is None
    assert recipe.folder.draft == Path("runs/mine/draft")
    assert recipe.target_folder == Path("/models/target")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("[train]\nstepz = 3", "train.stepz"),
        ("[extra]\na = 1", "extra"),
        ('[train]\nsteps = "3"', "train.steps"),
        ("[train]\nsteps = 0", "train.steps"),
        ("[train]\nsteps = 1.5", "train.steps"),
        ("[train\n", "no valid TOML"),
    ],
)
def test_bad_recipes_are_refused_by_the_key(change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        Recipe.parse(MINIMAL + change, name="bad.toml")
    assert "bad.toml" in caught.value.what


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_a_runs_name_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(RecipeError, match=r"run\.name"):
        Recipe.parse(MINIMAL.replace('"mine"', f'"{name}"'), name="r")


def test_overrides() -> None:
    recipe = Recipe.parse(
        MINIMAL, name="r", overrides={"train.steps": "7", "run.name": '"x"', "extract.layers": "[1, 2, 3]"}
    )
    assert (recipe.train.steps, recipe.run.name, recipe.extract.layers) == (7, "x", [1, 2, 3])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("train.stepz", "7", "stepz"), ("train.steps", "no", "TOML"), ("run.name.x", "1", "not a section")],
)
def test_bad_overrides(key: str, value: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.parse(MINIMAL, name="r", overrides={key: value})


def test_a_missing_recipe_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml"):
        Recipe.load(tmp_path / "nowhere.toml")


def test_a_recipe_in_another_encoding_says_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(RecipeError, match=r"latin\.toml"):
        Recipe.load(path)


def test_package_paths_find_files_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "marked_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "file.txt").write_text("x")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("package:marked_package/file.txt").read_text() == "x"
    with pytest.raises(RecipeError, match="no such file"):
        resolve("package:marked_package/other.txt")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        resolve("package:no_such_package_here/file")
    assert "no_such_package_here is not installed" in caught.value.cause
