"""Each fault that the patches end, on the real engine: there without the patch, gone with it.

The unpatched release does not run on this vLLM at all; the last tests say why, call by call. So the faults are shown on
a library that has the API patches and no other: what speculators 0.3.0 does wrong without saying so.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults_probe import LAYERS, MAX_MODEL_LEN, SCENARIOS
from pydantic import ValidationError

from draftmill import patches

ROOT = Path(__file__).parents[2]
API_PATCHES = 10
Results = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of five small random layers in bfloat16: bookkeeping goes wrong on it as on a large one."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"</s>": 2, "<s>": 1, "x": 0}, unk_token="x"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def probe(tiny: Path, work: Path, path: Path | None) -> Results:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if path:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, str(Path(__file__).with_name("faults_probe.py")), str(tiny), str(work / "out.pt")]
    done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, timeout=400, check=False)
    assert (work / "out.pt").exists(), done.stderr[-3000:]
    results: Results = torch.load(work / "out.pt", weights_only=False)
    return results


@pytest.fixture(scope="module")
def patched(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return probe(tiny, tmp_path_factory.mktemp("patched"), None)


@pytest.fixture(scope="module")
def api_only(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the library with the API patches alone."""
    os.chdir(ROOT)
    names = patches.read_series()[:API_PATCHES]
    tree = patches.tree(patches.FOLDER, patches.pristine(), tmp_path_factory.mktemp("tree"), names)
    return probe(tiny, tmp_path_factory.mktemp("api"), tree / "src")


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)


def error_of(reference: Any, prompt: list[int], result: dict[str, Any], layers: list[int], shift: int = 0) -> float:
    """The largest relative error over the asked layers against Hugging Face; infinite where the shape is another."""
    with torch.no_grad():
        found = reference.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    worst = 0.0
    for layer, rows in zip(layers, result["hidden_states"], strict=False):
        wanted = found.hidden_states[layer + shift][0].float()
        if rows.shape != wanted.shape:
            return float("inf")
        worst = max(worst, float((rows.float() - wanted).norm() / wanted.norm()))
    return worst


def right(reference: Any, name: str, results: Results) -> bool:
    """Whether every prompt of a scenario got its own states, in the asked order of layers."""
    if isinstance(results[name], str):
        return False
    pairs = list(zip(SCENARIOS[name](), results[name], strict=True))
    return all(error_of(reference, prompt, result, LAYERS) < 0.05 for prompt, result in pairs)


RIGHT = [name for name in SCENARIOS if name != "too long"]


@pytest.mark.parametrize("name", RIGHT)
def test_patched_it_is_right(patched: Results, reference: Any, name: str) -> None:
    assert right(reference, name, patched), patched[name]


def shifted(reference: Any, name: str, results: Results, layers: list[int]) -> list[float]:
    """Errors against the states one layer later, in the order that the unpatched library gives them."""
    if isinstance(results[name], str):
        return [float("inf")]
    return [error_of(reference, p, r, layers, shift=1) for p, r in zip(SCENARIOS[name](), results[name], strict=True)]


def test_unpatched_it_captures_the_output_of_a_layer_from_low_to_high(api_only: Results, reference: Any) -> None:
    # Both faults at once: what comes is the output, not the input, and in the order 1, 2, 3 although 3, 1, 2 was asked.
    assert shifted(reference, "one", api_only, sorted(LAYERS))[0] < 0.05
    assert shifted(reference, "one", api_only, LAYERS)[0] > 0.1
    assert not right(reference, "one", api_only)


def test_unpatched_prompts_at_the_budgets_edge_get_others_rows(api_only: Results, reference: Any) -> None:
    assert max(shifted(reference, "budget edge", api_only, sorted(LAYERS))) > 0.1


def test_unpatched_a_prompt_of_full_length_loses_its_last_token(api_only: Results) -> None:
    assert len(api_only["full length"][0]["input_ids"]) == MAX_MODEL_LEN - 1


def test_a_prompt_that_is_too_long_is_refused_by_name(patched: Results, api_only: Results) -> None:
    assert patched["too long"].startswith(f"ValueError: Prompt 0 has {MAX_MODEL_LEN + 1} tokens")
    assert len(api_only["too long"][0]["input_ids"]) == MAX_MODEL_LEN - 1


