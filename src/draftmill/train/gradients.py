"""Parts of the draft's step whose gradient is written by hand, for the memory that autograd would keep for it.

At Llama-3.1-8B's shape the draft's logits of three steps and the MLP's widest activations are most of a step's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, silu

from draftmill.train import objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from draftmill.train.ttt import Part


class GatedDown(torch.autograd.Function):
    """`linear(silu(gate) * up, weight)`, of which the product is made again in the backward pass.

    gate and up are [N, I], weight is [H, I] in whichever dtype; products are in gate's.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(silu(gate) * up, weight.to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        active = silu(gate)
        of_weight = (slope.T @ (active * up)).to(weight.dtype)
        of_product = slope @ weight.to(gate.dtype)
        of_up = active.mul_(of_product)
        return torch.ops.aten.silu_backward(of_product.mul_(up), gate), of_up, of_weight


class HeadLoss(torch.autograd.Function):
    """The draft's head and the loss over its logits, a part of the targets at a time.

    The gradient is made beside the loss, so that no part's logits outlive it; backward only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        weights: Tensor,
        states: Tensor,
        target_head: Tensor,
        parts: Sequence[Part],
        kind: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weighted loss, and what its parts are.

        Args:
            hidden: [N, H], the draft's hidden states after its final norm.
            head: [V, H], in whichever dtype; products are in hidden's.
            weights: float32 [P], of each guess in the loss.
            states: [U, H], the target's last hidden states.
            target_head: [V, H], the target's, in the draft's vocabulary.
            parts: which guesses have which targets.
            kind: the loss, of `draftmill.train.objective`.

        Returns:
            The loss, a float32 scalar; each guess's own, float32 [P]; the guesses, int64 [P], and the target's first
            choices, int64 [U], both ids in the draft's vocabulary.
        """
        of_guesses = objective.of_guesses(kind, compiled=hidden.is_cuda)
        losses = torch.empty_like(weights)
        guesses = torch.empty(len(weights), dtype=torch.long, device=hidden.device)
        choices = torch.empty(len(states), dtype=torch.long, device=hidden.device)
        wanted, head_wanted = ctx.needs_input_grad[:2]
        of_hidden = torch.zeros_like(hidden) if wanted else None
        of_head = torch.zeros_like(head, dtype=torch.float32) if head_wanted else None
        head_here, target_head = head.to(hidden.dtype), target_head.to(hidden.dtype)
        for part in parts:
            target = linear(states[part.targets].to(hidden.dtype), target_head)
            choices[part.targets] = target.argmax(-1)
            inputs = hidden[part.places]
            logits = linear(inputs, head_here).requires_grad_(wanted or head_wanted)
            guesses[part.guesses] = logits.argmax(-1)
            with torch.enable_grad():
                of_part = of_guesses(logits, target, part.rows)
            losses[part.guesses] = of_part.detach()
            if not logits.requires_grad:
                continue
            (slope,) = torch.autograd.grad(of_part, logits, weights[part.guesses])
            if of_hidden is not None:
                of_hidden[part.places] = slope @ head_here
            if of_head is not None:
                of_head += slope.T @ inputs
        ctx.slopes = of_hidden, of_head if of_head is None else of_head.to(head.dtype)
        ctx.mark_non_differentiable(losses, guesses, choices)
        return weights @ losses, losses, guesses, choices

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = (part if part is None else part.mul_(slope) for part in ctx.slopes)
        del ctx.slopes  # so that a parameter takes its gradient as it is, with no copy
        return of_hidden, of_head, None, None, None, None, None
