"""The reference loop against a second implementation, on a small target whose every choice can be recomputed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from speculators.models.eagle3.model_definitions import LlamaDecoderEagle3FirstLayer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from draftmill import evaluate
from draftmill.errors import DataError, LayerError, StackError, TargetError, TrainingError
from draftmill.evaluate import reference, results, vllm_engine
from draftmill.evaluate.draft import Draft, DraftConfig
from draftmill.evaluate.results import Counts
from draftmill.evaluate.target import Target
from draftmill.recipe import Recipe

VOCABULARY, WIDTH, LAYERS, IDS, STOP, LIMIT = 12, 64, 8, (2, 4, 5), (11,), 24
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 500.0,
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a vocabulary so small that an untrained draft is often right by chance."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, initializer_range=0.2, eos_token_id=STOP[0], bos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w11", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def make_draft(
    folder: Path, *, layers: int = 1, norm_before_residual: bool = False, seed: int = 1, **config: Any
) -> Path:
    """A random draft in the format that training exports."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    chosen = [0, 2, 3, 5, 6, 7, 9, 10]  # the draft's vocabulary: eight of the target's twelve
    weights = {
        "fc.weight": torch.randn(WIDTH, 3 * WIDTH) * 0.1,
        "embed_tokens.weight": torch.randn(VOCABULARY, WIDTH),
        "norm.weight": torch.rand(WIDTH) + 0.5,
        "lm_head.weight": torch.randn(len(chosen), WIDTH),
        "d2t": torch.tensor([token - index for index, token in enumerate(chosen)]),
        "t2d": torch.tensor([token in chosen for token in range(VOCABULARY)]),
    }
    for index in range(layers):
        for name, value in layer(index, norm_before_residual=norm_before_residual).state_dict().items():
            weights[f"layers.{index}.{name}"] = torch.randn_like(value) * 0.2 + ("norm" in name)
    save_file(weights, folder / "model.safetensors")
    written = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**SHAPE, "model_type": "llama", "num_hidden_layers": layers},
        "draft_vocab_size": len(chosen),
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(IDS),
        **config,
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    return folder


def layer(index: int, *, norm_before_residual: bool) -> torch.nn.Module:
    config = LlamaConfig(**SHAPE, num_hidden_layers=index + 1, attn_implementation="eager")
    if index:
        return LlamaDecoderLayer(config, index)
    return LlamaDecoderEagle3FirstLayer(config, 0, norm_before_residual=norm_before_residual)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 15, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY - 1, (n,), generator=generator).tolist() for n in lengths]


class Naive:
    """One prompt, no cache: every step computes the whole sequence anew, the draft with the library's own layers."""

    def __init__(self, folder: Path, draft: Path) -> None:
        self.target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = json.loads((draft / "config.json").read_text())
        from safetensors.torch import load_file

        self.w = load_file(draft / "model.safetensors")
        self.layers = torch.nn.ModuleList(
            layer(i, norm_before_residual=config["norm_before_residual"])
            for i in range(config["transformer_layer_config"]["num_hidden_layers"])
        )
        for i, module in enumerate(self.layers):
            own = f"layers.{i}."
            module.load_state_dict({k.removeprefix(own): v for k, v in self.w.items() if k.startswith(own)})
        self.norm = LlamaRMSNorm(WIDTH, eps=SHAPE["rms_norm_eps"])
        self.norm.weight.data = self.w["norm.weight"]
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**SHAPE))

    def draft(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """The residual stream at the last of the rows (hidden [T, H], token after each)."""
        embedded = self.w["embed_tokens.weight"][tokens]
        x = torch.cat([embedded, hidden], dim=-1)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        for module in self.layers:
            x = module(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.rotary(x[..., :WIDTH], positions),
            )
        return x[0, -1]

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], k: int) -> tuple[list[int], Counts]:
        known = list(prompt)
        logits = self.target(torch.tensor([known])).logits[0, -1]
        known.append(int(logits.argmax()))
        accepted: list[int] = []
        while len(known) - len(prompt) < LIMIT and known[-1] not in STOP:
            states = self.target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
            hidden = torch.cat([states[i][0] for i in IDS], dim=-1) @ self.w["fc.weight"].T
            drafted: list[int] = []
            for _ in range(k):
                last = self.draft(hidden, known[1:] + drafted)
                best = int((self.norm(last) @ self.w["lm_head.weight"].T).argmax())
                drafted.append(best + int(self.w["d2t"][best]))
                hidden = torch.cat([hidden, last[None]])
            choice = self.target(torch.tensor([known + drafted])).logits[0, len(known) - 1 :].argmax(-1).tolist()
            right = next((i for i in range(k) if drafted[i] != choice[i]), k)
            accepted.append(right)
            for token in choice[: right + 1]:
                known.append(token)
                if token in STOP or len(known) - len(prompt) == LIMIT:
                    break
        counts = Counts(drafts=len(accepted), accepted=tuple(sum(a > j for a in accepted) for j in range(k)))
        return known[len(prompt) :], counts


