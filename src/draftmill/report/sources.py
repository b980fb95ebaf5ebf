"""What the stages wrote, read back. A stage that has not run is None; a file that cannot be read is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill.errors import StoreError
from draftmill.layers import LayerContract


class _Source(BaseModel):
    """Another stage's file, of which the report takes these keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Raises:
        StoreError: the file is there, and is not what its stage writes."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValidationError, OSError) as error:
            rows = error.errors() if isinstance(error, ValidationError) else []
            reason = "; ".join(f"{'.'.join(map(str, r['loc']))}: {r['msg']}" for r in rows) or str(error)
            raise StoreError(
                f"{path} cannot be read: {reason}",
                cause="it was changed by hand, or written by another version of draftmill",
                next_step="run its stage again",
            ) from error


class Split(_Source):
    """Counts by split."""

    train: int
    held_out: int


class Regenerated(_Source):
    """Whether the target wrote the answers anew, and how."""

    enabled: bool
    max_new_tokens: int
    temperature: float


class Prepared(_Source):
    """`prepared.json`: conversations read, kept as samples, and dropped by reason; how the mask was made."""

    samples: Split
    tokens: Split
    supervised_tokens: Split
    read: int
    kept: int
    dropped: dict[str, int]
    mask_method: str
    regenerated: Regenerated


class Extraction(_Source):
    """`extraction.json`. `plain_prefill_tokens_per_second` is the same engine's rate with nothing extracted."""

    tokens: int
    seconds: float
    tokens_per_second: float
    bytes: int
    plain_prefill_tokens_per_second: float | None = None


class Interval(_Source):
    level: float
    low: float
    high: float


class Difference(_Source):
    prompt: str
    position: int
    top2_gap: float


class Rate(_Source):
    concurrency: int
    tokens_per_second: float
    plain_tokens_per_second: float


class SetResult(_Source):
    """One prompt set of `evaluation.json`."""

    name: str
    prompts: int
    tokens: int
    drafts: int
    acceptance_length: float
    interval: Interval
    acceptance_per_position: list[float]
    equal: int
    first_difference: Difference | None
    largest_gap: float | None = None
    tokens_per_second: float
    plain_tokens_per_second: float
    rates: list[Rate] = []


class Evaluation(_Source):
    """`evaluation.json`."""

    definition: str
    engine: str
    engine_version: str
    dtype: str
    device: str
    draft_tokens: int
    max_new_tokens: int
    batch: int
    draft_digest: str
    target_digest: str
    layers: LayerContract
    sets: list[SetResult]


class Point(_Source):
    """One line of `metrics.jsonl`: a training step, with a validation at some.

    Accuracy is by position of the draft, from the first: the share of places at which it and all before it are right.
    """

    step: int
    loss: float | None = None
    accuracy: list[float] = []
    val_loss: float | None = None
    val_accuracy: list[float] = []
    val_acceptance_length: float | None = None


class DraftConfig(_Source):
    """The draft's config.json, as vLLM reads it."""

    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class StoreManifest(_Source):
    """The store's manifest.json."""

    layers: LayerContract
    computed_in: str
    dataset_digest: str


def metrics(path: Path) -> list[Point]:
    """The lines of `metrics.jsonl`; a last one that was cut off is left out.

    Raises:
        StoreError: a whole line is not what training writes.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    points = []
    for number, line in enumerate(lines, start=1):
        try:
            points.append(Point.model_validate_json(line))
        except ValidationError as error:
            raise StoreError(
                f"{path}, line {number}, is no training step", next_step="run draftmill train again"
            ) from error
    return points
