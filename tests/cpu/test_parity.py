"""What the engine extracts is what Hugging Face's model computes: the same dtype, the real target, sample by sample.

Two implementations of one model differ by rounding, and so does one of them from itself when its batch changes. That
difference is the measure: every sample has to be within twice of it. Where a CPU's kernels give nearly the same bits
for any batch, 16 units in float32's last place are the measure.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftmill import compute

IDS = (27, 2, 15)  # in no order
LIMIT = 8192
VOCABULARY = 49_000
COSINE = 0.999
ROUNDING = 16 * 2.0**-23
Prompt = list[int]
States = dict[int | str, Tensor]  # by layer id, and "last"


def prompts(lengths: Sequence[int], seed: int) -> list[Prompt]:
    chosen = random.Random(seed)
    return [[chosen.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]


POOL = prompts([1 + i % 7 for i in range(100)], seed=1)
LENGTHS = prompts([1, 2, 255, 256, 257, 700], seed=2)
EDGE = prompts([500] * 18, seed=3)  # 9000 tokens, for a budget of 8192
PREFIX = prompts([40], seed=4)[0]
SHARED = [*(PREFIX + tail for tail in prompts([1, 2, 17, 30], seed=5)), PREFIX, PREFIX]


class Reference:
    """Hugging Face's model, whose states are read by hooks, before a layer and after the norm; each prompt once."""

    def __init__(self, folder: Path, dtype: str, ids: Sequence[int] = IDS) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._seen: States = {}
        self._kept: dict[tuple[int, ...], States] = {}
        for k in ids:
            self.model.model.layers[k].register_forward_pre_hook(self._note(k), with_kwargs=True)
        self.model.model.norm.register_forward_hook(lambda module, args, output: self._seen.update(last=output))

    def _note(self, k: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def batch(self, of: Sequence[Prompt]) -> list[States]:
        """The states of prompts that are computed together, padded to one length."""
        longest = max(map(len, of))
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in of])
        mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in of])
        with torch.no_grad():
            self.model.model(ids, attention_mask=mask if len(of) > 1 else None, use_cache=False)
        return [{k: rows[i, : len(p)] for k, rows in self._seen.items()} for i, p in enumerate(of)]

    def alone(self, prompt: Prompt) -> States:
        if tuple(prompt) not in self._kept:
            [states] = self.batch([prompt])
            self._kept[tuple(prompt)] = {k: rows.clone() for k, rows in states.items()}
        return self._kept[tuple(prompt)]

    def noise(self, *batches: Sequence[Prompt]) -> dict[int | str, float]:
        """The largest relative difference, by layer, that another batch size makes to this very model."""
        found = [
            differences(states, self.alone(prompt))
            for of in batches
            for prompt, states in zip(of, self.batch(of), strict=True)
        ]
        return {k: max(ROUNDING, *(f[k] for f in found)) for k in found[0]}


def differences(states: States, reference: States) -> dict[int | str, float]:
    assert states.keys() == reference.keys()
    return {k: relative(states[k], reference[k]) for k in reference}


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def cosine(found: Tensor, expected: Tensor) -> float:
    """The median token's."""
    return float(torch.cosine_similarity(found.double(), expected.double(), dim=-1).median())


def typical(found: Tensor, expected: Tensor) -> float:
    """The relative difference of the median token: one token's huge values hide what a layer does to the others."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def named(result: dict[str, Any], ids: Sequence[int] = IDS) -> States:
    """The engine's result by layer."""
    return {**dict(zip(ids, result["hidden_states"], strict=True)), "last": result["last_hidden_state"]}


class Checked:
    """An engine, and the reference that every result of it is held against."""

    def __init__(self, engine: Any, reference: Reference, ids: Sequence[int], noise: dict[int | str, float]) -> None:
        self.engine, self.reference, self.ids, self.noise = engine, reference, ids, noise

    def __call__(self, of: Sequence[Prompt]) -> list[States]:
        results = self.engine.generate([list(p) for p in of])
        assert [r["input_ids"].tolist() for r in results] == [list(p) for p in of]
        found = [named(r, self.ids) for r in results]
        for number, (prompt, states) in enumerate(zip(of, found, strict=True)):
            expected = self.reference.alone(prompt)
            for k, difference in differences(states, expected).items():
                place = f"prompt {number} of {len(of)}, {len(prompt)} tokens, layer {k}"
                assert cosine(states[k], expected[k]) >= COSINE, place
                assert difference <= 2 * self.noise[k], place
        return found


def start(folder: Path, ids: Sequence[int] = IDS, tensor_parallel: int = 1, **settings: Any) -> Any:
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    compute.set_up_vllm(tensor_parallel)
    return VllmHiddenStatesGenerator(
        str(folder), layer_ids=list(ids), tensor_parallel_size=tensor_parallel, max_num_seqs=256, **settings
    )


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2, "float32")


@pytest.fixture(scope="module")
def noise(reference: Reference) -> dict[int | str, float]:
    return reference.noise(POOL, LENGTHS[2:4], EDGE[:2])


