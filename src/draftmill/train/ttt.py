"""EAGLE-3's training-time test (TTT): the draft's forward pass over its own outputs, and the loss over it.

A pack's row i holds (x_{i+1}, g_i, y_{i+1}, l_{i+1}): the next token, the target's hidden states before it, the
target's last hidden state after it, and whether it is supervised. From row i the draft predicts x_{i+2}, then, fed its
own hidden state and the true x_{i+2}, predicts x_{i+3}, and so on for `steps` steps, as serving does while every guess
is right. In step k the row attends to the first step's keys of its own sample up to itself, and to its own keys of
steps 1 to k.

Written over the draft's modules and not over its `forward`, for two reasons. Rows that no loss reads cost only the keys
and values that others attend to, and the vocabulary is touched for supervised rows alone. And a step never reads a
token, a mask or a target of the neighbour in the pack: the last rows of a sample have fewer steps instead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftmill.train.attention import Queries, attend, queries_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from draftmill.train.attention import KeysValues

_TARGETS = 1024  # whose logits are there at once, with those of their guesses


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Whole samples laid end to end and shifted: a sample of T tokens gives T - 1 rows; R rows in all."""

    input_ids: Tensor  # int64 [R]: x_{i+1}
    hidden_states: Tensor  # float [R, 3 * H]: g_i, the contract's layers side by side
    last_hidden_state: Tensor  # float [R, H]: y_{i+1}
    loss_mask: Tensor  # bool [R]: l_{i+1}
    lengths: tuple[int, ...]  # rows of each sample, in order

    def to(self, device: torch.device) -> Pack:
        return Pack(
            input_ids=self.input_ids.to(device, non_blocking=True),
            hidden_states=self.hidden_states.to(device, non_blocking=True),
            last_hidden_state=self.last_hidden_state.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            lengths=self.lengths,
        )

    def finite(self) -> bool:
        """Whether no state is NaN or infinite."""
        states = (self.hidden_states, self.last_hidden_state)
        # Extremes are NaN where anything is, and unlike a mask of every value they take no memory.
        return all(bool(extreme.isfinite()) for part in states if part.numel() for extreme in part.aminmax())

    def used_by(self, stream: Any) -> None:
        """Keeps the tensors' memory until what `stream` has been given by then is done, whichever stream made them."""
        for tensor in (self.input_ids, self.hidden_states, self.last_hidden_state, self.loss_mask):
            tensor.record_stream(stream)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the targets, and the guesses of all steps that aim at them."""

    targets: slice  # in `supervised`
    guesses: slice  # in `places`, across all parts
    places: Tensor  # int64 [p]: step * A + place in `active` of the row that guesses
    rows: Tensor  # int64 [p]: of each guess's target, counted from `targets.start`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rows a loss reads. Row numbers are in the pack; A rows are active, and a pack has P guesses in all."""

    supervised: Tensor  # int64 [U]: rows whose y is a target
    starts: tuple[int, ...]  # per step, how many rows guess
    places: Tensor  # int64 [P]: step * A + place in `active` of the row that guesses, in the order of their targets
    targets: Tensor  # int64 [P]: places in `supervised`, ascending
    edges: tuple[tuple[int, int], ...]  # where parts end, in `supervised` and in `places`
    every_row: Queries
    active_rows: Queries

    @property
    def parts(self) -> list[Part]:
        """Targets with their guesses, so many at a time that their logits take little memory."""
        spans = itertools.pairwise(((0, 0), *self.edges))
        return [
            Part(targets=slice(t, u), guesses=slice(g, h), places=self.places[g:h], rows=self.targets[g:h] - t)
            for (t, g), (u, h) in spans
        ]

    @property
    def active(self) -> Tensor:
        """int64 [A]: rows from which at least one step is supervised."""
        return self.active_rows.rows

    def to(self, device: torch.device, room: int) -> Plan:
        """On a device, where packs have up to `room` rows."""
        return Plan(
            supervised=self.supervised.to(device, non_blocking=True),
            starts=self.starts,
            places=self.places.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            edges=self.edges,
            every_row=self.every_row.to(device, room),
            active_rows=self.active_rows.to(device, room),
        )


