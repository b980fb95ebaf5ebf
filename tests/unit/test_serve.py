import json
from pathlib import Path

import pytest

from draftmill import serve
from draftmill.errors import TargetError, TrainingError
from draftmill.recipe import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 9}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return Recipe.model_validate(
        {
            "run": {"name": "r", "folder": str(tmp_path)},
            "target": {"path": str(folder), "dtype": "float32"},
            "data": {"sources": [{"format": "tokens", "path": "unused"}]},
            "extract": {"tensor_parallel": 2},
            "evaluate": {"prompts": [{"name": "p", "format": "messages", "path": "unused"}], "draft_tokens": 4},
        }
    )


def test_the_server_gets_the_draft(recipe: Recipe) -> None:
    recipe.folder.draft.mkdir(parents=True)
    (recipe.folder.draft / "config.json").write_text("{}")
    words = serve.command(recipe, drafting=True)
    assert words[:4] == ["--model", str(recipe.target_folder), "--served-model-name", "r"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "--trust-remote-code" not in words
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "eagle3", "model": str(recipe.folder.draft), "num_speculative_tokens": 4}


def test_where_nothing_is_drafted_no_draft_is_needed(recipe: Recipe) -> None:
    assert "--speculative-config" not in serve.command(recipe, drafting=False)
    with pytest.raises(TrainingError, match="there is no draft in"):
        serve.command(recipe, drafting=True)


def test_a_target_without_weights_is_refused(recipe: Recipe) -> None:
    (recipe.target_folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no weights"):
        serve.command(recipe, drafting=False)
