"""The attention of the draft's training: rows of a pack to the rows before them in the same sample, and to themselves.

Two ways to the same numbers. `by_document` multiplies one sample at a time, in plain torch. `by_block` is one kernel
for the pack, which skips blocks of 128 by 128 that no query reads: it compiles once, since its shapes are the pack's
room whatever the pack holds, and it runs where Triton does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    KeysValues = tuple[Tensor, Tensor]

BLOCK = 128
_SMALLEST_HEAD = 16  # dimensions of a head that the kernel takes


@dataclass(frozen=True, kw_only=True)
class Document:
    """One sample's part of a pack: its rows, and which of the queries are its own."""

    rows: slice
    queries: slice


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Rows of a pack that ask, in ascending order, and what each may see."""

    rows: Tensor  # int64 [Q]
    starts: Tensor  # int64 [Q]: the first row of the query's sample
    documents: list[Document]
    room: int = 0  # rows that a pack may hold, which `by_block` wants to know

    @property
    def positions(self) -> Tensor:
        """int64 [Q]: each query's place in its own sample, from 0, as serving numbers the target's positions."""
        return self.rows - self.starts

    @functools.cached_property
    def blocks(self) -> Any:
        """The `BlockMask` for `by_block`, made when first asked for: one layer never asks for every row's."""
        return blocks_of(self.rows, self.starts, self.room)

    def to(self, device: torch.device, room: int) -> Queries:
        """On a device, where packs have up to `room` rows."""
        return Queries(
            rows=self.rows.to(device, non_blocking=True),
            starts=self.starts.to(device, non_blocking=True),
            documents=self.documents,
            room=room,
        )


def queries_of(rows: Tensor, lengths: Sequence[int]) -> Queries:
    """The queries at `rows` (int64 [Q], ascending, on the CPU) of a pack of samples of so many rows each."""
    import torch

    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    first, last = torch.searchsorted(rows, begins).tolist(), torch.searchsorted(rows, ends).tolist()
    documents = [
        Document(rows=slice(begin, end), queries=slice(a, b))
        for begin, end, a, b in zip(begins.tolist(), ends.tolist(), first, last, strict=True)
        if a < b
    ]
    starts = begins[torch.searchsorted(ends, rows, right=True)]
    return Queries(rows=rows, starts=starts, documents=documents)


def attend(query: Tensor, first: KeysValues, own: Sequence[KeysValues], queries: Queries, scaling: float) -> Tensor:
    """Attention of each query to the first step's keys of its sample up to itself, and to its own row's later keys.

    Args:
        query: [Q, heads, head dim].
        first: keys and values of every row, [R, KV heads, head dim].
        own: those of the later steps, a row a query, [Q, KV heads, head dim] each.

    Returns:
        [Q, heads * head dim].
    """
    from torch.utils.checkpoint import checkpoint

    way = by_block if query.is_cuda and query.shape[-1] >= _SMALLEST_HEAD else by_document
    mixed, total = way(query, first, queries, scaling)
    if own:
        # Made again in the backward pass: it is little work, and its float32 parts take several times its inputs. Of
        # `own`, what it holds now: the caller's list has grown by then.
        kept = query, mixed, total, tuple(own), scaling
        mixed = checkpoint(_with_own, *kept, use_reentrant=False, preserve_rng_state=False)
    return mixed.flatten(1)


def _with_own(query: Tensor, mixed: Tensor, total: Tensor, own: Sequence[KeysValues], scaling: float) -> Tensor:
    """Adds the rows' own later keys to the attention to the first step's, `mixed`; [Q, heads * head dim].

    The softmax over both is each part's own, weighted by its share of the sum of exponentials.
    """
    import torch

    keys, values = (torch.stack(part)[:, :, :, None] for part in zip(*own, strict=True))  # [steps, Q, KV heads, 1, dim]
    count, shared, size = len(query), keys.shape[2], query.shape[-1]  # each key is of a group of heads
    # [steps, Q, KV heads, heads of the group]
    scores = (query.view(count, shared, -1, size).float() * keys.float()).sum(-1) * scaling
    total = total.view(count, shared, -1)
    whole = torch.cat([total[None], scores]).logsumexp(0)
    share = (scores - whole).exp()[..., None].to(values.dtype)
    kept = mixed.view(count, shared, -1, size) * (total - whole).exp()[..., None].to(mixed.dtype)
    return (kept + (share * values).sum(0)).flatten(1)