def engine(folder: Path, draft: Path, *, k: int, batch: int) -> reference.ReferenceEngine:
    target = Target(folder)
    proposer = Draft(draft, DraftConfig.read(draft, target.model.config), target.model, draft_tokens=k)
    return reference.ReferenceEngine(target, proposer, batch=batch, max_new_tokens=LIMIT, stop=STOP)


@pytest.mark.parametrize(
    ("k", "batch", "layers", "norm_before_residual"),
    [(3, 7, 1, False), (3, 20, 1, True), (1, 5, 1, False), (5, 20, 2, False), (4, 1, 1, True)],
)
def test_the_loop_accepts_what_recomputing_everything_for_one_prompt_accepts(
    target_folder: Path, tmp_path: Path, k: int, batch: int, layers: int, norm_before_residual: bool
) -> None:
    draft = make_draft(tmp_path, layers=layers, norm_before_residual=norm_before_residual)
    asked = prompts(20)
    found = engine(target_folder, draft, k=k, batch=batch).decode(asked, lambda _: None, drafting=True)
    naive = Naive(target_folder, draft)
    expected = [naive.run(p, k) for p in asked]
    assert found.outputs == [output for output, _ in expected]
    assert found.counts == [counts for _, counts in expected]
    total = results.total(found.counts)
    assert 0 < total.accepted[0] < total.drafts, "nothing is tested where all or nothing is accepted"
    assert any(output[-1] in STOP for output in found.outputs)
    assert any(len(output) == LIMIT for output in found.outputs)


def test_the_output_is_the_targets_own_and_another_draft_changes_only_the_counts(
    target_folder: Path, tmp_path: Path
) -> None:
    asked = prompts(30, seed=5)
    first = engine(target_folder, make_draft(tmp_path / "a"), k=3, batch=8)
    second = engine(target_folder, make_draft(tmp_path / "b", seed=2), k=3, batch=8)
    plain = first.decode(asked, lambda _: None, drafting=False)
    a, b = (e.decode(asked, lambda _: None, drafting=True) for e in (first, second))
    assert a.outputs == b.outputs == plain.outputs
    assert a.counts != b.counts
    assert plain.counts == []