def plan(pack: Pack, steps: int) -> Plan:
    """Finds the rows that a loss over `steps` steps reads: in step k from row i, target i + k of the same sample.

    The pack has to be on the CPU, where what it looks for costs no wait for a GPU.
    """
    import torch

    mask = pack.loss_mask
    count = mask.shape[0]
    rows = torch.arange(count)
    every_row = queries_of(rows, pack.lengths)
    reads = torch.zeros(steps, count, dtype=torch.bool)
    for k in range(min(steps, count)):
        reads[k, : count - k] = mask[k:] & (every_row.starts[k:] == every_row.starts[: count - k])
    active = reads.any(0).nonzero().squeeze(1)
    supervised = mask.nonzero().squeeze(1)
    place_active = torch.zeros(count, dtype=torch.long).scatter_(0, active, rows[: len(active)])
    place_target = torch.zeros(count, dtype=torch.long).scatter_(0, supervised, rows[: len(supervised)])
    parts = -(-len(supervised) // _TARGETS)  # of nearly equal size, so that none is of a shape all its own
    step, start = reads.nonzero().unbind(1)
    targets, order = place_target[start + step].sort(stable=True)
    counts = [-(-len(supervised) * part // parts) for part in range(1, parts + 1)]
    return Plan(
        supervised=supervised,
        starts=tuple(reads.sum(1).tolist()),
        places=(step * len(active) + place_active[start])[order],
        targets=targets,
        edges=tuple(zip(counts, torch.searchsorted(targets, torch.tensor(counts)).tolist(), strict=True)),
        every_row=every_row,
        active_rows=queries_of(active, pack.lengths),
    )


def unroll(model: Any, pack: Pack, rows: Plan, steps: int) -> Iterator[Tensor]:
    """The draft's hidden states of each step at the active rows, after its final norm: [A, H], `steps` times.

    Args:
        model: an `Eagle3DraftModel`.
    """
    import torch

    hidden = model.fc(pack.hidden_states)
    first: list[KeysValues] = []
    later: list[list[KeysValues]] = [[] for _ in model.layers]
    tokens = torch.nn.functional.pad(pack.input_ids, (0, steps))
    for k in range(steps):
        at = rows.active
        embeds = model.embed_tokens(pack.input_ids if k == 0 else tokens[at + k])
        positions = rows.every_row.positions if k == 0 else rows.active_rows.positions + k
        rotary = model.rotary_emb(hidden, positions[None])
        for number, layer in enumerate(model.layers):
            last = number == len(model.layers) - 1
            # In the first step every row has keys that others attend to; queries are needed where a loss reads them.
            chosen = at if k == 0 and last else None
            queries = rows.every_row if k == 0 and not last else rows.active_rows
            inputs, residual = _normed(layer, number, embeds, hidden)
            keys_values = _keys_values(layer.self_attn, inputs, rotary)
            if k == 0:
                first.append(keys_values)
                own: list[KeysValues] = []
            else:
                later[number].append(keys_values)
                own = later[number]
            query = _queries(layer.self_attn, inputs, rotary, chosen)
            attended = attend(query, first[number], own, queries, layer.self_attn.scaling)
            residual = residual if chosen is None else residual[chosen]
            hidden = residual + layer.self_attn.o_proj(attended)
            hidden = hidden + _mlp(layer.mlp, _norm(layer.post_attention_layernorm, hidden))
        yield _norm(model.norm, hidden)


def _normed(layer: Any, number: int, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's attention input and its residual. The first layer reads the token's embedding beside the hidden
    state.
    """
    import torch

    if number > 0:
        return _norm(layer.input_layernorm, hidden), hidden
    normed = _norm(layer.hidden_norm, hidden)
    residual = normed if layer.norm_before_residual else hidden
    return torch.cat([_norm(layer.input_layernorm, embeds.to(hidden.dtype)), normed], dim=-1), residual


def _norm(norm: Any, x: Tensor) -> Tensor:
    """A `LlamaRMSNorm` as one kernel, in x's dtype; the mean is float32 whatever that is."""
    import torch

    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.variance_epsilon)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    """A `LlamaMLP`."""
    from draftmill.train.gradients import GatedDown

    found: Tensor = GatedDown.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj.weight)  # type: ignore[no-untyped-call]
    return found


def _keys_values(attention: Any, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
    """Rotated keys and values, both [rows, KV heads, head dim]."""
    heads = (inputs.shape[0], -1, attention.head_dim)
    return _rotate(attention.k_proj(inputs).view(heads), rotary), attention.v_proj(inputs).view(heads)


def _queries(attention: Any, inputs: Tensor, rotary: tuple[Tensor, Tensor], chosen: Tensor | None) -> Tensor:
    """Rotated queries of the chosen rows, [rows, heads, head dim]."""
    if chosen is not None:
        inputs = inputs[chosen]
        rotary = (rotary[0][:, chosen], rotary[1][:, chosen])
    return _rotate(attention.q_proj(inputs).view(inputs.shape[0], -1, attention.head_dim), rotary)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    import torch

    cos, sin = (part[0, :, None].to(x.dtype) for part in rotary)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
