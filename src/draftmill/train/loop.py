"""The training loop: steps, validation, checkpoints, and a stop at any step."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from draftmill.errors import Interrupted, TrainingError
from draftmill.train import checkpoint, loss, noise, order, schedule
from draftmill.train.feed import Batch, batches
from draftmill.train.ranks import Ranks, gathered, whole
from draftmill.train.record import Record
from draftmill.train.signals import StopRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftmill.recipe import Recipe
    from draftmill.train.data import Samples

_BETAS = (0.9, 0.95)


@dataclass(kw_only=True)
class Run:
    """All that a run of the loop works on. `identity` says what the run is, for its checkpoints."""

    recipe: Recipe
    model: Any
    train: Samples
    held_out: Samples | None
    head: Tensor | None  # the target's output embedding, [V, H]; needed to validate
    identity: Mapping[str, object]
    device: torch.device
    step: int = 0
    position: order.Position = field(default_factory=order.Position)
    seconds: float = 0.0
    ranks: Ranks = field(default_factory=Ranks)
    spread: Tensor | None = None  # float [3 * H]: what the recipe's noise is a multiple of; None for no noise
    best: checkpoint.Best | None = None

    def __post_init__(self) -> None:
        import torch

        self.model.to(self.device)
        if self.device.type == "cuda":
            for parameter in self.model.parameters():
                if not parameter.requires_grad:  # the target's own, which were bfloat16 before they were read
                    parameter.data = parameter.data.to(torch.bfloat16)
        self.sharded = self.settings.parallel == "fsdp" and self.ranks.size > 1
        self.of_pack = (
            self.ranks.shard(self.model, loss.of_pack, self.device)
            if self.sharded
            else functools.partial(loss.of_pack, self.model)
        )
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # Decay pulls matrices towards zero; a norm's scale is meant to be near one.
        groups = [
            {"params": [p for p in self.trained.values() if p.ndim > 1], "weight_decay": self.settings.weight_decay},
            {"params": [p for p in self.trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=_BETAS, fused=True)

    @property
    def settings(self) -> Any:
        return self.recipe.train

    def restore(self) -> bool:
        """Goes back to the newest checkpoint; False when there is none.

        Raises:
            TrainingError: the checkpoint is another run's, or damaged.
        """
        found = checkpoint.load(self.recipe.folder.checkpoints, identity=self.identity)
        if found is None:
            return False
        checkpoint.restore(found.tensors, self.optimiser, self.trained)
        self.step, self.position, self.seconds, self.best = found.step, found.position, found.seconds, found.best
        return True

    @property
    def ended(self) -> bool:
        """Whether the last step is done, or validation has not become better for as long as the recipe waits."""
        patience, best = self.settings.patience, self.best
        return bool(self.step >= self.settings.steps or (patience and best and best.since >= patience))

    def judge(self, figures: dict[str, Any]) -> None:
        """Takes note of a validation; the weights of the best are kept."""
        key = "val_acceptance_length"
        if self.best is not None and figures[key] <= self.best.figures[key]:
            self.best = replace(self.best, since=self.best.since + 1)
            return
        self.best = checkpoint.Best(step=self.step, figures=figures)
        weights = checkpoint.weights_of(self.trained)
        if self.ranks.first:
            checkpoint.save_best(self.recipe.folder.checkpoints, self.step, weights)

    def take_best(self) -> None:
        """Goes back to the weights of the best validation, if there was any."""
        self.ranks.wait()  # until the first rank has written them
        if self.best is not None:
            checkpoint.load_best(self.recipe.folder.checkpoints, self.best.step, self.trained)

    def save(self) -> None:
        """Writes a checkpoint of this moment, once for all ranks."""
        tensors = checkpoint.state_of(self.optimiser, self.trained)
        if not self.ranks.first:
            return
        checkpoint.save(
            self.recipe.folder.checkpoints,
            checkpoint.Checkpoint(
                step=self.step,
                position=self.position,
                seconds=self.seconds,
                tensors=tensors,
                best=self.best,
            ),
            identity=self.identity,
            keep=self.settings.keep_checkpoints,
        )


def run(state: Run) -> None:
    """Trains from `state.step` to the last step, the recipe's or that of its patience, and leaves a checkpoint of it.

    Raises:
        Interrupted: SIGTERM or Ctrl-C came; the step was finished and a checkpoint written.
        TrainingError: the loss or the gradient is no longer finite; the checkpoints are as they were.
    """
    settings, ranks = state.settings, state.ranks
    packs = order.stream(
        state.train.usable,
        state.train.rows,
        budget=settings.pack_tokens,
        seed=state.recipe.run.seed,
        start=state.position,
    )
    own = order.shares(packs, each_step=settings.packs, rank=ranks.rank, ranks=ranks.size)
    feed = batches(own, state.train, steps=settings.ttt_steps, room=settings.pack_tokens, device=state.device)
    saved = state.step
    with contextlib.closing(feed), StopRequest() as stop, _record(state) as record:
        while not state.ended and not ranks.any(stop.name, state.device):
            line = step(state, feed)
            if state.held_out and (state.step % settings.validate_steps == 0 or state.step == settings.steps):
                figures = validate(state, state.held_out)
                state.judge(figures)
                line |= figures
            if record:
                record.write(line, _scalars(line), _note(line))
            if state.step % settings.checkpoint_steps == 0 or state.ended:
                state.save()
                saved = state.step
        if saved != state.step:
            state.save()
    if not state.ended:
        raise Interrupted(
            f"training stopped by {stop.name or 'another rank'} after step {state.step} of {settings.steps}; "
            "a checkpoint is written",
            next_step="run the same command again: it goes on from there",
        )


def _record(state: Run) -> contextlib.AbstractContextManager[Record | None]:
    """The record of the run, on the rank that writes it."""
    if not state.ranks.first:
        return contextlib.nullcontext()
    folder = state.recipe.folder
    return Record(folder.metrics_jsonl, folder.tensorboard, start=state.step, steps=state.settings.steps)


def step(state: Run, feed: Iterator[Batch[order.Position]]) -> dict[str, Any]:
    """Trains on the next packs, as many as the recipe has in a step, and gives what metrics.jsonl says of it.

    The loss is the mean of the packs'. With several ranks, each goes through its share, and all figures are of all.

    Raises:
        StoreError: a sample of a pack cannot be read, or its states are not finite.
        TrainingError: the loss or the gradient is not finite; the weights are as they were.
    """
    import torch

    settings, ranks = state.settings, state.ranks
    started = time.monotonic()
    state.step += 1
    rate = settings.learning_rate * schedule.factor(state.step, settings)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    state.model.train()
    state.optimiser.zero_grad()
    total = torch.zeros((), device=state.device)
    right, possible = torch.zeros(2, settings.ttt_steps, dtype=torch.long, device=state.device)
    size = torch.zeros(2, dtype=torch.long)  # tokens, and those supervised
    indices: list[int] = []
    for number in range(ranks.rank, settings.packs, ranks.size):
        batch = next(feed)
        outcome = _outcome(state, batch, seed=f"{state.recipe.run.seed}:{state.step}:{number}")
        (outcome.loss / settings.packs).backward()
        total += outcome.loss.detach() / settings.packs
        right += outcome.accepted.sum(1)
        possible += outcome.eligible.sum(1)
        size += torch.tensor([len(batch.pack.input_ids), len(batch.rows.supervised)])
        indices += batch.indices
    size = size.to(state.device)
    # FSDP has summed the gradients already, in the backward pass.
    slopes = () if state.sharded else (p.grad for p in state.trained.values() if p.grad is not None)
    ranks.add([total, right, possible, size, *slopes])
    norm = whole(torch.nn.utils.clip_grad_norm_(state.trained.values(), settings.clip_norm))
    value, slope = total.item(), norm.item()
    if not (math.isfinite(value) and math.isfinite(slope)):
        raise TrainingError(
            f"step {state.step}: the loss is {value} and the gradient's norm {slope}; samples {indices}",
            cause="the learning rate is too high, or those samples are unlike the rest",
            next_step="lower train.learning_rate under another run name; the checkpoints before this step are kept",
        )
    state.optimiser.step()
    state.position = batch.tag
    elapsed = time.monotonic() - started
    state.seconds += elapsed
    tokens, supervised = size.tolist()
    return {
        "step": state.step,
        "epoch": state.position.epoch,
        "loss": value,
        "accuracy": _shares(right, possible),
        "learning_rate": rate,
        "grad_norm": slope,
        "tokens": tokens,
        "supervised": supervised,
        "tokens_per_second": tokens / max(elapsed, 1e-9),
        "seconds": state.seconds,
    }


def _outcome(state: Run, batch: Batch[order.Position], *, seed: str) -> loss.Outcome:
    """One pack's loss. `seed` is its noise's."""
    settings, pack = state.settings, batch.pack
    if state.spread is not None:
        pack = noise.blurred(pack, state.spread, settings.noise, seed=seed)
    with _precision(state.device):
        outcome: loss.Outcome = state.of_pack(
            pack,
            batch.rows,
            steps=settings.ttt_steps,
            decay=settings.ttt_step_loss_decay,
            kind=settings.loss,
        )
        return outcome


def validate(state: Run, samples: Samples) -> dict[str, Any]:
    """Loss, accuracy by position and acceptance length on samples that no step trains on.

    The acceptance length is that of greedy decoding with `evaluate.draft_tokens`, where the samples' answers are the
    target's own greedy ones (`data.regenerate`): a draft then walks along them as it does in serving.

    A guess is right when it is the target's own first choice of its whole vocabulary. Accuracy of position k is the
    share of starts whose guesses up to k are all right, as vLLM counts acceptance by position.
    """
    import torch

    settings = state.settings
    guesses = state.recipe.evaluate.draft_tokens
    steps = max(settings.ttt_steps, guesses)
    total, weight = torch.zeros(2, settings.ttt_steps, dtype=torch.float64, device=state.device)
    right, possible = torch.zeros(2, steps, dtype=torch.long, device=state.device)
    walk = torch.zeros(2, dtype=torch.long)  # tokens gained, and verifications
    state.model.eval()
    with torch.no_grad(), _precision(state.device), gathered(state.model):
        packs = order.packs(samples.usable, samples.rows, settings.pack_tokens)[state.ranks.rank :: state.ranks.size]
        source = ((indices, None) for indices in packs)
        for batch in batches(source, samples, steps=steps, room=settings.pack_tokens, device=state.device):
            pack, rows = batch.pack, batch.rows
            assert state.head is not None
            truth = loss.target_choice(state.head, pack, rows)
            outcome = loss.of_pack(state.model, pack, rows, steps=steps, decay=1.0, kind=settings.loss, truth=truth)
            starts = torch.tensor(rows.starts[: settings.ttt_steps], device=state.device)
            total += outcome.step_losses[: settings.ttt_steps].double() * starts
            weight += starts
            right += outcome.accepted.sum(1)
            possible += outcome.eligible.sum(1)
            accepted, eligible = outcome.accepted[:guesses].cpu(), outcome.eligible[:guesses].cpu()
            walk += torch.tensor(loss.acceptance_walk(accepted, eligible, batch.host_rows))
    walk = walk.to(state.device)
    state.ranks.add([total, weight, right, possible, walk])
    gained, verifications = walk.tolist()
    decay = torch.tensor([settings.ttt_step_loss_decay**k for k in range(settings.ttt_steps)], dtype=torch.float64)
    return {
        "val_loss": float((decay * (total / weight.clamp(min=1)).cpu()).sum()),
        "val_accuracy": _shares(right, possible),
        "val_acceptance_length": gained / max(verifications, 1),
    }


def _precision(device: torch.device) -> Any:
    """float32 on the CPU; on a GPU bfloat16 products over float32 weights, with the loss in float32 either way."""
    import torch

    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _shares(part: Tensor, whole: Tensor) -> list[float]:
    return [a / b if b else 0.0 for a, b in zip(part.tolist(), whole.tolist(), strict=True)]


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's values under TensorBoard's names, positions counted from 1."""
    named = {f"train/{key}": line[key] for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second")}
    named |= {f"train/accuracy_position_{k}": value for k, value in enumerate(line["accuracy"], start=1)}
    if "val_loss" in line:
        named |= {"val/loss": line["val_loss"], "val/acceptance_length": line["val_acceptance_length"]}
        named |= {f"val/accuracy_position_{k}": value for k, value in enumerate(line["val_accuracy"], start=1)}
    return named


def _note(line: Mapping[str, Any]) -> str:
    return f"loss {line['loss']:.3f}  accuracy {line['accuracy'][0]:.1%}  {line['tokens_per_second']:.0f} tokens/s"
