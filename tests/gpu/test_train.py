"""Training on a GPU against training on the CPU: the kernels that only a GPU runs, and whole runs of a small draft."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import states
import torch

from draftmill import train
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Sample
from draftmill.train import attention, objective

GPU = torch.device("cuda")
WIDTH, VOCABULARY, STEPS = 256, 512, 6
RECIPE = """
[run]
name = "small"
folder = "{root}/{name}"
[target]
path = "{root}/target"
[data]
sources = [{{ format = "tokens", path = "unused" }}]
[train]
steps = {steps}
pack_tokens = 700
learning_rate = 3e-3
warmup_steps = 2
noise = {noise}
validate_steps = 3
draft_vocab_size = 300
num_layers = {layers}
[evaluate]
prompts = [{{ name = "unused", format = "messages", path = "unused" }}]
"""


@pytest.mark.parametrize("lengths", [(1,), (700,), (5, 128, 400, 1, 90)])
def test_attention_by_block_on_a_gpu_is_that_by_document(lengths: tuple[int, ...]) -> None:
    count, heads, shared, dim = sum(lengths), 4, 2, 64
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(count)[torch.rand(count, generator=generator) < 0.6] if count > 1 else torch.arange(1)
    shapes = ((len(rows), heads, dim), (count, shared, dim), (count, shared, dim))
    values = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found = []
    for way, device, dtype in (
        (attention.by_document, torch.device("cpu"), torch.float64),
        (attention.by_block, GPU, torch.float32),
    ):
        asked = attention.queries_of(rows, lengths).to(device, max(700, count))
        query, key, value = (v.detach().to(device, dtype, copy=True).requires_grad_() for v in values)
        mixed, total = way(query, (key, value), asked, dim**-0.5)
        ((mixed * torch.arange(dim, device=device)).sum() + (total**2).sum()).backward()  # type: ignore[no-untyped-call]
        parts = [mixed, total, query.grad, key.grad, value.grad]
        found.append([part.detach().cpu().double() for part in parts if part is not None])
    assert len(found[0]) == len(found[1]) == 5
    for exact, ours in zip(*found, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 2e-3  # products are TF32's at worst


@pytest.mark.parametrize("kind", ["forward_kl", "cross_entropy", "total_variation", "acceptance"])
def test_a_compiled_losss_gradient_is_that_in_double_precision(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    draft, target = (3 * torch.randn(n, 3000, generator=generator) for n in (200, 150))
    rows = torch.randint(150, (200,), generator=generator)
    logits = draft.to(GPU).requires_grad_()
    value = objective.of_guesses(kind, compiled=True)(logits, target.to(GPU), rows.to(GPU)).sum()
    value.backward()
    exact = draft.double().requires_grad_()
    wanted = objective._LOSSES[kind](exact, target.double()[rows]).sum()
    wanted.backward()
    assert logits.grad is not None and exact.grad is not None
    assert value.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert float((logits.grad.cpu().double() - exact.grad).norm() / exact.grad.norm()) < 1e-3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's configuration, embedding and head, and stores of random states for it."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    LlamaConfig(
        hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=2048, architectures=["LlamaForCausalLM"], eos_token_id=2,
    ).save_pretrained(folder / "target")  # fmt: skip
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(VOCABULARY, WIDTH).bfloat16() * 0.1 for name in names}
    save_file(weights, folder / "target" / "model.safetensors")
    return folder


def losses(root: Path, name: str, *, noise: float, layers: int) -> list[dict[str, Any]]:
    text = RECIPE.format(root=root, name=name, steps=STEPS, noise=noise, layers=layers)
    recipe = Recipe.parse(text, name="test")
    contract = LayerContract.of([2, 4, 5], 8)
    lengths = (300, 40, 250, 699, 8, 512, 120, 64)
    for path, seed in ((recipe.folder.store_train, 0), (recipe.folder.store_held_out, 1)):
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for length in lengths:
            *hidden, last = torch.randn(4, length, WIDTH, generator=generator).bfloat16()
            samples.append(
                Sample(
                    input_ids=torch.randint(3, 250, (length,), generator=generator),
                    loss_mask=torch.rand(length, generator=generator) < 0.7,
                    hidden_states=dict(zip(contract.ids, hidden, strict=True)),
                    last_hidden_state=last,
                )
            )
        states.write_store(path, root / "target", samples, contract)
    train.train(recipe)
    return [json.loads(line) for line in recipe.folder.metrics_jsonl.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_run_on_a_gpu_is_the_run_on_the_cpu_but_for_bfloat16(
    root: Path, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = losses(root, f"gpu-{layers}", noise=0.0, layers=layers)
    monkeypatch.setattr(train, "has_cuda", lambda: False)
    exact = losses(root, f"cpu-{layers}", noise=0.0, layers=layers)
    assert len(ours) == len(exact) == STEPS
    for a, b in zip(ours, exact, strict=True):
        assert a["tokens"] == b["tokens"] and a["supervised"] == b["supervised"]
        for key in {"loss", "val_loss"} & b.keys():
            assert a[key] == pytest.approx(b[key], rel=0.02), (key, a["step"])
    assert exact[-1]["loss"] != pytest.approx(exact[0]["loss"], rel=0.02)  # it has moved by more than that


def test_a_run_with_noise_on_a_gpu_ends_with_a_finite_loss(root: Path) -> None:
    assert all(math.isfinite(line["loss"]) for line in losses(root, "noise", noise=0.5, layers=1))
