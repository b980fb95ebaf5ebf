"""What an evaluation measures: counts a prompt, figures a prompt set, and `evaluation.json`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill.errors import DataError
from draftmill.layers import LayerContract

DEFINITION = (
    "acceptance_length = 1 + accepted / drafts, as vLLM defines it: drafts are the target's verification steps (one a "
    "prompt and step; the step that reads the prompt verifies nothing and is not one), accepted are the drafted tokens "
    "that equal the target's greedy choice, up to the first that does not. Counted before the output is cut at its end "
    "token or length limit. "
    "acceptance_per_position[j] = steps that accepted at least j + 1 tokens / drafts."
)
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One prompt's verification steps, and of these how many accepted at least j + 1 drafted tokens, per j."""

    drafts: int
    accepted: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Greedy outputs in the order of the prompts, each with its stop token if it reached one.

    Args:
        counts: empty without a draft.
        seconds: wall time, the reading of the prompts included.
        totals: the engine's own counts of all prompts together, where it has any.
    """

    outputs: list[list[int]]
    seconds: float
    counts: list[Counts]
    totals: Counts | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Interval(_Record):
    """Bootstrap over prompts: each resample draws as many, with replacement, and takes the ratio of their sums."""

    level: float
    low: float
    high: float
    resamples: int
    seed: int


class Difference(_Record):
    """The first token at which an output leaves the target's own.

    Args:
        position: index in the output, from 0.
        expected, found: token ids; None where that output had already ended.
        top2_gap: the target's best logit less its second best there: near 0, both are the target's choice but for
            rounding.
    """

    prompt: str
    position: int
    expected: int | None
    found: int | None
    top2_gap: float


class Rate(_Record):
    """Output tokens a second with so many requests in flight, with the draft and by the target alone."""

    concurrency: int
    tokens_per_second: float
    plain_tokens_per_second: float


class SetResult(_Record):
    """One prompt set. `plain_*` is the target alone, by the engine's own decoding; rates are output tokens a second.

    `largest_gap` is the largest `top2_gap` of all outputs that differ: where it is within rounding, so are they.
    """

    name: str
    prompts: int
    prompt_tokens: int
    tokens: int
    drafts: int
    accepted: int
    acceptance_length: float
    interval: Interval
    acceptance_per_position: list[float]
    equal: int
    first_difference: Difference | None
    largest_gap: float | None
    seconds: float
    tokens_per_second: float
    plain_seconds: float
    plain_tokens_per_second: float
    rates: list[Rate]


class Evaluation(_Record):
    """`evaluation.json`.

    `fingerprint` is of everything that the figures depend on: with the same one, they are kept.
    """

    fingerprint: str
    definition: str = DEFINITION
    engine: Literal["reference", "vllm"]
    engine_version: str
    dtype: str
    device: str
    draft_tokens: int
    max_new_tokens: int
    batch: int
    draft: str
    draft_digest: str
    target: str
    target_digest: str
    layers: LayerContract
    sets: list[SetResult]

    @classmethod
    def read(cls, path: Path) -> "Evaluation | None":
        """What an earlier run measured; None where there is nothing, or nothing of this format."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None


def total(counts: Sequence[Counts]) -> Counts:
    """The counts of all prompts together."""
    columns = zip(*(c.accepted for c in counts), strict=True)
    return Counts(drafts=sum(c.drafts for c in counts), accepted=tuple(map(sum, columns)))


def acceptance_length(counts: Counts) -> float:
    """1 + accepted / drafts.

    Raises:
        DataError: no step verified anything: every output ended with its first token.
    """
    if not counts.drafts:
        raise DataError(
            "nothing was drafted: every output ended with its first token",
            cause="the target answers these prompts with its end token at once",
            next_step="check the prompts and the target's chat template",
        )
    return 1 + sum(counts.accepted) / counts.drafts


def interval(counts: Sequence[Counts], *, centre: float, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The percentile bootstrap interval of the acceptance length, with prompts as the unit that is drawn.

    Prompts, not steps: the steps of one answer resemble each other, and drawing them apart would make it look too sure.

    Args:
        centre: the acceptance length that the interval is for. It differs from that of `counts` only where an engine
            counts all prompts together more exactly than each; the interval is moved by that difference.
    """
    pairs = [(c.drafts, sum(c.accepted)) for c in counts if c.drafts]
    moved = centre - acceptance_length(total(counts))
    rng = random.Random(seed)
    lengths = []
    for _ in range(resamples):
        drawn = rng.choices(pairs, k=len(pairs))
        lengths.append(1 + sum(a for _, a in drawn) / sum(d for d, _ in drawn) + moved)
    lengths.sort()
    tail = round((1 - LEVEL) / 2 * (resamples - 1))
    return Interval(level=LEVEL, low=lengths[tail], high=lengths[-1 - tail], resamples=resamples, seed=seed)


def differing(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(prompt index, position) of the first difference of each output that is not the expected one."""
    rows = []
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        if list(a) != list(b):
            same = (p for p, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            rows.append((index, next(same, min(len(a), len(b)))))
    return rows
