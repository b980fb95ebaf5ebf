"""Training on the CPU: a tiny random Llama target, whose own states make the store."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from torch import Tensor

from draftmill.errors import (
    DraftmillError,
    Interrupted,
    LayerError,
    RecipeError,
    StoreError,
    TargetError,
    TrainingError,
)
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Sample
from draftmill.target import identify
from draftmill.train import data, draft, loop, loss, noise, order, schedule, train, ttt, vocabulary
from draftmill.train.ranks import Ranks

VOCABULARY, HIDDEN, LAYERS = 96, 32, 6
IDS = (1, 3, 5)
EOS = 2

RECIPE = """
[run]
name = "tiny"
folder = "{folder}"
seed = 3
[target]
path = "{target}"
[[data.sources]]
format = "tokens"
path = "unused"
[train]
steps = {steps}
pack_tokens = 64
learning_rate = 2e-3
warmup_steps = 2
ttt_steps = 3
ttt_step_loss_decay = 0.8
draft_vocab_size = 48
checkpoint_steps = 4
validate_steps = 5
{extra}
[evaluate]
draft_tokens = 3
[[evaluate.prompts]]
name = "unused"
format = "messages"
path = "unused"
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=5000.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rms_norm_eps=1e-5,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(target: Path) -> list[Sample]:
    return make_samples(target, count=24)


def make_samples(target: Path, *, count: int, layers: tuple[int, ...] = IDS) -> list[Sample]:
    """Sequences with two supervised spans each, and the states that the target has on them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 30, (1,), generator=generator))
        # Few different tokens, each mostly followed by its successor: something that a draft can learn.
        ids = (torch.arange(length) * 3 + torch.randint(0, 4, (1,), generator=generator)) % 40
        with torch.no_grad():
            states = model(ids[None], output_hidden_states=True).hidden_states
        mask = torch.zeros(length, dtype=torch.bool)
        mask[2 : length // 2] = True
        mask[length // 2 + 1 :] = True
        made.append(
            Sample(
                input_ids=ids,
                loss_mask=mask,
                hidden_states={k: states[k][0].to(torch.bfloat16) for k in layers},
                last_hidden_state=states[-1][0].to(torch.bfloat16),
            )
        )
    return made


def write_store(path: Path, target: Path, samples: list[Sample], *, layers: tuple[int, ...] = IDS) -> None:
    states.write_store(path, target, samples, LayerContract.of(layers, LAYERS))


@pytest.fixture
def make(tmp_path: Path, target: Path, samples: list[Sample]) -> Callable[..., Recipe]:
    """A recipe, by default with its stores written. `name` gives each its own folder."""

    def make_one(
        name: str = "runs", *, steps: int = 12, extra: str = "", train_on: list[Sample] | None = None
    ) -> Recipe:
        text = RECIPE.format(folder=tmp_path / name, target=target, steps=steps, extra=extra)
        recipe = Recipe.parse(text, name=name)
        if not recipe.folder.store_train.exists():
            write_store(recipe.folder.store_train, target, samples[:20] if train_on is None else train_on)
            write_store(recipe.folder.store_held_out, target, samples[20:])
        return recipe

    return make_one


def lines(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recipe.folder.metrics_jsonl.read_text().splitlines()]


def losses(recipe: Recipe) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(recipe)]


def trained_weights(recipe: Recipe) -> dict[str, Tensor]:
    newest = max(recipe.folder.checkpoints.iterdir())
    return dict(torch.load(newest / "state.pt", weights_only=True)["model"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, target: Path, samples: list[Sample]) -> Recipe:
    """A run of 12 steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe = Recipe.parse(RECIPE.format(folder=folder, target=target, steps=12, extra=""), name="unbroken")
    write_store(recipe.folder.store_train, target, samples[:20])
    write_store(recipe.folder.store_held_out, target, samples[20:])
    train(recipe)
    return recipe


