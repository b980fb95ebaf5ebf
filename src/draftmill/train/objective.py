"""What a draft's step is taught: four losses between its logits and the target's, in the draft's vocabulary.

p is the target's distribution and q the draft's, each a softmax over the draft's vocabulary. All is float32, whatever
the logits are: in bfloat16 the gradients are wrong by 3 to 31 %.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p, q), EAGLE-3's loss up to the target's entropy, which has no gradient."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """-log q of the target's first choice, which alone is accepted where the target decodes greedily."""
    return -draft.log_softmax(-1).gather(-1, target.argmax(-1, keepdim=True)).squeeze(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """1 - sum min(p, q): how often speculative sampling rejects the draft's token (Leviathan et al., 2023)."""
    return 1.0 - _overlap(draft, target)


def acceptance(draft: Tensor, target: Tensor) -> Tensor:
    """-log sum min(p, q): the likelihood of acceptance, whose gradient does not vanish where p and q hardly meet."""
    return -_overlap(draft, target).clamp(min=1e-8).log()


def _overlap(draft: Tensor, target: Tensor) -> Tensor:
    import torch

    return torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)


_LOSSES = {
    "forward_kl": forward_kl,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "acceptance": acceptance,
}


@functools.cache
def of_guesses(name: str, *, compiled: bool) -> Any:
    """The loss of the recipe's `train.loss`, of each row, as a function of three tensors.

    They are the draft's logits [P, V], the target's logits [U, V], and int64 [P]: the row of the target's that each of
    the draft's is to be like. The losses are float32 [P]. Compiled it is one kernel, where each of its parts would be a
    copy of all the logits in float32.
    """
    import torch

    loss = _LOSSES[name]

    def each(draft: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        return loss(draft.float(), target[rows].float())

    return torch.compile(each, dynamic=True) if compiled else each