def test_the_last_hidden_state_is_after_the_norm(patched: Results, api_only: Results, reference: Any) -> None:
    [prompt] = SCENARIOS["one"]()
    with torch.no_grad():
        found = reference.model(torch.tensor([prompt]))
    wanted = found.last_hidden_state[0].float()
    assert float((patched["one"][0]["last_hidden_state"].float() - wanted).norm() / wanted.norm()) < 0.05
    assert "last_hidden_state" not in api_only["one"][0]


# The API, call by call: what the release does is refused by the pinned vLLM.


def test_d1_the_scheduler_config_needs_is_encoder_decoder() -> None:
    from vllm.config import SchedulerConfig

    with pytest.raises(ValidationError, match="is_encoder_decoder"):
        SchedulerConfig(max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=8192)


@pytest.mark.parametrize(
    ("path", "arguments", "missing"),
    [
        (
            "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
            ("vllm_config kv_cache_groups kv_cache_specs available_memory"),
            "kv_cache_specs",
        ),
        (
            "vllm.v1.request:Request",
            "request_id prompt_token_ids sampling_params pooling_params eos_token_id arrival_time",
            "eos_token_id",
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "vllm_config kv_cache_config structured_output_manager",
            "block_size",
        ),
    ],
    ids=["D2", "D3", "D4"],
)
def test_the_releases_call_does_not_bind(path: str, arguments: str, missing: str) -> None:
    import importlib

    module, _, name = path.partition(":")
    target = getattr(importlib.import_module(module), name)
    with pytest.raises(TypeError, match=missing):
        inspect.signature(target).bind(**dict.fromkeys(arguments.split()))


def test_d5_d10_the_models_forward_is_another() -> None:
    from vllm.model_executor.models.llama import LlamaModel

    assert not hasattr(LlamaModel, "get_input_embeddings")
    assert hasattr(LlamaModel, "embed_input_ids")
    parameters = inspect.signature(inspect.unwrap(LlamaModel.forward)).parameters.values()
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def test_d6_one_rank_gives_one_reply(patched: Results) -> None:
    assert patched["the one reply"] is True


def test_d7_a_step_ends_with_sampling() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert "sample_tokens" in vars(MultiprocExecutor)


def test_d8_prefixes_are_cached_by_default() -> None:
    from vllm.config import CacheConfig

    assert CacheConfig().enable_prefix_caching is True


@pytest.mark.parametrize("tree", ["pristine", "patched"])
def test_d9_only_the_release_asks_cuda_for_memory(tree: str) -> None:
    import zipfile

    name = "speculators/data_generation/vllm_hidden_states_generator.py"
    if tree == "pristine":
        os.chdir(ROOT)
        source = zipfile.ZipFile(patches.pristine()).read(name).decode()
    else:
        import speculators

        source = (Path(speculators.__file__).parent / "data_generation" / Path(name).name).read_text()
    assert ("torch.cuda.mem_get_info()" in source) is (tree == "pristine")


@pytest.mark.parametrize("nested", [False, True])
def test_the_decoder_of_a_target_that_nests_it_is_found(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 and five other targets keep their language model inside; the rest have no such method."""
    from speculators.data_generation import custom_worker

    asked: list[tuple[int, ...]] = []
    decoder = SimpleNamespace(forward=lambda: torch.ones(1))
    target = SimpleNamespace(model=decoder)
    if nested:
        target = SimpleNamespace(get_language_model=lambda: SimpleNamespace(model=decoder))
    target.set_aux_hidden_state_layers = asked.append
    before = decoder.forward
    monkeypatch.setattr(custom_worker, "supports_eagle3", lambda model: model is target)
    worker = custom_worker.HiddenStatesWorkerExtension()
    worker.model_runner = SimpleNamespace(model=target, execute_model=None)
    worker._setup_hidden_states_capture([2, 1])
    assert asked == [(2, 1)]
    assert decoder.forward is not before
    assert torch.equal(decoder.forward(), torch.ones(1))