def test_the_loss_falls_on_both_stores(make: Callable[..., Recipe]) -> None:
    recipe = make(steps=120, extra="keep_checkpoints = 2")
    train(recipe)
    found = lines(recipe)
    assert [line["step"] for line in found] == list(range(1, 121))
    assert sum(line["loss"] for line in found[-10:]) < 0.6 * sum(line["loss"] for line in found[:10])
    validations = [line for line in found if "val_loss" in line]
    assert [line["step"] for line in validations] == list(range(5, 121, 5))
    assert validations[-1]["val_loss"] < validations[0]["val_loss"]
    assert validations[-1]["val_acceptance_length"] > 1.2
    assert len(validations[-1]["val_accuracy"]) == 3
    names = [path.name.partition("-")[0] for path in recipe.folder.checkpoints.iterdir()]
    assert sorted(names) == ["best", "step", "step"]
    assert any("tfevents" in path.name for path in recipe.folder.tensorboard.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    number: signal.Signals, make: Callable[..., Recipe], unbroken: Recipe, tmp_path: Path
) -> None:
    stop_at = random.randint(2, 10)
    print(f"{number.name} at step {stop_at}")
    recipe = make()
    text = RECIPE.format(folder=tmp_path / "runs", target=recipe.target.path, steps=12, extra="")
    code = """
import os, sys, draftmill.train as t
from draftmill.errors import DraftmillError
from draftmill.recipe import Recipe
from draftmill.train import schedule
text, step, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plain = schedule.factor
def factor(now, settings):
    if now == step:
        os.kill(os.getpid(), number)
    return plain(now, settings)
schedule.factor = factor
try:
    t.train(Recipe.parse(text, name="killed"))
except DraftmillError as error:
    sys.exit(error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code, text, str(stop_at), str(int(number))], check=False)
    assert done.returncode == (Interrupted.exit_code if number == signal.SIGTERM else -signal.SIGKILL)
    done_steps = stop_at if number == signal.SIGTERM else 4 * ((stop_at - 1) // 4)
    found = [int(path.name.removeprefix("step-")) for path in recipe.folder.checkpoints.glob("step-*")]
    assert max(found, default=0) == done_steps
    train(recipe)
    assert losses(recipe) == losses(unbroken)  # to the last bit
    ours, theirs = trained_weights(recipe), trained_weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (recipe.folder.draft / "model.safetensors").read_bytes() == (
        unbroken.folder.draft / "model.safetensors"
    ).read_bytes()


def torchrun(recipe: Path, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, "-m", "draftmill", "train", "--recipe", str(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target: Path, samples: list[Sample]) -> Recipe:
    """A run of four packs a step in one process, over a number of samples and packs that no number of ranks divides."""
    recipe = of_ranks(tmp_path_factory.mktemp("alone"), target, samples)
    train(recipe)
    return recipe


def text_of_ranks(folder: Path, target: Path, parallel: str) -> str:
    extra = f'packs = 4\nnoise = 0.3\nparallel = "{parallel}"'
    return RECIPE.format(folder=folder, target=target, steps=8, extra=extra)


def of_ranks(folder: Path, target: Path, samples: list[Sample], parallel: str = "ddp") -> Recipe:
    text = text_of_ranks(folder, target, parallel)
    (folder / "recipe.toml").write_text(text)
    recipe = Recipe.parse(text, name="ranks")
    write_store(recipe.folder.store_train, target, samples[:19])
    write_store(recipe.folder.store_held_out, target, samples[19:])
    return recipe


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_steps_of_one_process(
    ranks: int, parallel: str, alone: Recipe, target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    recipe = of_ranks(tmp_path, target, samples, parallel)
    process = torchrun(tmp_path / "recipe.toml", ranks)
    told, _ = process.communicate(timeout=600)
    assert process.returncode == 0, told
    assert told.count("the draft is in") == 1
    kept = 1 if parallel == "ddp" else 1 / ranks
    assert f"{ranks} ranks; this one keeps {kept:.0%} of" in told
    for a, b in zip(lines(recipe), lines(alone), strict=True):
        whole = ("step", "epoch", "tokens", "supervised", "learning_rate")
        assert {key: a[key] for key in whole} == {key: b[key] for key in whole}
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert ("val_loss" in a) == ("val_loss" in b)
        if "val_loss" in a:
            assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-4)
            assert a["val_acceptance_length"] == pytest.approx(b["val_acceptance_length"], abs=0.05)
    ours, theirs = trained_weights(recipe), trained_weights(alone)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)


@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")])
def test_ranks_that_are_stopped_go_on_as_if_nothing_had_happened(
    before: str, after: str, alone: Recipe, target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    recipe = of_ranks(tmp_path, target, samples, before)
    process = torchrun(tmp_path / "recipe.toml", 2)
    while process.poll() is None and not (recipe.folder.metrics_jsonl.exists() and len(lines(recipe)) >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=600)
    if not recipe.folder.draft.exists():  # else it was faster than the signal
        assert "a checkpoint is written" in told
        (tmp_path / "recipe.toml").write_text(text_of_ranks(tmp_path, target, after))
        process = torchrun(tmp_path / "recipe.toml", 4)  # as many ranks as there are, not as there were
        told, _ = process.communicate(timeout=600)
        assert process.returncode == 0, told
        assert "going on after step" in told
    assert [line["step"] for line in lines(recipe)] == list(range(1, 9))
    assert [line["loss"] for line in lines(recipe)] == pytest.approx([line["loss"] for line in lines(alone)], rel=1e-4)


def test_packs_that_the_ranks_cannot_share_are_refused(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "join", lambda: Ranks(rank=1, size=4))
    monkeypatch.setattr(Ranks, "leave", lambda _: None)
    with pytest.raises(RecipeError, match="packs = 6 cannot be shared equally by 4 ranks"):
        train(make(extra="packs = 6"))


def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make()
    plain = schedule.factor

    def factor(step: int, settings: Any) -> float:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(step, settings)

    monkeypatch.setattr(schedule, "factor", factor)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="SIGINT after step 3 of 12") as raised:
        train(recipe)
    assert "again" in raised.value.next_step
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in recipe.folder.checkpoints.iterdir()] == ["step-00000003"]
    assert not recipe.folder.draft.exists()


def test_a_finished_run_says_so_and_changes_nothing(unbroken: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.folder.root.rglob("*") if p.is_file()}
    train(unbroken)
    assert "already trained" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in unbroken.folder.root.rglob("*") if p.is_file()} == before


def test_a_lost_draft_is_written_from_the_last_checkpoint(unbroken: Recipe) -> None:
    weights = unbroken.folder.draft / "model.safetensors"
    before, count = weights.read_bytes(), len(lines(unbroken))
    weights.unlink()
    (unbroken.folder.draft / "training.json").unlink()
    train(unbroken)
    assert weights.read_bytes() == before
    assert len(lines(unbroken)) == count


# The reference: one sample at a time, one start at a time, as the paper and vLLM's serving describe it.


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x: Tensor, position: int) -> Tensor:
    """x [heads, head dim]; theta 5000, linear scaling 2, as the target has."""
    half = x.shape[-1] // 2
    angle = (position / 2.0) * 5000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Reference:
    """The draft in float64, from its weights alone."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = weights

    def layer(self, token: int, state: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One position through the draft's layer; its key and value join `cache`."""
        w = {name.removeprefix("layers.0."): value for name, value in self.w.items()}
        hidden = rms_norm(state, w["hidden_norm.weight"])
        x = torch.cat([rms_norm(self.w["embed_tokens.weight"][token], w["input_layernorm.weight"]), hidden])
        q = rotate((w["self_attn.q_proj.weight"] @ x).view(4, 8), position)
        k = rotate((w["self_attn.k_proj.weight"] @ x).view(2, 8), position)
        cache.append((k, (w["self_attn.v_proj.weight"] @ x).view(2, 8)))
        heads = []
        for head in range(4):
            scores = torch.stack([q[head] @ key[head // 2] for key, _ in cache]) / math.sqrt(8)
            heads.append(sum(p * value[head // 2] for p, (_, value) in zip(scores.softmax(0), cache, strict=True)))
        out = hidden + w["self_attn.o_proj.weight"] @ torch.cat(heads)  # type: ignore[arg-type]
        x = rms_norm(out, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        return out + w["mlp.down_proj.weight"] @ gate

    def loss(self, samples: list[Sample], steps: int, decay: float) -> Tensor:
        found: list[list[Tensor]] = [[] for _ in range(steps)]
        for sample in samples:
            ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
            g = torch.cat([sample.hidden_states[k].double() for k in IDS], dim=-1)
            y = sample.last_hidden_state.double()
            for i in range(len(ids) - 1):
                cache: list[tuple[Tensor, Tensor]] = []
                for j in range(i + 1):
                    state = self.layer(ids[j + 1], self.w["fc.weight"] @ g[j], j, cache)
                for k in range(steps):
                    if k:
                        if i + 1 + k >= len(ids):
                            break
                        state = self.layer(ids[i + 1 + k], state, i + k, cache)
                    if mask[i + 1 + k]:
                        logits = self.w["lm_head.weight"] @ rms_norm(state, self.w["norm.weight"])
                        target = (self.w["verifier_lm_head.weight"] @ y[i + 1 + k]).log_softmax(0)
                        found[k].append((target.exp() * (target - logits.log_softmax(0))).sum())
        return sum((decay**k * torch.stack(of_step).mean() for k, of_step in enumerate(found)), torch.zeros(()))


def test_one_step_is_that_of_a_plain_reference(make: Callable[..., Recipe], samples: list[Sample]) -> None:
    few = samples[:5]
    recipe = make(steps=1, extra="clip_norm = 0.5\nweight_decay = 0.1", train_on=few)
    opened = data.open_train(recipe, identify(recipe.target_folder))
    chosen = vocabulary.choose(opened.counts, 48, [EOS])
    fresh = draft.build(recipe, draft.target_config(recipe), opened.contract, chosen)
    weights = {name: value.detach().double() for name, value in fresh.state_dict().items()}
    names = [name for name, p in fresh.named_parameters() if p.requires_grad]
    for name in names:
        weights[name].requires_grad_()
    first = next(order.stream(opened.usable, opened.rows, budget=64, seed=3, start=order.Position()))[0]
    assert len(first) > 1
    value = Reference(weights).loss([few[i] for i in first], steps=3, decay=0.8)
    value.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_([weights[n] for n in names], 0.5)
    rate = 2e-3 * schedule.factor(1, recipe.train)
    for name in names:
        torch.optim.AdamW([weights[name]], lr=rate, weight_decay=0.1 if weights[name].ndim > 1 else 0.0).step()

    train(recipe)
    ((_, ours, our_norm),) = losses(recipe)
    assert ours == pytest.approx(value.item(), rel=1e-5)
    assert our_norm == pytest.approx(norm.item(), rel=1e-4)
    after = trained_weights(recipe)
    assert sorted(after) == sorted(names)
    for name in names:
        assert torch.allclose(after[name].double(), weights[name].detach(), rtol=0, atol=1e-4), name
        assert not torch.equal(after[name], fresh.state_dict()[name]), name


def test_gradients_are_those_of_the_library_where_the_library_is_right(
    make: Callable[..., Recipe], samples: list[Sample]
) -> None:
    """One sample alone has no neighbour to read from, so there the library's forward and ours must agree."""
    recipe = make()
    opened = data.open_train(recipe, identify(recipe.target_folder))
    model = draft.build(
        recipe, draft.target_config(recipe), opened.contract, vocabulary.choose(opened.counts, 48, [EOS])
    )
    pack = opened.pack([4])
    rows = ttt.plan(pack, 3)
    outcome = loss.of_pack(model, pack, rows, steps=3, decay=0.8)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    _, theirs, _ = model(
        hidden_states=pack.hidden_states[None],
        input_ids=pack.input_ids[None],
        lengths=torch.tensor(pack.lengths),
        loss_mask=pack.loss_mask[None],
        verifier_last_hidden_states=pack.last_hidden_state[None],
        ttt_steps=3,
        ttt_step_loss_decay=0.8,
        use_off_policy_tokens=True,
    )
    theirs.backward()
    assert outcome.loss.item() == pytest.approx(theirs.item(), rel=1e-4)
    for name, gradient in ours.items():
        reference = dict(model.named_parameters())[name].grad
        assert torch.allclose(gradient, reference, rtol=1e-3, atol=1e-5), name


def test_a_fresh_draft_looks_at_itself_first(make: Callable[..., Recipe]) -> None:
    recipe = make()
    opened = data.open_train(recipe, identify(recipe.target_folder))
    chosen = vocabulary.choose(opened.counts, 48, [EOS])
    model = draft.build(recipe, draft.target_config(recipe), opened.contract, chosen)
    pack = opened.pack([max(opened.usable, key=lambda i: opened.store.lengths[i])])
    hidden = model.fc(pack.hidden_states)
    inputs, _ = ttt._normed(model.layers[0], 0, model.embed_tokens(pack.input_ids), hidden)
    rotary = model.rotary_emb(hidden, ttt.plan(pack, 1).every_row.positions[None])
    attention = model.layers[0].self_attn
    query = ttt._queries(attention, inputs, rotary, None)
    key, _ = ttt._keys_values(attention, inputs, rotary)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    weights = (torch.einsum("qhd,khd->hqk", query, key) * attention.scaling).softmax(-1)
    assert len(pack.input_ids) > 10
    assert weights.diagonal(dim1=1, dim2=2).mean() > 5 / len(pack.input_ids)  # alike would be 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_neighbour_in_the_pack_changes_nothing(layers: int, make: Callable[..., Recipe]) -> None:
    recipe = make(extra=f"num_layers = {layers}")
    opened = data.open_train(recipe, identify(recipe.target_folder))
    model = draft.build(
        recipe, draft.target_config(recipe), opened.contract, vocabulary.choose(opened.counts, 48, [EOS])
    )

    def sums(indices: tuple[int, ...]) -> list[tuple[float, int]]:
        pack = opened.pack(indices)
        rows = ttt.plan(pack, 3)
        outcome = loss.of_pack(model, pack, rows, steps=3, decay=1.0)
        return [(v * n, n) for v, n in zip(outcome.step_losses.tolist(), rows.starts, strict=True)]

    together, alone = sums((0, 1, 2)), [sums((i,)) for i in range(3)]
    for k in range(3):
        assert together[k][0] == pytest.approx(sum(part[k][0] for part in alone), rel=1e-4)
        assert together[k][1] == sum(part[k][1] for part in alone)


def test_the_draft_loads_in_speculators(unbroken: Recipe) -> None:
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3DraftModel

    model = SpeculatorModel.from_pretrained(unbroken.folder.draft)
    assert isinstance(model, Eagle3DraftModel)
    config = model.config
    assert config.eagle_aux_hidden_state_layer_ids == list(IDS)
    assert config.speculators_config.verifier.name_or_path == str(unbroken.target_folder.resolve())
    assert config.transformer_layer_config.rope_theta == 5000.0
    assert config.transformer_layer_config.rope_scaling["factor"] == 2.0
    (best,) = unbroken.folder.checkpoints.glob("best-*")
    for name, value in torch.load(best / "state.pt", weights_only=True).items():
        assert torch.equal(model.state_dict()[name], value.to(torch.bfloat16).float()), name


def test_the_draft_is_what_vllm_reads(unbroken: Recipe) -> None:
    """The configuration through vLLM's own parser; every tensor by the name and shape of vLLM's draft class."""
    from safetensors.torch import load_file
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    folder = unbroken.folder.draft
    config = SpeculatorsConfig.from_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert SpeculatorsConfig.extract_vllm_speculative_config(raw) == {"method": "eagle3", "num_speculative_tokens": 3}
    assert config.architectures == ["Eagle3LlamaForCausalLM"]
    assert config.draft_vocab_size == 48
    assert config.norm_before_residual is True
    assert config.eagle_aux_hidden_state_layer_ids == list(IDS)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (VOCABULARY, HIDDEN, 1)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.intermediate_size, config.hidden_act, config.rms_norm_eps) == (64, "silu", 1e-5)
    assert config.tie_word_embeddings is False
    tensors = load_file(folder / "model.safetensors")
    layer = "layers.0."
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (48, HIDDEN),
        "norm.weight": (HIDDEN,),
        "d2t": (48,),
        "t2d": (VOCABULARY,),
        layer + "hidden_norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (32, 2 * HIDDEN),
        layer + "self_attn.k_proj.weight": (16, 2 * HIDDEN),
        layer + "self_attn.v_proj.weight": (16, 2 * HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, 32),
        layer + "mlp.gate_proj.weight": (64, HIDDEN),
        layer + "mlp.up_proj.weight": (64, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, 64),
    }
    assert tensors["d2t"].dtype == torch.int64
    ids = torch.arange(48) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    assert EOS in ids.tolist()


def test_training_json_says_what_the_draft_was_trained_on(unbroken: Recipe) -> None:
    found = json.loads((unbroken.folder.draft / "training.json").read_text())
    assert found["layers"]["ids"] == list(IDS)
    assert (found["steps"], found["samples"], found["device"]) == (12, 20, "cpu")
    assert 0.9 < found["draft_vocabulary"]["coverage"] <= 1.0
    best = max((line for line in lines(unbroken) if "val_loss" in line), key=lambda line: line["val_acceptance_length"])
    assert (found["best_step"], found["held_out"]["val_loss"]) == (best["step"], best["val_loss"])


def poisoned(sample: Sample) -> Sample:
    states = sample.last_hidden_state.clone()
    states[3, 0] = float("nan")
    return Sample(
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        hidden_states=sample.hidden_states,
        last_hidden_state=states,
    )


def weights_of(draft: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(draft / "model.safetensors")


def test_the_draft_is_the_best_of_the_validations_and_training_ends_when_there_is_no_better(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1.2, 1.5, 1.5, 1.1]  # after steps 5, 10, 15 and 20; what is as long is no better
    validate, seen = loop.validate, dict[int, dict[str, Tensor]]()

    def scripted(state: loop.Run, samples: data.Samples) -> dict[str, Any]:
        seen[state.step] = {name: value.detach().clone() for name, value in state.trained.items()}
        return {**validate(state, samples), "val_acceptance_length": lengths[state.step // 5 - 1]}

    monkeypatch.setattr(loop, "validate", scripted)
    whole = make("whole", steps=40, extra="patience = 2")
    train(whole)
    assert [line["step"] for line in lines(whole)] == list(range(1, 21))
    told = json.loads((whole.folder.draft / "training.json").read_text())
    assert (told["steps"], told["best_step"], told["held_out"]["val_acceptance_length"]) == (20, 10, 1.5)
    weights = weights_of(whole.folder.draft)
    for name, value in seen[10].items():
        assert torch.equal(weights[name], value.to(torch.bfloat16)), name
    assert not torch.equal(seen[20]["fc.weight"], seen[10]["fc.weight"])
    # One that is stopped between two validations knows the best, and how long ago it was.
    broken = make("broken", steps=40, extra="patience = 2")
    step = loop.step

    def stopping(state: loop.Run, feed: Any) -> dict[str, Any]:
        if state.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, feed)

    monkeypatch.setattr(loop, "step", stopping)
    with pytest.raises(Interrupted, match="after step 14"):
        train(broken)
    monkeypatch.setattr(loop, "step", step)
    train(broken)
    assert losses(broken) == losses(whole)
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(broken.folder.draft).items())


def test_the_best_weights_have_to_be_there(make: Callable[..., Recipe]) -> None:
    import shutil

    recipe = make(steps=5)
    train(recipe)
    shutil.rmtree(recipe.folder.draft)
    (best,) = recipe.folder.checkpoints.glob("best-*")
    (best / "state.pt").write_bytes((best / "state.pt").read_bytes()[:-40])
    with pytest.raises(TrainingError, match="best validation, after step 5, cannot be read"):
        train(recipe)
    assert not recipe.folder.draft.exists()


def test_nan_in_a_sample_names_the_sample(make: Callable[..., Recipe], samples: list[Sample]) -> None:
    bad = [poisoned(s) if i == 7 else s for i, s in enumerate(samples[:20])]
    with pytest.raises(StoreError, match="sample 7 of"):
        train(make(train_on=bad))


def test_a_nan_loss_names_the_step_and_keeps_the_last_checkpoint(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loss.of_pack

    def of_pack(*args: Any, **options: Any) -> loss.Outcome:
        outcome = plain(*args, **options)
        calls.append(1)
        if len(calls) == 6:
            return loss.Outcome(
                loss=outcome.loss * float("nan"),
                step_losses=outcome.step_losses,
                accepted=outcome.accepted,
                eligible=outcome.eligible,
            )
        return outcome

    calls: list[int] = []
    recipe = make(extra="")
    monkeypatch.setattr(loss, "of_pack", of_pack)
    monkeypatch.setattr(loop, "validate", lambda *_: {"val_acceptance_length": 1.0})
    with pytest.raises(TrainingError, match="step 6: the loss is nan"):
        train(recipe)
    assert [path.name for path in recipe.folder.checkpoints.glob("step-*")] == ["step-00000004"]
    assert [line["step"] for line in lines(recipe)] == [1, 2, 3, 4, 5]


def other_layers(recipe: Recipe, target: Path, samples: list[Sample]) -> None:
    four = make_samples(target, count=2, layers=(1, 2, 3, 5))
    write_store(recipe.folder.store_train, target, four, layers=(1, 2, 3, 5))


def no_sample(recipe: Recipe, target: Path, samples: list[Sample]) -> None:
    write_store(recipe.folder.store_train, target, [])


def nothing_supervised(recipe: Recipe, target: Path, samples: list[Sample]) -> None:
    one = samples[0]
    write_store(
        recipe.folder.store_train,
        target,
        [
            Sample(
                input_ids=one.input_ids,
                loss_mask=torch.zeros_like(one.loss_mask),
                hidden_states=one.hidden_states,
                last_hidden_state=one.last_hidden_state,
            )
        ],
    )


def no_store(recipe: Recipe, target: Path, samples: list[Sample]) -> None:
    pass


def other_target(recipe: Recipe, target: Path, samples: list[Sample]) -> None:
    write_store(recipe.folder.store_train, target, samples[:2])
    manifest = recipe.folder.store_train / "manifest.json"
    found = json.loads(manifest.read_text())
    found["target"]["fingerprint"] = "0" * 64
    manifest.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("prepare", "extra", "error", "says"),
    [
        (other_layers, "", LayerError, "4 layers"),
        (no_sample, "", StoreError, "nothing to train on"),
        (nothing_supervised, "", StoreError, "none with a supervised token"),
        (no_store, "", StoreError, "no store"),
        (other_target, "", StoreError, "another target"),
        (None, "[extract]\nlayers = [1, 2, 5]", LayerError, "recipe asks for"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(
    prepare: Callable[..., None] | None,
    extra: str,
    error: type[DraftmillError],
    says: str,
    make: Callable[..., Recipe],
    tmp_path: Path,
    target: Path,
    samples: list[Sample],
) -> None:
    if prepare is None:
        recipe = make(extra=extra)
    else:
        recipe = Recipe.parse(RECIPE.format(folder=tmp_path / "runs", target=target, steps=2, extra=""), name="bad")
        prepare(recipe, target, samples)
    with pytest.raises(error, match=says):
        train(recipe)
    assert not recipe.folder.checkpoints.exists()


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(make: Callable[..., Recipe]) -> None:
    recipe = make()
    settings = recipe.train.model_copy(update={"draft_vocab_size": VOCABULARY + 1})
    with pytest.raises(TrainingError, match="97 tokens is not possible: the target has 96"):
        train(recipe.model_copy(update={"train": settings}))


def test_a_target_without_weights_is_refused(make: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TargetError, match=r"config\.json"):
        train(recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": str(empty)})}))


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"ttt_steps": 2}, {"steps": 13}, {"draft_vocab_size": 40}])
def test_the_files_of_another_run_are_refused(change: dict[str, Any], unbroken: Recipe, tmp_path: Path) -> None:
    import shutil

    run = unbroken.run.model_copy(update={"folder": str(tmp_path)})
    copy = unbroken.model_copy(update={"run": run})
    shutil.copytree(unbroken.folder.root, copy.folder.root)
    changed = copy.model_copy(update={"train": copy.train.model_copy(update=change)})
    before = sorted(path.name for path in changed.folder.checkpoints.iterdir())
    with pytest.raises(TrainingError, match="another run"):
        train(changed)
    shutil.rmtree(changed.folder.draft)
    with pytest.raises(TrainingError, match="another run's"):
        train(changed)
    assert sorted(path.name for path in changed.folder.checkpoints.iterdir()) == before
    # What has no effect on the weights may change.
    settings = copy.train.model_copy(update={"checkpoint_steps": 1, "keep_checkpoints": 5})
    train(copy.model_copy(update={"train": settings}))


def test_a_full_vocabulary_and_two_layers_train_without_a_held_out_store(make: Callable[..., Recipe]) -> None:
    recipe = make(steps=3, extra="num_layers = 2\nschedule = 'linear'")
    settings = recipe.train.model_copy(update={"draft_vocab_size": None})
    nothing_held_out = recipe.data.model_copy(update={"held_out": 0.0})
    recipe = recipe.model_copy(update={"train": settings, "data": nothing_held_out})
    started = time.monotonic()
    train(recipe)
    assert time.monotonic() - started < 60
    config = json.loads((recipe.folder.draft / "config.json").read_text())
    assert config["draft_vocab_size"] == VOCABULARY
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert all("val_loss" not in line for line in lines(recipe))


def test_with_noise_and_a_kept_head_a_stopped_run_still_goes_on_to_the_last_bit(
    make: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = "noise = 0.5\ntrain_head = false"
    whole, stopped = make("whole", extra=extra), make("stopped", extra=extra)
    train(whole)
    plain = schedule.factor

    def factor(step: int, settings: Any) -> float:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(step, settings)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(schedule, "factor", factor)
        train(stopped)
    torch.rand(5)
    train(stopped)
    assert losses(stopped) == losses(whole)
    assert "lm_head.weight" not in trained_weights(whole)
    from safetensors.torch import load_file

    head = draft.target_head(whole)
    tensors = load_file(whole.folder.draft / "model.safetensors")
    ids = torch.arange(48) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"].float(), head[ids].to(torch.bfloat16).float())


def test_noise_is_in_proportion_to_each_dimension_and_leaves_the_targets(make: Callable[..., Recipe]) -> None:
    recipe = make()
    opened = data.open_train(recipe, identify(recipe.target_folder))
    spread = noise.spread(opened)
    assert spread.shape == (3 * HIDDEN,)
    pack = opened.pack((0, 1, 2))
    blurred = noise.blurred(pack, spread, 0.5, seed="a")
    change = (blurred.hidden_states - pack.hidden_states).abs()
    assert bool((change <= 0.5 * spread + 1e-5).all())
    assert float((change / spread).mean()) == pytest.approx(0.25, rel=0.05)
    assert torch.equal(blurred.last_hidden_state, pack.last_hidden_state)
