import json
from pathlib import Path

import pytest

from draftmill import target
from draftmill.errors import TargetError

CONFIG = {"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 50}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    return tmp_path


def test_a_nested_language_model_is_the_target(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": CONFIG}))
    assert target.read_config(folder) == CONFIG
    assert target.identify(folder).num_layers == 8


@pytest.mark.parametrize("place", [0, 1_000_000, 2_999_999])
def test_the_fingerprint_sees_the_ends_of_a_weight_file(folder: Path, place: int) -> None:
    before = target.fingerprint(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[place] = 1
    (folder / "model.safetensors").write_bytes(data)
    assert target.fingerprint(folder) != before


def test_the_fingerprint_sees_names_sizes_and_the_configuration(folder: Path) -> None:
    seen = {target.fingerprint(folder)}
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    seen.add(target.fingerprint(folder))
    (folder / "other.safetensors").write_bytes(bytes(3_000_001))
    seen.add(target.fingerprint(folder))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 51}))
    seen.add(target.fingerprint(folder))
    assert len(seen) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"hidden_size": 4})])
def test_a_configuration_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(TargetError, match=r"config\.json"):
        target.read_config(folder)


def test_the_tokenizers_digest_covers_the_template(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    before = target.tokenizer_digest(folder)
    (folder / "chat_template.jinja").write_text("x")
    assert target.tokenizer_digest(folder) != before
