"""That the decoder layers of the pinned vLLM's models are found: read from its source, since most need a GPU."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from draftmill.extract import locate

SPEC = importlib.util.find_spec("vllm.model_executor.models")
assert SPEC and SPEC.submodule_search_locations
MODELS = Path(SPEC.submodule_search_locations[0])
NOT_ONE_STREAM = {"BartDecoderLayer", "MBartDecoderLayer"}  # of an encoder and decoder, which no draft is made for


def classes(path: Path) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def arguments(layer: ast.ClassDef) -> list[str]:
    """Of its `forward`; empty where it inherits that."""
    found = [f for f in layer.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
    return [a.arg for f in found for a in (*f.args.posonlyargs, *f.args.args)][1:]


def test_every_decoder_layer_takes_what_is_looked_for() -> None:
    layers = [c for path in sorted(MODELS.glob("*.py")) for c in classes(path) if c.name.endswith("DecoderLayer")]
    named = {layer.name: arguments(layer) for layer in layers if arguments(layer)}
    assert len(named) > 60
    assert {name for name, found in named.items() if not set(found) & set(locate.HIDDEN)} == NOT_ONE_STREAM


def test_kimi_k2_5_s_are_found() -> None:
    """Its language model is DeepSeek's, marked as such beside the tower; DeepSeek's layers take both parts by name."""
    [kimi] = [c for c in classes(MODELS / "kimi_k25.py") if c.name == "KimiK25ForConditionalGeneration"]
    source = ast.unparse(kimi)
    assert "SupportsMultiModal" in [ast.unparse(base) for base in kimi.bases]  # whence get_language_model
    assert "with self._mark_language_model(vllm_config):\n            self.language_model = init_vllm" in source
    assert "architectures=['DeepseekV2ForCausalLM']" in source
    [layer] = [c for c in classes(MODELS / "deepseek_v2.py") if c.name == "DeepseekV2DecoderLayer"]
    names = tuple(arguments(layer))
    assert locate.stream(names, ("positions", "hidden", "rest", None), {}) == ("hidden", "rest")