def by_document(query: Tensor, first: KeysValues, queries: Queries, scaling: float) -> KeysValues:
    """Attention to `first` alone, [Q, heads, head dim], and the logarithm of the sum of exponentials, [Q, heads]."""
    import torch

    count, heads, size = query.shape
    shared = first[0].shape[1]
    query = query.view(count, shared, heads // shared, size) * scaling
    mixed, totals = [], []
    for document in queries.documents:
        part = query[document.queries].transpose(0, 1)  # [KV heads, queries, group, head dim]
        keys, values = (x[document.rows].transpose(0, 1) for x in first)  # [KV heads, rows, head dim]
        places = torch.arange(document.rows.start, document.rows.stop, device=query.device)
        later = places[None, :] > queries.rows[document.queries, None]
        scores = (part.flatten(1, 2) @ keys.transpose(1, 2)).view(*part.shape[:3], -1)
        scores = scores.float().masked_fill(later[None, :, None], -torch.inf)
        totals.append(scores.logsumexp(-1).transpose(0, 1).flatten(1))
        weights = scores.softmax(-1).to(values.dtype)
        mixed.append((weights.flatten(1, 2) @ values).view(part.shape).transpose(0, 1).flatten(1, 2))
    return torch.cat(mixed), torch.cat(totals)


def by_block(query: Tensor, first: KeysValues, queries: Queries, scaling: float) -> KeysValues:
    """As `by_document`, by FlexAttention over `queries.blocks`."""
    from torch.nn.functional import pad

    asked, seen = queries.blocks.seq_lengths
    count, heads = query.shape[:2]

    def placed(x: Tensor, room: int) -> Tensor:
        return pad(x, (0, 0, 0, 0, 0, room - len(x))).transpose(0, 1)[None]

    flex = _flex(compiled=query.is_cuda)
    mixed, total = flex(
        placed(query, asked),
        *(placed(x, seen) for x in first),
        block_mask=queries.blocks,
        scale=scaling,
        enable_gqa=heads != first[0].shape[1],
        return_lse=True,
    )
    return mixed[0].transpose(0, 1)[:count], total[0].transpose(0, 1)[:count]


@functools.cache
def _flex(*, compiled: bool) -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def blocks_of(rows: Tensor, starts: Tensor, room: int) -> Any:
    """The BlockMask of queries at `rows`, each of which sees its sample's rows from `starts` up to itself.

    Args:
        rows, starts: int64 [Q]; at least one.
        room: rows that a pack may hold; queries and keys are padded to so many, in whole blocks.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-room // BLOCK)
    size = count * BLOCK
    # Padding asks what the last query asks, in blocks that are not computed, or whose result nobody reads.
    places = torch.arange(size, device=rows.device).clamp_(max=len(rows) - 1)
    rows, starts = rows[places], starts[places]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= rows[query]) & (key >= starts[query])

    lowest, highest = rows[::BLOCK, None], rows[BLOCK - 1 :: BLOCK, None]
    begin = torch.arange(count, device=rows.device)[None, :] * BLOCK
    end = begin + BLOCK - 1
    used = (places[::BLOCK, None] == begin.T) & (end >= starts[::BLOCK, None]) & (begin <= highest)
    whole = used & (begin >= starts[BLOCK - 1 :: BLOCK, None]) & (end <= lowest)
    return BlockMask.from_kv_blocks(
        *_ordered(used & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


def _ordered(dense: Tensor) -> KeysValues:
    """How many blocks each row of `dense` has, and which, first those it has: int32 [1, 1, n] and [1, 1, n, n]."""
    import torch

    indices = dense.byte().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1)[None, None].to(torch.int32), indices[None, None].to(torch.int32)
