"""Checkpoints: everything that a step depends on, in a folder that appears whole or not at all."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.errors import TrainingError
from draftmill.files import sha256, whole_folder
from draftmill.train.order import Position
from draftmill.train.ranks import part, whole

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "state.pt"
_INDEX = "checkpoint.json"
_PREFIX = "step-"
_BEST = "best-"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best validation so far: after which step, its figures, and how many have come after it."""

    step: int
    figures: Mapping[str, Any]
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state after `step` whole steps; `position` is the next pack to train on.

    `tensors` holds the trained weights and the optimiser's state, as `torch.save` takes them. Nothing is drawn that
    does not follow from the seed and the step.
    """

    step: int
    position: Position
    seconds: float
    tensors: Mapping[str, Any]
    best: Best | None = None


def save(folder: Path, checkpoint: Checkpoint, *, identity: Mapping[str, object], keep: int) -> Path:
    """Writes a checkpoint into `folder`, and then deletes all but the newest `keep` and the weights that none of
    these calls its best.

    Args:
        identity: what the run is; `load` refuses a checkpoint of another.

    Raises:
        DiskError: it cannot be written; the earlier ones are as they were.
    """
    import torch

    final = folder / f"{_PREFIX}{checkpoint.step:08d}"
    with whole_folder(final) as work:
        torch.save(dict(checkpoint.tensors), work / _STATE)
        index = {
            "step": checkpoint.step,
            "epoch": checkpoint.position.epoch,
            "cursor": checkpoint.position.cursor,
            "seconds": checkpoint.seconds,
            "sha256": sha256(work / _STATE),
            "best": asdict(checkpoint.best) if checkpoint.best else None,
            "identity": identity,
        }
        (work / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for old in _found(folder)[:-keep]:
        shutil.rmtree(old)
    kept = {_best_of(path) for path in _found(folder)}
    for other in folder.glob(f"{_BEST}*"):
        if other.name not in kept:
            shutil.rmtree(other)
    return final


def _best_of(checkpoint: Path) -> str | None:
    """The folder that a checkpoint's best weights are in; None when it has none, or cannot be read."""
    try:
        best = json.loads((checkpoint / _INDEX).read_text(encoding="utf-8"))["best"]
        return _best_name(best["step"]) if best else None
    except (OSError, ValueError, KeyError):
        return None


def save_best(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Keeps the weights of the best validation, beside those that the newest checkpoint calls the best.

    Raises:
        DiskError: they cannot be written.
    """
    import torch

    with whole_folder(folder / _best_name(step)) as work:
        torch.save(dict(weights), work / _STATE)


def load_best(folder: Path, step: int, trained: Mapping[str, Tensor]) -> None:
    """Puts the weights of the best validation back.

    Raises:
        TrainingError: they are gone or damaged.
    """
    import torch

    path = folder / _best_name(step) / _STATE
    try:
        _put(torch.load(path, map_location="cpu", weights_only=True), trained)
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"the weights of the best validation, after step {step}, cannot be read from {path}",
            cause="the file was deleted, cut off or changed",
            next_step=f"delete {folder} and train again",
        ) from error


def _best_name(step: int) -> str:
    return f"{_BEST}{step:08d}"


def load(folder: Path, *, identity: Mapping[str, object]) -> Checkpoint | None:
    """The newest checkpoint in `folder`, or None when there is none.

    Raises:
        TrainingError: it is another run's, or damaged.
    """
    import torch

    found = _found(folder)
    if not found:
        return None
    newest = found[-1]
    damaged = TrainingError(
        f"the checkpoint {newest} is damaged",
        cause="a file of it was cut off or changed",
        next_step="delete that folder and run again: training goes on from the one before",
    )
    try:
        index = json.loads((newest / _INDEX).read_text(encoding="utf-8"))
        intact = index["sha256"] == sha256(newest / _STATE)
    except (OSError, ValueError, KeyError) as error:
        raise damaged from error
    if not intact:
        raise damaged
    _same(newest, index["identity"], identity)
    return Checkpoint(
        step=index["step"],
        position=Position(epoch=index["epoch"], cursor=index["cursor"]),
        seconds=index["seconds"],
        tensors=torch.load(newest / _STATE, map_location="cpu", weights_only=True),
        best=Best(**index["best"]) if index["best"] else None,
    )


def state_of(optimiser: Any, trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a step depends on beside the data: trained weights, and the optimiser's state.

    It is the same whatever number of ranks it is from, and all of them have to ask for it.
    """
    state = optimiser.state_dict()
    moments = {number: {key: _copy(value) for key, value in own.items()} for number, own in state["state"].items()}
    return {"model": weights_of(trained), "optimiser": {**state, "state": moments}}


def restore(state: Mapping[str, Any], optimiser: Any, trained: Mapping[str, Tensor]) -> None:
    """Puts back what `state_of` took."""
    _put(state["model"], trained)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    moments = {
        number: {key: part(value, parameters[number]) for key, value in own.items()}
        for number, own in state["optimiser"]["state"].items()
    }
    optimiser.load_state_dict({**state["optimiser"], "state": moments})


def weights_of(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole weights on the CPU; all ranks have to ask for them."""
    return {name: _copy(value) for name, value in trained.items()}


def _copy(tensor: Tensor) -> Tensor:
    return whole(tensor.detach()).cpu()


def _put(weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    import torch

    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(part(weights[name], value))


def _same(path: Path, theirs: Mapping[str, object], ours: Mapping[str, object]) -> None:
    # Through JSON, so that a tuple equals the list that it is read back as.
    wanted = json.loads(json.dumps(ours))
    different = sorted(key for key in {*theirs, *wanted} if theirs.get(key) != wanted.get(key))
    if different:
        rows = "\n".join(f"  {key}: {theirs.get(key)} there, {wanted.get(key)} now" for key in different)
        raise TrainingError(
            f"the checkpoint {path} is another run's:\n{rows}",
            cause="the recipe, the data or the target changed after training began",
            next_step="give the run another name, or delete its checkpoints to begin anew",
        )


def _found(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob(f"{_PREFIX}*") if p.is_dir())
