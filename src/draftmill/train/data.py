"""The stores as the trainer sees them: held against the run, counted, and read a pack at a time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from draftmill.errors import LayerError, StoreError
from draftmill.layers import SERVED_LAYERS, LayerContract
from draftmill.store import MANIFEST, Store
from draftmill.train.ttt import Pack
from draftmill.train.vocabulary import Counts

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from draftmill.recipe import Recipe
    from draftmill.target import TargetIdentity


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A store, and which of its samples a loss can use: those with a supervised token after the first."""

    store: Store
    usable: tuple[int, ...]
    supervised: int  # tokens of the usable samples that a loss reads
    counts: Counts = field(repr=False)

    @property
    def contract(self) -> LayerContract:
        return self.store.manifest.layers

    @functools.cached_property
    def rows(self) -> list[int]:
        """For each sample, the rows that it takes in a pack: its tokens less the first."""
        return [length - 1 for length in self.store.lengths]

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which names target, data, layers and stack: another store has another."""
        return hashlib.sha256((self.store.path / MANIFEST).read_bytes()).hexdigest()

    def pack(self, indices: Sequence[int], *, dtype: torch.dtype | None = None, pinned: bool = False) -> Pack:
        """Reads samples into one pack on the CPU.

        Args:
            dtype: of the states; float32 when None.
            pinned: whether a GPU is to copy from it.

        Raises:
            StoreError: a sample cannot be read.
        """
        import torch

        ids = self.contract.ids
        lengths = tuple(self.rows[index] for index in indices)
        rows, width = sum(lengths), self.store.manifest.target.hidden_size
        dtype = dtype or torch.float32
        pack = Pack(
            input_ids=torch.empty(rows, dtype=torch.long, pin_memory=pinned),
            hidden_states=torch.empty(rows, len(ids) * width, dtype=dtype, pin_memory=pinned),
            last_hidden_state=torch.empty(rows, width, dtype=dtype, pin_memory=pinned),
            loss_mask=torch.empty(rows, dtype=torch.bool, pin_memory=pinned),
            lengths=lengths,
        )
        end = 0
        for index, length in zip(indices, lengths, strict=True):
            sample = self.store[index]
            part = slice(end, end := end + length)
            pack.input_ids[part] = sample.input_ids[1:]
            pack.loss_mask[part] = sample.loss_mask[1:]
            pack.last_hidden_state[part] = sample.last_hidden_state[1:]
            for number, layer in enumerate(ids):
                pack.hidden_states[part, number * width : (number + 1) * width] = sample.hidden_states[layer][:-1]
        return pack

    def refuse(self, indices: Sequence[int]) -> NoReturn:
        """Raises the StoreError that names the first of these samples with a state that is NaN or infinite."""
        index = next(i for i in indices if not self.pack([i]).finite())
        raise StoreError(
            f"sample {index} of {self.store.path} holds NaN or infinite hidden states",
            cause="the target overflowed on it, or the shard was changed",
            next_step="delete that sample's shard and run `draftmill extract` again",
        )


def open_train(recipe: Recipe, target: TargetIdentity) -> Samples:
    """The training store.

    Raises:
        StoreError: it is missing, empty, of another target, or no token of it is supervised.
        LayerError: its layers are not ones that a draft of this target can be trained on.
    """
    samples = _open(recipe.folder.store_train, recipe, target)
    if not samples.usable:
        raise StoreError(
            f"{samples.store.path} has nothing to train on: {len(samples.store)} samples, none with a supervised token",
            cause="every conversation was dropped, or the loss masks are all zero",
            next_step="look at the counts that `draftmill prepare` printed, and correct [data]",
        )
    return samples


def open_held_out(recipe: Recipe, target: TargetIdentity, train: Samples) -> Samples | None:
    """The held-out store, or None when the recipe holds nothing out.

    Raises:
        StoreError, LayerError: as `open_train`, or it is not of the same layers as the training store.
    """
    if recipe.data.held_out == 0.0 or not (recipe.folder.store_held_out / MANIFEST).exists():
        return None
    samples = _open(recipe.folder.store_held_out, recipe, target)
    if samples.contract != train.contract:
        raise LayerError(
            f"{samples.store.path} holds layers {samples.contract.ids}, the training store {train.contract.ids}",
            cause="they were extracted with different recipes",
            next_step="extract both again with this recipe",
        )
    return samples if samples.usable else None


def _open(path: Path, recipe: Recipe, target: TargetIdentity) -> Samples:
    store = Store.open(path)
    manifest = store.manifest
    if manifest.target != target:
        raise StoreError(
            f"{path} holds states of another target than {recipe.target_folder}: "
            f"{manifest.target.num_layers} layers, {manifest.target.hidden_size} wide, "
            f"fingerprint {manifest.target.fingerprint[:12]}; the recipe's has {target.num_layers}, "
            f"{target.hidden_size}, {target.fingerprint[:12]}",
            cause="the target changed after extraction",
            next_step="extract again under another run name, or correct target.path",
        )
    _check_layers(path, manifest.layers, recipe, target)
    counts = Counts(target.vocab_size)
    usable = []
    supervised = 0
    for index in range(len(store)):
        sample = store[index]
        counts.add(sample.input_ids, sample.loss_mask, name=f"sample {index} of {path}")
        found = int(sample.loss_mask[1:].sum())
        if found:
            usable.append(index)
            supervised += found
    return Samples(store=store, usable=tuple(usable), supervised=supervised, counts=counts)


def _check_layers(path: Path, contract: LayerContract, recipe: Recipe, target: TargetIdentity) -> None:
    if len(contract.ids) != SERVED_LAYERS:
        raise LayerError(
            f"{path} holds {len(contract.ids)} layers, {list(contract.ids)}; an EAGLE-3 draft takes {SERVED_LAYERS}",
            cause="extract.layers names another number of layers",
            next_step="name three layers, or leave extract.layers out, and extract again",
        )
    if contract.num_layers != target.num_layers:
        raise LayerError(
            f"{path} numbers layers of a target with {contract.num_layers}, this one has {target.num_layers}",
            next_step="extract again with this target",
        )
    if recipe.extract.layers is not None and tuple(recipe.extract.layers) != contract.ids:
        raise LayerError(
            f"{path} holds layers {list(contract.ids)}, the recipe asks for {recipe.extract.layers}",
            cause="extract.layers changed after extraction",
            next_step="extract again under another run name, or put the old layers back",
        )