class Oracle:
    """Drafts from known outputs, with the first `wrong` of each step's tokens from the end replaced."""

    layer_ids = IDS

    def __init__(self, asked: list[list[int]], outputs: list[list[int]], *, draft_tokens: int, wrong: int) -> None:
        self.full = [p + o + [0] * (draft_tokens + 1) for p, o in zip(asked, outputs, strict=True)]
        self.draft_tokens, self.wrong = draft_tokens, wrong

    def begin(self, rows: int, capacity: int) -> None:
        self.rows = list(range(rows))

    def keep(self, rows: torch.Tensor) -> None:
        self.rows = [self.rows[i] for i in rows.tolist()]

    def propose(
        self, states: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        k, drafted = self.draft_tokens, []
        for row, prompt in enumerate(self.rows):
            at = int(positions[row, last[row]])
            assert int(next_tokens[row, last[row]]) == self.full[prompt][at + 1]
            right = self.full[prompt][at + 2 : at + 2 + k]
            right += [0] * (k - len(right))
            drafted.append(right[: k - self.wrong] + [(t + 1) % VOCABULARY for t in right[k - self.wrong :]])
        assert states.shape[-1] == 3 * WIDTH
        return torch.tensor(drafted)


@pytest.mark.parametrize(("wrong", "limit", "length"), [(0, 29, 4.0), (1, 25, 3.0), (3, 25, 1.0)])
def test_a_draft_that_is_always_right_is_always_accepted(
    target_folder: Path, wrong: int, limit: int, length: float
) -> None:
    target, asked = Target(target_folder), prompts(9)
    # Without a stop token and with a limit that whole steps fill, no step is cut and every count is known.
    outputs = reference.plain(target, asked, max_new_tokens=29, stop=[VOCABULARY])
    oracle = Oracle(asked, outputs, draft_tokens=3, wrong=wrong)
    found, counts = reference.speculative(target, oracle, asked, max_new_tokens=limit, stop=[VOCABULARY])
    assert found == [o[:limit] for o in outputs]
    total = results.total(counts)
    assert 1 + sum(total.accepted) / total.drafts == length


def recipe(target: Path, prompt_file: Path, folder: Path, **settings: object) -> Recipe:
    tree = {
        "run": {"name": "r", "folder": str(folder)},
        "target": {"path": str(target)},
        "data": {"sources": [{"format": "tokens", "path": "unused"}]},
        "evaluate": {
            "prompts": [{"name": "humaneval", "format": "messages", "path": str(prompt_file)}],
            "max_new_tokens": LIMIT,
            **settings,
        },
    }
    return Recipe.model_validate(tree)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": " ".join(f"w{t}" for t in p)} for i, p in enumerate(prompts(12))]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_evaluate_writes_the_figures_and_keeps_them(
    target_folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    r = recipe(target_folder, prompt_file, tmp_path)
    make_draft(r.folder.draft)
    evaluate.evaluate(r)
    written = results.Evaluation.model_validate_json(r.folder.evaluation_json.read_bytes())
    (s,) = written.sets
    assert (s.name, s.prompts, s.equal, s.first_difference) == ("humaneval", 12, 12, None)
    assert s.acceptance_length == pytest.approx(1 + sum(s.acceptance_per_position))
    assert s.interval.low < s.acceptance_length < s.interval.high
    assert written.layers.ids == IDS
    assert "all outputs equal" in capsys.readouterr().out

    before = r.folder.evaluation_json.stat().st_mtime_ns
    evaluate.evaluate(r)
    assert "already evaluated" in capsys.readouterr().out
    assert r.folder.evaluation_json.stat().st_mtime_ns == before

    make_draft(r.folder.draft, seed=9)
    evaluate.evaluate(r)
    assert "already evaluated" not in capsys.readouterr().out
    assert r.folder.evaluation_json.stat().st_mtime_ns != before


def test_a_wrong_loop_is_reported_with_the_place(
    target_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = recipe(target_folder, prompt_file, tmp_path)
    make_draft(r.folder.draft)
    choose = Target.choose

    def wrong(self: Target, hidden: torch.Tensor) -> torch.Tensor:
        best = choose(self, hidden)
        return torch.where(best == 5, 6, best)  # what `generate` does not do

    monkeypatch.setattr(Target, "choose", wrong)
    evaluate.evaluate(r)
    (s,) = results.Evaluation.model_validate_json(r.folder.evaluation_json.read_bytes()).sets
    assert s.equal < s.prompts
    assert s.first_difference is not None
    assert (s.first_difference.expected, s.first_difference.found) == (5, 6)
    assert s.largest_gap >= s.first_difference.top2_gap > 1e-3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None}, LayerError, "names 0 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}, LayerError, "out of range"),
        ({"speculators_model_type": "medusa"}, TrainingError, "no eagle3 draft"),
        ({"transformer_layer_config": {**SHAPE, "hidden_size": 96}}, TargetError, "hidden_size is 96"),
        ({"transformer_layer_config": {**SHAPE, "vocab_size": 13}}, TargetError, "vocab_size is 13"),
        ({"transformer_layer_config": {**SHAPE, "num_hidden_layers": 2}}, TrainingError, "missing"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    target_folder: Path, prompt_file: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    r = recipe(target_folder, prompt_file, tmp_path)
    make_draft(r.folder.draft, **change)
    with pytest.raises(error, match=words):
        evaluate.evaluate(r)
    assert not r.folder.evaluation_json.exists()


def test_what_is_missing_is_named(target_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    r = recipe(target_folder, prompt_file, tmp_path)
    with pytest.raises(TrainingError, match="holds no draft"):
        evaluate.evaluate(r)
    make_draft(r.folder.draft)
    with pytest.raises(DataError, match="longer than"):
        evaluate.evaluate(recipe(target_folder, prompt_file, tmp_path, max_new_tokens=250))
    with pytest.raises(TargetError, match="cannot load the target"):
        evaluate.evaluate(recipe(tmp_path / "nothing", prompt_file, tmp_path))


@pytest.mark.parametrize(("window", "used", "fits"), [(40, True, False), (40, False, True), (None, True, True)])
def test_a_sliding_window_bounds_the_reference_loop(
    target_folder: Path, prompt_file: Path, tmp_path: Path, window: int | None, used: bool, fits: bool
) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": window, "use_sliding_window": used}
    (folder / "config.json").write_text(json.dumps(config))
    r = recipe(folder, prompt_file, tmp_path)
    make_draft(r.folder.draft)
    with nullcontext() if fits else pytest.raises(DataError, match="longer than"):
        evaluate.read(r)


def test_vllm_is_refused_where_it_has_no_speculative_decoding(
    target_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "has_cuda", lambda: False)
    monkeypatch.setattr(evaluate, "has_cuda", lambda: False)
    make_draft(recipe(target_folder, prompt_file, tmp_path).folder.draft)
    with pytest.raises(StackError, match="no speculative decoding"):
        evaluate.evaluate(recipe(target_folder, prompt_file, tmp_path, engine="vllm"))
    evaluate.evaluate(recipe(target_folder, prompt_file, tmp_path, engine="auto"))


def test_the_tokenizer_is_the_targets(target_folder: Path) -> None:
    assert evaluate.stop_tokens(target_folder, AutoTokenizer.from_pretrained(target_folder)) == STOP