@pytest.fixture(scope="module")
def checked(smollm2: Path, reference: Reference, noise: dict[int | str, float]) -> Iterator[Checked]:
    engine = start(smollm2, max_model_len=LIMIT, max_num_batched_tokens=8192, dtype="float32")
    yield Checked(engine, reference, IDS, noise)
    engine.executor.shutdown()


@pytest.mark.parametrize("count", [1, 2, 11, 40, 100])
def test_many_requests_in_one_call(checked: Checked, count: int) -> None:
    checked(POOL[:count])


def test_lengths_around_those_of_blocks_and_budgets(checked: Checked) -> None:
    checked(LENGTHS)


def test_the_edge_of_the_budget(checked: Checked) -> None:
    checked(EDGE)


def test_prompts_that_share_a_prefix(checked: Checked) -> None:
    checked(SHARED)


def test_the_same_call_twice_gives_the_same_bytes(checked: Checked) -> None:
    for first, second in zip(checked(POOL[:40]), checked(POOL[:40]), strict=True):
        assert all(torch.equal(first[k], second[k]) for k in first)


def test_the_order_of_a_call_changes_no_sample(checked: Checked) -> None:
    in_order = sorted(POOL[:40], key=len)
    shuffled = random.Random(6).sample(in_order, len(in_order))
    before = {tuple(p): s for p, s in zip(in_order, checked(in_order), strict=True)}
    for prompt, states in zip(shuffled, checked(shuffled), strict=True):
        for k, difference in differences(states, before[tuple(prompt)]).items():
            assert difference <= 2 * checked.noise[k]


def test_states_are_those_before_the_layer_and_before_no_other(checked: Checked, smollm2: Path) -> None:
    [states] = checked(SHARED[:1])
    neighbours = Reference(smollm2, "float32", ids=[j for k in IDS for j in (k - 1, k, k + 1)]).alone(SHARED[0])
    for k in IDS:
        assert typical(states[k], neighbours[k]) < 1e-4
        for other in (k - 1, k + 1):
            assert typical(states[k], neighbours[other]) > 0.1


def test_the_last_hidden_state_gives_the_logits(checked: Checked) -> None:
    [states] = checked(SHARED[:1])
    model = checked.reference.model
    with torch.no_grad():
        logits = model(torch.tensor([SHARED[0]]), use_cache=False).logits[0]
        assert relative(model.lm_head(states["last"]), logits) <= 4 * checked.noise["last"]


def test_one_token_more_than_the_limit_is_refused(checked: Checked) -> None:
    with pytest.raises(ValueError, match="Prompt 1 has 8193 tokens; 1 to 8192 are possible"):
        checked.engine.generate([[5], [5] * (LIMIT + 1)])
    checked(POOL[:2])


def test_three_ranks_and_a_budget_of_256(smollm2: Path, reference: Reference, noise: dict[int | str, float]) -> None:
    ids = (15, 27, 2)
    engine = start(smollm2, ids, tensor_parallel=3, max_model_len=1024, max_num_batched_tokens=256, dtype="float32")
    try:
        Checked(engine, reference, ids, noise)([*POOL[:11], *EDGE[:3], *LENGTHS[2:5]])
    finally:
        engine.executor.shutdown()


def test_in_bfloat16_with_a_budget_of_32(smollm2: Path, reference: Reference) -> None:
    """As close to float32 as Hugging Face's own bfloat16 is, within twice.

    Another batch is no measure here: on a CPU without bfloat16 it changes nothing in most prompts. For the same reason,
    that it is emulated there, the prompts are few; and they are not of one or two random tokens, which some rounding
    turns into something else.
    """
    half = Reference(smollm2, "bfloat16")
    of = [*prompts([9, 17, 33], seed=8), PREFIX]
    from_truth = [differences(half.alone(p), reference.alone(p)) for p in of]
    ids = (2, 15, 27)
    engine = start(smollm2, ids, max_model_len=256, max_num_batched_tokens=32, dtype="bfloat16")
    try:
        found = [named(result, ids) for result in engine.generate(of)]
    finally:
        engine.executor.shutdown()
    for prompt, states in zip(of, found, strict=True):
        for k, difference in differences(states, reference.alone(prompt)).items():
            assert difference <= 2 * max(f[k] for f in from_truth)
            assert cosine(states[k], half.alone(prompt)[k]) >= COSINE


def test_a_prompt_of_the_models_limit(smollm2: Path, tmp_path: Path) -> None:
    """On the target's first six layers, since attention over 8192 tokens takes minutes in all thirty."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, num_hidden_layers=6)
    model.save_pretrained(tmp_path / "six")
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path / "six")
    del model
    ids = (5, 1, 3)
    reference = Reference(tmp_path / "six", "float32", ids)
    engine = start(tmp_path / "six", ids, max_model_len=LIMIT, max_num_batched_tokens=8192, dtype="float32")
    try:
        longest = prompts([LIMIT], seed=7)[0]
        noise = reference.noise(POOL, [longest[:1000], longest[:900]])
        Checked(engine, reference, ids, noise)([POOL[0], longest, POOL[6]])
    finally:
        engine.executor.shutdown()
