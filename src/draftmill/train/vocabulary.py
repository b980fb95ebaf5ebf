"""The draft's vocabulary: the tokens that the target says most often, and how they map to the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftmill.errors import StoreError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Target ids in ascending order; place i of `ids` is the draft's token i.

    `coverage` is the share of supervised tokens in the training store that the draft can say.
    """

    ids: tuple[int, ...]
    target_size: int
    coverage: float

    def mappings(self) -> tuple[Tensor, Tensor]:
        """speculators' `t2d`, bool [target size], and `d2t`, int64 [draft size]: target id = draft id + d2t[draft
        id].
        """
        import torch

        ids = torch.tensor(self.ids, dtype=torch.long)
        t2d = torch.zeros(self.target_size, dtype=torch.bool)
        t2d[ids] = True
        return t2d, ids - torch.arange(len(ids), dtype=torch.long)


class Counts:
    """How often each target token occurs, supervised and at all."""

    def __init__(self, target_size: int) -> None:
        import torch

        self.target_size = target_size
        self.supervised = torch.zeros(target_size, dtype=torch.long)
        self.seen = torch.zeros(target_size, dtype=torch.long)

    def add(self, input_ids: Tensor, loss_mask: Tensor, *, name: str) -> None:
        """Counts one sample's tokens: int64 [T] and bool [T]. `name` says which sample it is.

        Raises:
            StoreError: an id is outside the target's vocabulary.
        """
        if len(input_ids) and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.target_size:
            raise StoreError(
                f"{name} holds token ids outside the target's vocabulary of {self.target_size}",
                cause="the data was tokenised for another model",
                next_step="prepare and extract it again with this target",
            )
        self.seen += input_ids.bincount(minlength=self.target_size)
        self.supervised += input_ids[loss_mask].bincount(minlength=self.target_size)

    def covered(self, ids: Sequence[int]) -> float:
        """The share of supervised tokens that are among `ids`; 1.0 when there are none."""
        total = int(self.supervised.sum())
        return int(self.supervised[list(ids)].sum()) / total if total else 1.0


def choose(counts: Counts, size: int | None, always: Iterable[int]) -> Vocabulary:
    """The `always` tokens and then the most frequent supervised ones; ties go to those seen unsupervised, then low ids.

    Args:
        size: tokens wanted; None takes the target's whole vocabulary.
        always: tokens that the draft must be able to say, such as the end of a turn.

    Raises:
        TrainingError: `size` is larger than the target's vocabulary, or smaller than `always`.
    """
    if size is None or size == counts.target_size:
        return Vocabulary(ids=tuple(range(counts.target_size)), target_size=counts.target_size, coverage=1.0)
    forced = sorted(set(always))
    if not len(forced) <= size <= counts.target_size:
        raise TrainingError(
            f"a draft vocabulary of {size} tokens is not possible: the target has {counts.target_size}, "
            f"of which {len(forced)} are always in",
            next_step="correct train.draft_vocab_size, or leave it out for the whole vocabulary",
        )
    supervised, seen = counts.supervised.tolist(), counts.seen.tolist()
    ranked = sorted(range(counts.target_size), key=lambda token: (-supervised[token], -seen[token], token))
    chosen = set(forced)
    for token in ranked:
        if len(chosen) == size:
            break
        chosen.add(token)
    ids = tuple(sorted(chosen))
    return Vocabulary(ids=ids, target_size=counts.target_size, coverage=counts.covered(ids))
