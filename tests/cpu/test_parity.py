"""What is extracted is what Hugging Face's model computes: the same dtype, the real target, sample by sample.

Two implementations of one model differ by rounding, and so does one of them from itself when its batch changes. That
difference is the measure: every sample has to be within twice of it, beyond the rounding to the store's bfloat16.
Where a CPU's kernels give nearly the same bits for any batch, 16 units in float32's last place are the measure.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from states import Extraction, Prompt, Reference, States, cosine, prompts, relative, typical
from torch import Tensor

from draftmill.errors import StackError

IDS = (27, 2, 15)  # in no order
LIMIT = 8192
VOCABULARY = 49_000
COSINE = 0.999
ROUNDING = 16 * 2.0**-23
HALF = 2.0**-8  # half of the distance between two bfloat16, at most, relative to them


POOL = prompts([1 + i % 7 for i in range(100)], seed=1, vocabulary=VOCABULARY)
LENGTHS = prompts([1, 2, 255, 256, 257, 700], seed=2, vocabulary=VOCABULARY)
EDGE = prompts([500] * 18, seed=3, vocabulary=VOCABULARY)  # 9000 tokens, for a budget of 8192
PREFIX = prompts([40], seed=4, vocabulary=VOCABULARY)[0]
SHARED = [*(PREFIX + tail for tail in prompts([1, 2, 17, 30], seed=5, vocabulary=VOCABULARY)), PREFIX, PREFIX]


def noise_of(reference: Reference, *batches: Sequence[Prompt]) -> dict[int | str, float]:
    """The largest relative difference, by layer, that another batch size makes to this very model."""
    found = [
        differences(states, reference.alone(prompt))
        for of in batches
        for prompt, states in zip(of, reference.batch(of), strict=True)
    ]
    return {k: max(ROUNDING, *(f[k] for f in found)) for k in found[0]}


def differences(states: States, reference: States) -> dict[int | str, float]:
    assert states.keys() == reference.keys()
    return {k: relative(states[k], reference[k]) for k in reference}


def beyond_rounding(found: Tensor, expected: Tensor) -> float:
    """The relative difference that is left when each value may be off by its rounding to bfloat16."""
    found, expected = found.double(), expected.double()
    excess = ((found - expected).abs() - HALF * expected.abs()).clamp(min=0)
    return float(excess.norm() / expected.norm())


class Checked:
    """An extraction, and the reference that every result of it is held against."""

    def __init__(self, extraction: Extraction, reference: Reference, noise: dict[int | str, float]) -> None:
        self.extraction, self.reference, self.noise = extraction, reference, noise

    def __call__(self, of: Sequence[Prompt]) -> list[States]:
        found = self.extraction.states(of)
        for number, (prompt, states) in enumerate(zip(of, found, strict=True)):
            for k, expected in self.reference.alone(prompt).items():
                place = f"prompt {number} of {len(of)}, {len(prompt)} tokens, layer {k}"
                assert cosine(states[k], expected) >= COSINE, place
                assert beyond_rounding(states[k], expected) <= 2 * self.noise[k], place
        return found


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2, "float32", IDS)


@pytest.fixture(scope="module")
def noise(reference: Reference) -> dict[int | str, float]:
    return noise_of(reference, POOL, LENGTHS[2:4], EDGE[:2])


@pytest.fixture(scope="module")
def checked(
    smollm2: Path, reference: Reference, noise: dict[int | str, float], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checked]:
    extraction = Extraction(
        smollm2, tmp_path_factory.mktemp("work"), IDS, "float32", LIMIT, max_num_batched_tokens=8192
    )
    yield Checked(extraction, reference, noise)
    extraction.engine.shutdown()


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
        for k, expected in before[tuple(prompt)].items():
            assert beyond_rounding(states[k], expected) <= 2 * checked.noise[k]


def test_states_are_those_before_the_layer_and_before_no_other(checked: Checked, smollm2: Path) -> None:
    [states] = checked(SHARED[:1])
    neighbours = Reference(smollm2, "float32", [j for k in IDS for j in (k - 1, k, k + 1)]).alone(SHARED[0])
    for k in IDS:
        assert typical(states[k], neighbours[k]) < HALF
        for other in (k - 1, k + 1):
            assert typical(states[k], neighbours[other]) > 0.1


def test_the_last_hidden_state_gives_the_logits(checked: Checked) -> None:
    [states] = checked(SHARED[:1])
    model = checked.reference.model
    with torch.no_grad():
        logits = model(torch.tensor([SHARED[0]]), use_cache=False).logits[0]
        assert relative(model.lm_head(states["last"].float()), logits) <= HALF


def test_one_token_more_than_the_limit_is_refused(checked: Checked) -> None:
    with pytest.raises(StackError, match="8194"):
        checked.extraction([[5], [5] * (LIMIT + 2)])


def test_three_ranks_and_a_budget_of_256(
    smollm2: Path, reference: Reference, noise: dict[int | str, float], tmp_path: Path
) -> None:
    ids, settings = (15, 27, 2), {"tensor_parallel": 3, "max_num_batched_tokens": 256}
    extraction = Extraction(smollm2, tmp_path, ids, "float32", 1024, **settings)
    try:
        Checked(extraction, reference, noise)([*POOL[:11], *EDGE[:3], *LENGTHS[2:5]])
    finally:
        extraction.engine.shutdown()


def test_in_bfloat16_with_a_budget_of_32(smollm2: Path, reference: Reference, tmp_path: Path) -> None:
    """As close to float32 as Hugging Face's own bfloat16 is, within twice.

    Another batch is no measure here: on a CPU without bfloat16 it changes nothing in most prompts. For the same reason,
    that it is emulated there, the prompts are few; and they are not of one or two random tokens, which some rounding
    turns into something else.
    """
    half = Reference(smollm2, "bfloat16", IDS)
    of = [*prompts([9, 17, 33], seed=8, vocabulary=VOCABULARY), PREFIX]
    from_truth = [differences(half.alone(p), reference.alone(p)) for p in of]
    ids = (2, 15, 27)
    extraction = Extraction(smollm2, tmp_path, ids, "bfloat16", 256, max_num_batched_tokens=32)
    try:
        found = extraction.states(of)
    finally:
        extraction.engine.shutdown()
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
    extraction = Extraction(tmp_path / "six", tmp_path, ids, "float32", LIMIT, max_num_batched_tokens=8192)
    try:
        longest = prompts([LIMIT], seed=7, vocabulary=VOCABULARY)[0]
        noise = noise_of(reference, POOL, [longest[:1000], longest[:900]])
        Checked(extraction, reference, noise)([POOL[0], longest, POOL[6]])
    finally:
        extraction.engine.shutdown()
