"""train: a store becomes an EAGLE-3 draft in a folder that vLLM and speculators load as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftmill.compute import has_cuda
from draftmill.errors import RecipeError, TrainingError
from draftmill.target import identify
from draftmill.train import data, draft, loop, noise, vocabulary
from draftmill.train.ranks import Ranks, here

if TYPE_CHECKING:
    from draftmill.recipe import Recipe

# Settings that change when something is written, and never what is learnt.
_WITHOUT_EFFECT = {"checkpoint_steps", "keep_checkpoints", "parallel"}


def train(recipe: Recipe) -> None:
    """Trains the draft of a run on the run's store and writes it to `recipe.folder.draft`.

    Under torchrun its ranks share the packs of each step, and the steps are those of one process with as many packs.
    It goes on from the newest checkpoint, and the losses of the steps after that are those of a run that was never
    stopped. When the draft is there already, it says so and returns.

    Raises:
        TargetError: the target's folder cannot be read.
        StoreError: a store is missing, empty, of another target, or a sample of it cannot be used; the sample is named.
        LayerError: the store's layers are not the draft's.
        RecipeError: the packs of a step cannot be shared equally by the ranks.
        TrainingError: the draft vocabulary is not possible, the loss is not finite, or a checkpoint or draft in the
            run's folder is another run's.
        Interrupted: SIGTERM or Ctrl-C; a checkpoint of that moment is written.
        DiskError: a checkpoint or the draft cannot be written.
    """
    ranks = Ranks.join()
    try:
        _train(recipe, ranks)
    finally:
        ranks.leave()


def _train(recipe: Recipe, ranks: Ranks) -> None:
    import torch

    if recipe.train.packs % ranks.size:
        raise RecipeError(
            f"[train] packs = {recipe.train.packs} cannot be shared equally by {ranks.size} ranks",
            next_step=f"set it to {ranks.size} or a multiple: packs of one step, of all ranks together",
        )
    say = _say if ranks.first else _nothing
    target = identify(recipe.target_folder)
    samples = data.open_train(recipe, target)
    held_out = data.open_held_out(recipe, target, samples)
    config = draft.target_config(recipe)
    chosen = vocabulary.choose(samples.counts, recipe.train.draft_vocab_size, draft.end_tokens(recipe, config))
    identity = _identity(recipe, samples, chosen)
    if _finished(recipe, identity):
        say(f"the draft is already trained: {recipe.folder.draft}")
        return
    say(
        f"{len(samples.usable)} of {len(samples.store)} samples, {samples.supervised:,} supervised tokens; "
        f"the draft says {len(chosen.ids):,} of {chosen.target_size:,} tokens, {chosen.coverage:.2%} of them"
    )
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    state = loop.Run(
        recipe=recipe,
        model=draft.build(recipe, config, samples.contract, chosen),
        train=samples,
        held_out=held_out,
        head=draft.target_head(recipe).to(device) if held_out else None,
        identity=identity,
        device=device,
        ranks=ranks,
        spread=noise.spread(samples).to(device) if recipe.train.noise else None,
    )
    if ranks.size > 1:
        trained = state.trained.values()
        weights, own = sum(p.numel() for p in trained), sum(here(p) for p in trained)
        say(f"{ranks.size} ranks; this one keeps {own / weights:.0%} of {weights:,} trained weights")
    if state.restore():
        say(f"going on after step {state.step}")
    loop.run(state)
    if state.step < recipe.train.steps:
        say(f"ended after step {state.step}: {recipe.train.patience} validations in a row were no better")
    state.take_best()
    tensors = draft.tensors(state.model)
    if ranks.first:
        draft.export(state.model.config, tensors, recipe.folder.draft, _summary(state, samples, held_out, chosen))
    ranks.wait()  # a rank that has ended before the draft is whole would be taken for a failed one
    say(f"the draft is in {recipe.folder.draft}")


def _identity(recipe: Recipe, samples: data.Samples, chosen: vocabulary.Vocabulary) -> dict[str, object]:
    """What a checkpoint must have been made for to be gone on with."""
    settings = recipe.train.model_dump()
    return {
        "store": samples.digest,
        "seed": recipe.run.seed,
        "train": {key: value for key, value in settings.items() if key not in _WITHOUT_EFFECT},
        "draft_vocabulary": hashlib.sha256(json.dumps(chosen.ids).encode()).hexdigest(),
    }


def _finished(recipe: Recipe, identity: Mapping[str, object]) -> bool:
    path = recipe.folder.draft / draft.TRAINING_JSON
    if not path.exists():
        return False
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read: {error}", next_step="delete the folder it is in") from error
    if theirs != json.loads(json.dumps(identity)):
        raise TrainingError(
            f"{recipe.folder.draft} holds the draft of another run",
            cause="the recipe, the data or the target changed after it was trained",
            next_step="give this run another name, or move that folder and the checkpoints away",
        )
    return True


def _summary(
    state: loop.Run, samples: data.Samples, held_out: data.Samples | None, chosen: vocabulary.Vocabulary
) -> dict[str, Any]:
    """training.json: what the draft was trained on, for how long, and how its weights, those of `best_step`, did on the
    held-out samples.
    """
    vocabulary_facts = {"size": len(chosen.ids), "coverage": chosen.coverage}
    if held_out:
        vocabulary_facts["coverage_held_out"] = held_out.counts.covered(chosen.ids)
    return {
        "identity": state.identity,
        "layers": samples.contract.model_dump(),
        "steps": state.step,
        "best_step": state.best.step if state.best else None,
        "epochs": state.position.epoch,
        "seconds": state.seconds,
        "device": state.device.type,
        "samples": len(samples.usable),
        "supervised_tokens": samples.supervised,
        "draft_vocabulary": vocabulary_facts,
        "held_out": state.best.figures if state.best else {},
    }


def _nothing(_text: str) -> None:
    """What a rank says that is not the first."""


def _say(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"train: {text}", markup=False)
