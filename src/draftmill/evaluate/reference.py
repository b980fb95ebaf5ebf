"""Greedy decoding in plain torch, with a draft and without, on any device: the yardstick that needs no serving engine.

All arithmetic is float32. In a shorter format the target's choice can depend on how many tokens a step verifies, since
sums are then rounded differently; float32 makes such ties rare enough that "equal token for token" is a test of the
loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from draftmill.evaluate.results import Counts, Decoded
from draftmill.evaluate.slots import SlotCache
from draftmill.evaluate.target import Target

if TYPE_CHECKING:
    import torch


class Proposer(Protocol):
    """What drafts tokens for a batch of rows. Implemented by `draftmill.evaluate.draft.Draft`."""

    layer_ids: tuple[int, ...]
    draft_tokens: int

    def begin(self, rows: int, capacity: int) -> None:
        """Forgets everything; `rows` sequences of at most `capacity` tokens follow."""

    def propose(
        self, states: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Drafts the tokens after the one at each row's `last`.

        Args:
            states: float32 [B, T, 3H]: the target's states at `positions`, concatenated in the order of `layer_ids`.
            next_tokens: int64 [B, T]: the token after each position.
            positions: int64 [B, T].
            last: int64 [B]: index in T of the row's last valid position; what follows it was rejected.

        Returns:
            int64 [B, draft tokens], in the target's vocabulary.
        """

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows alone (int64 indices)."""


def plain(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop: Sequence[int]
) -> list[list[int]]:
    """The target's own greedy output for one batch, by Hugging Face's `generate`: no code of the loop."""
    import torch
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=target.device)
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(stop), pad_token_id=stop[0]
    )
    with torch.inference_mode():
        rows = target.model.generate(ids, attention_mask=seen, generation_config=config)[:, width:].tolist()
    return [cut(row, max_new_tokens, stop) for row in rows]


def cut(tokens: Sequence[int], limit: int, stop: Sequence[int]) -> list[int]:
    """The first `limit` tokens, up to and with the first stop token."""
    end = next((i + 1 for i, t in enumerate(tokens) if t in stop), len(tokens))
    return list(tokens[: min(end, limit)])


def speculative(
    target: Target, proposer: Proposer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop: Sequence[int]
) -> tuple[list[list[int]], list[Counts]]:
    """Greedy speculative decoding of one batch: outputs and counts, in the order of the prompts.

    As vLLM's EAGLE-3: after each step the draft reads the target's states at the confirmed positions with the token
    after each, drafts on from the last, and the target then verifies the last known token and the drafted ones in one
    pass.
    """
    import torch

    with torch.inference_mode():
        return _Loop(target, proposer, prompts, max_new_tokens, stop).run()


class _Loop:
    """The state of one batch.

    Row r of every tensor belongs to prompt `self.prompt[r]`; a finished prompt's row is taken out.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Sequence[int],
    ) -> None:
        self.target, self.proposer, self.prompts = target, proposer, prompts
        self.limit, self.stop = max_new_tokens, stop
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.steps: list[list[int]] = [[] for _ in prompts]
        self.prompt = list(range(len(prompts)))

    def run(self) -> tuple[list[list[int]], list[Counts]]:
        drafted = self.read()
        while self.prompt:
            drafted = self.step(drafted)
        k = self.proposer.draft_tokens
        counts = [Counts(drafts=len(s), accepted=tuple(sum(a > j for a in s) for j in range(k))) for s in self.steps]
        return self.outputs, counts

    def read(self) -> torch.Tensor:
        """Reads the prompts, padded on the right, takes the first token of each output and drafts what follows it."""
        import torch

        device = self.target.device
        lengths = torch.tensor([len(p) for p in self.prompts], device=device)
        width = int(lengths.max())
        tokens = torch.tensor([[*p, *[0] * (width - len(p))] for p in self.prompts], device=device)
        positions = torch.arange(width, device=device).expand(len(self.prompts), -1)
        capacity = width + self.limit + self.proposer.draft_tokens
        self.cache = SlotCache(self.target.model.config.num_hidden_layers, capacity)
        self.proposer.begin(len(self.prompts), capacity)
        hidden, states = self.target.forward(tokens, positions, self.cache, self.proposer.layer_ids)
        row = torch.arange(len(self.prompts), device=device)
        first = self.target.choose(hidden[row, lengths - 1])
        following = tokens.roll(-1, dims=1)
        following[row, lengths - 1] = first
        drafted = self.proposer.propose(states, following, positions, lengths - 1)
        self.known, self.position = first, lengths
        return drafted[self.emit(first[:, None], torch.zeros_like(lengths))]

    def step(self, drafted: torch.Tensor) -> torch.Tensor:
        """Verifies `drafted` [B, k], emits what the target confirms and its own next token, and drafts again."""
        import torch

        tokens = torch.cat([self.known[:, None], drafted], dim=1)
        positions = self.position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden, states = self.target.forward(tokens, positions, self.cache, self.proposer.layer_ids)
        best = self.target.choose(hidden)
        accepted = (best[:, :-1] == drafted).cumprod(dim=1).sum(dim=1)
        for prompt, count in zip(self.prompt, accepted.tolist(), strict=True):
            self.steps[prompt].append(count)
        self.known = best.gather(1, accepted[:, None])[:, 0]
        self.position = self.position + accepted + 1
        rows = self.emit(best, accepted)
        if not self.prompt:
            return drafted
        # Up to `accepted`, best[:, i] is the token after position i: what was drafted there, or the target's own.
        return self.proposer.propose(states[rows], best[rows], positions[rows], accepted[rows])

    def emit(self, best: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Appends `best[r, : accepted[r] + 1]` to row r's output, and takes out the rows that are finished."""
        import torch

        going = []
        for row, (prompt, count) in enumerate(zip(self.prompt, accepted.tolist(), strict=True)):
            output = self.outputs[prompt] + best[row, : count + 1].tolist()
            self.outputs[prompt] = cut(output, self.limit, self.stop)
            if len(self.outputs[prompt]) < self.limit and self.outputs[prompt][-1] not in self.stop:
                going.append(row)
        rows = torch.tensor(going, device=best.device, dtype=torch.int64)
        if len(going) < len(self.prompt):
            self.prompt = [self.prompt[row] for row in going]
            self.known, self.position = self.known[rows], self.position[rows]
            self.cache.keep(rows)
            self.proposer.keep(rows)
        return rows


class ReferenceEngine:
    """Both ways of decoding over a whole prompt set, in batches of prompts of like length."""

    name: Literal["reference", "vllm"] = "reference"
    dtype = "float32"

    def __init__(
        self, target: Target, proposer: Proposer, *, batch: int, max_new_tokens: int, stop: Sequence[int]
    ) -> None:
        self.target, self.proposer, self.batch = target, proposer, batch
        self.max_new_tokens, self.stop = max_new_tokens, stop

    @property
    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    @property
    def device(self) -> str:
        import torch

        return torch.cuda.get_device_name() if self.target.device.type == "cuda" else "cpu"

    def decode(self, prompts: Sequence[Sequence[int]], tick: Callable[[int], None], *, drafting: bool) -> Decoded:
        """Greedy outputs in the order of the prompts. `tick` is told how many prompts a batch finished."""
        started = time.perf_counter()
        outputs: dict[int, list[int]] = {}
        counts: dict[int, Counts] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for rows in itertools.batched(order, self.batch):
            batch = [prompts[i] for i in rows]
            if drafting:
                found, counted = speculative(
                    self.target, self.proposer, batch, max_new_tokens=self.max_new_tokens, stop=self.stop
                )
                counts.update(zip(rows, counted, strict=True))
            else:
                found = plain(self.target, batch, max_new_tokens=self.max_new_tokens, stop=self.stop)
            outputs.update(zip(rows, found, strict=True))
            tick(len(rows))
        return Decoded(
            outputs=[outputs[i] for i in range(len(prompts))],
            seconds=time.perf_counter() - started,
            counts=[counts[i] for i in sorted(counts)],
        )

    def rates(self, prompts: Sequence[Sequence[int]], *, drafting: bool) -> list[float]:
        """None: what this loop takes says nothing about a server."""
        del prompts, drafting
        return []

    def gap(self, token_ids: Sequence[int]) -> float:
        return self.target.gap(token_ids)

    def close(self) -> None:
        """Nothing to end."""
