"""Noise on the states that a draft reads in training, in proportion to how much each of their dimensions varies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from draftmill.train.data import Samples
    from draftmill.train.ttt import Pack

_LOOKED_AT = 50  # samples; the spread hardly changes with more
_SINK = 4.0


def spread(samples: Samples) -> Tensor:
    """The standard deviation of each dimension of the states, float32 [3 * H].

    Rows whose norm is several times the median's are left out: the first token of a text is an attention sink in most
    models, with a few dimensions a thousand times as large as any other token's.
    """
    import torch

    chosen = [samples.store[index] for index in samples.usable[:_LOOKED_AT]]
    found = []
    for layer in samples.contract.ids:
        states = torch.cat([sample.hidden_states[layer] for sample in chosen]).float()
        norms = states.norm(dim=-1)
        found.append(states[norms <= _SINK * norms.median()].std(0, correction=0))
    return torch.cat(found)


def blurred(pack: Pack, spread: Tensor, amount: float, *, seed: str) -> Pack:
    """The pack with uniform noise of at most `amount` times `spread` on what the draft reads; its targets stay.

    The same seed draws the same on one kind of device, whatever was drawn before.
    """
    import torch

    generator = torch.Generator(spread.device).manual_seed(random.Random(seed).getrandbits(63))
    drawn = torch.rand(pack.hidden_states.shape, dtype=spread.dtype, device=spread.device, generator=generator)
    noise = (2.0 * drawn - 1.0) * spread
    return replace(pack, hidden_states=pack.hidden_states + amount * noise)
