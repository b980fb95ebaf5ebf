"""Extraction on a GPU against Hugging Face's model in the same dtype: four kinds of decoder, random and small.

float32 by Hugging Face is the truth; what we extract in bfloat16 has to be as near to it as Hugging Face's own bfloat16
is, within twice, for the median token (in a mixture of experts, a token near a boundary goes to another expert). An
error twice as large takes four times as much off the cosine.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import Extraction, Prompt, Reference, cosine, prompts, typical

IDS = (4, 1, 3)
LIMIT = 2048
VOCABULARY = 1000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES, head_dim=64)


def mixture() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=64, num_experts=8, norm_topk_prob=True)


def latent() -> Any:
    from transformers import DeepseekV3Config

    sizes = {**SIZES, "num_key_value_heads": 4}
    return DeepseekV3Config(
        **sizes, **EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
        topk_method="noaux_tc", scoring_func="sigmoid",
        q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_scaling=None,
    )  # fmt: skip


HUNDRED = prompts([random.Random(0).randint(1, 300) for _ in range(100)], seed=1, vocabulary=VOCABULARY)
EDGES = prompts([1, 15, 16, 17, 500, 500, 500, 1000, LIMIT], seed=2, vocabulary=VOCABULARY)


@pytest.fixture(scope="module", params=[llama, qwen3, mixture, latent], ids=lambda make: make.__name__)
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param.__name__)
    torch.manual_seed(0)
    config = request.param()
    config.initializer_range = 0.05
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[8192, 256], ids=["whole", "chunked"])
def extraction(request: Any, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extraction]:
    work = tmp_path_factory.mktemp("work")
    started = Extraction(
        target, work, IDS, "bfloat16", LIMIT, max_num_batched_tokens=request.param, gpu_memory_utilization=0.1
    )
    yield started
    started.engine.shutdown()


@pytest.fixture(scope="module")
def references(target: Path) -> tuple[Reference, Reference]:
    return Reference(target, "float32", IDS, "cuda"), Reference(target, "bfloat16", IDS, "cuda")


@pytest.mark.parametrize("of", [HUNDRED, EDGES], ids=["a hundred", "edges"])
def test_it_is_what_hugging_face_computes(
    extraction: Extraction, references: tuple[Reference, Reference], of: list[Prompt]
) -> None:
    truth, half = references
    pairs = [(f, truth.alone(p), half.alone(p)) for p, f in zip(of, extraction.states(of), strict=True)]
    for k in (*IDS, "last"):
        allowed = max(typical(theirs[k], true[k]) for _, true, theirs in pairs)
        missing = max(1e-3, 4 * max(1 - cosine(theirs[k], true[k]) for _, true, theirs in pairs))
        for prompt, (found, true, _) in zip(of, pairs, strict=True):
            place = f"{len(prompt)} tokens, layer {k}"
            assert typical(found[k], true[k]) <= 2 * allowed, place
            assert 1 - cosine(found[k], true[k]) <= missing, place
