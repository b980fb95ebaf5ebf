"""A cache of keys and values for batches whose rows move on at different speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SlotCache:
    """Keys and values in which position p of every row is in slot p, as in vLLM's paged cache.

    A rejected token leaves an entry behind that no later query sees: a query at position q sees slots 0 to q, and all
    of these have been written anew by the time that it runs. So rows of different lengths share one batch, and nothing
    is ever cropped.
    """

    is_compileable = False

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self.positions: torch.Tensor
        self.length = 0

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Names the positions [B, T] of the next forward; returns its mask, bool [B, 1, T, slots], True where a slot is
        seen.
        """
        import torch

        self.positions = positions
        self.length = max(self.length, int(positions.max()) + 1)
        return torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        cache_kwargs: object = None,  # noqa: ARG002  the name and place that Hugging Face's attention calls with
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [B, heads, T, D] at the named positions; returns all slots so far, [B, heads, slots, D]."""
        import torch

        if not self.entries[layer]:
            rows, heads, _, _ = key.shape
            self.entries[layer] = [key.new_zeros(rows, heads, self.capacity, x.shape[-1]) for x in (key, value)]
        row = torch.arange(key.shape[0], device=key.device)[:, None]
        for stored, new in zip(self.entries[layer], (key, value), strict=True):
            stored[row, :, self.positions] = new.transpose(1, 2)
        keys, values = self.entries[layer]
        return keys[:, :, : self.length], values[:, :, : self.length]

    def keep(self, rows: torch.Tensor) -> None:
        self.entries = [[x[rows] for x in pair] for pair in self.entries]

    def get_seq_length(self, layer: int = 0) -> int:  # noqa: ARG002
        return self.length
