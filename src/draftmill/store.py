"""The store of hidden states, in which extraction and training meet.

It is a folder: `manifest.json` says what it holds and of whom, and each `shard-NNNNN.safetensors` holds a fixed range
of samples, so that a sample's shard is arithmetic. A shard appears whole or not at all; every sample carries a
checksum; a reader maps, never loads. Per sample of T tokens, with H the target's hidden size:

    <index>.input_ids            int64 [T]
    <index>.loss_mask            bool  [T]
    <index>.hidden_states.<id>   bfloat16 [T, H], one for each id of the layer contract
    <index>.last_hidden_state    bfloat16 [T, H]
"""

import fcntl
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill import shard
from draftmill.errors import Finding, StoreError
from draftmill.files import disk_errors, write_whole
from draftmill.layers import LayerContract
from draftmill.shard import ShardWriter
from draftmill.target import TargetIdentity

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
FORMAT = 2
BYTES_PER_VALUE = 2  # bfloat16
_OPEN_SHARDS = 64


class Manifest(BaseModel):
    """What a store holds. Two runs that agree in all of it write the same store; one that differs is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    target: TargetIdentity
    tokenizer_digest: str
    layers: LayerContract
    dtype: str = "bfloat16"
    computed_in: str
    dataset_digest: str
    lengths: tuple[int, ...]
    shard_samples: int
    stack: dict[str, str]
    recipe: dict[str, Any]

    @property
    def shards(self) -> int:
        return -(-len(self.lengths) // self.shard_samples)

    def samples_of(self, shard: int) -> range:
        """The samples that a shard holds."""
        start = shard * self.shard_samples
        return range(start, min(start + self.shard_samples, len(self.lengths)))

    def bytes_of(self, samples: Sequence[int]) -> int:
        """The bytes that these samples' tensors take on disk."""
        per_token = (len(self.layers.ids) + 1) * self.target.hidden_size * BYTES_PER_VALUE + 8 + 1
        return sum(self.lengths[i] for i in samples) * per_token

    def specs(self, number: int) -> Iterator[shard.Spec]:
        """Every tensor of one shard."""
        states = state_names(self.layers.ids)
        for index in self.samples_of(number):
            rows = self.lengths[index]
            yield shard.Spec(sample=index, name="input_ids", dtype="I64", rows=rows)
            yield shard.Spec(sample=index, name="loss_mask", dtype="BOOL", rows=rows)
            for name in states:
                yield shard.Spec(sample=index, name=name, dtype="BF16", rows=rows, width=self.target.hidden_size)

    def differences(self, other: "Manifest") -> list[str]:
        """The names of the fields in which two manifests differ."""
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One conversation's token ids, the mask of those that a loss may use, and the target's states."""

    input_ids: "Tensor"
    loss_mask: "Tensor"
    hidden_states: "dict[int, Tensor]"
    last_hidden_state: "Tensor"

    def tensors(self) -> "dict[str, Tensor]":
        """The sample's tensors under the names that they have in a shard, less the index."""
        states = zip(
            state_names(self.hidden_states), (*self.hidden_states.values(), self.last_hidden_state), strict=True
        )
        return {"input_ids": self.input_ids, "loss_mask": self.loss_mask, **dict(states)}

    def checksum(self) -> str:
        """Over names, dtypes, shapes and bytes."""
        lines = {}
        for name, tensor in self.tensors().items():
            digest = shard.digest(as_bytes(tensor))
            lines[name] = shard.describe(name, _safetensors_name(tensor), list(tensor.shape), digest)
        return shard.checksum(lines)


class Store:
    """A store to read. `len`, `[index]` and `lengths` (tokens of each sample) are all that training needs."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._open = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    @classmethod
    def open(cls, path: Path, *, partial: bool = False) -> Self:
        """Opens a store.

        Args:
            partial: open it though shards are missing.

        Raises:
            StoreError: there is none, its manifest cannot be read, or a shard is missing.
        """
        store = cls(path, read_manifest(path))
        missing = [store.shard(n).name for n in range(store.manifest.shards) if not store.shard(n).exists()]
        if missing and not partial:
            raise StoreError(
                f"{path} lacks {len(missing)} of {store.manifest.shards} shards, the first {missing[0]}",
                cause="extraction has not ended",
                next_step="run `draftmill extract` again: it resumes",
            )
        return store

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.manifest.lengths

    def __len__(self) -> int:
        return len(self.manifest.lengths)

    def facts(self) -> dict[str, str]:
        """What a person asks of a store, without reading a shard."""
        of = self.manifest
        files = [path for n in range(of.shards) if (path := self.shard(n)).exists()]
        return {
            "samples": f"{len(self):,}",
            "tokens": f"{sum(self.lengths):,}, {max(self.lengths, default=0):,} in the longest",
            "shards": f"{len(files):,} of {of.shards:,}, {sum(path.stat().st_size for path in files) / 1e9:.2f} GB",
            "layers": f"{', '.join(map(str, of.layers.ids))}: {of.layers.meaning}",
            "last hidden state": of.layers.last_hidden_state,
            "states": f"{of.dtype} [tokens, {of.target.hidden_size}], computed in {of.computed_in}",
            "target": of.target.fingerprint,
            "data": of.dataset_digest,
            "stack": ", ".join(f"{name} {version}" for name, version in of.stack.items()),
        }

    def __getitem__(self, index: int) -> Sample:
        """Maps sample `index`.

        Raises:
            StoreError: its shard cannot be read, lacks it, or holds it with another length than the manifest says.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = index // self.manifest.shard_samples
        try:
            sample = self._sample(self._open(number), index)
        except (_safetensors_error(), OSError) as error:
            raise self._damaged(index, str(error)) from error
        if len(sample.input_ids) != self.lengths[index]:
            found = len(sample.input_ids)
            raise self._damaged(index, f"it has {found} tokens, the manifest says {self.lengths[index]}")
        return sample

    def _damaged(self, index: int, why: str) -> StoreError:
        return StoreError(
            f"sample {index} of {self.path} cannot be read: {why}",
            cause=f"{self.shard(index // self.manifest.shard_samples).name} is damaged",
            next_step="run `draftmill extract` again: it finds and repairs what is damaged",
        )

    def shard(self, number: int) -> Path:
        return self.path / f"shard-{number:05d}.safetensors"

    def shard_writer(self, number: int) -> ShardWriter:
        """What writes one shard, and replaces a damaged one.

        Raises:
            DiskError: the file cannot be made.
        """
        return ShardWriter(self.shard(number), self.manifest.specs(number))

    def verify(self) -> list[Finding]:
        """Every shard that is missing or unreadable, and every sample that is not what was written."""
        return [finding for number in range(self.manifest.shards) for finding in self.verify_shard(number)]

    def verify_shard(self, number: int) -> list[Finding]:
        """As `verify`, of one shard."""
        path = self.shard(number)
        if not path.exists():
            return [Finding(kind="missing", place=path.name, expected="a shard", found="no such file")]
        try:
            handle = self._map(number)
            checksums = json.loads((handle.metadata() or {}).get("checksums", "{}"))
            return [
                f
                for i in self.manifest.samples_of(number)
                for f in self._verify_sample(handle, path.name, i, checksums)
            ]
        except (_safetensors_error(), OSError, ValueError) as error:
            return [Finding(kind="unreadable", place=path.name, expected="a whole safetensors file", found=str(error))]

    def _verify_sample(self, handle: Any, name: str, index: int, checksums: dict[str, str]) -> Iterator[Finding]:
        sample = self._sample(handle, index)
        found = sample.checksum()
        expected = checksums.get(str(index), "none")
        if found != expected:
            yield Finding(kind="corrupt", place=f"{name}, sample {index}", expected=expected, found=found)
        if len(sample.input_ids) != self.lengths[index]:
            tokens = str(len(sample.input_ids))
            yield Finding(
                kind="length", place=f"{name}, sample {index}", expected=str(self.lengths[index]), found=tokens
            )

    def _map(self, number: int) -> Any:
        from safetensors import safe_open

        return safe_open(self.shard(number), framework="pt")

    def _sample(self, handle: Any, index: int) -> Sample:
        get = handle.get_tensor
        states = {layer: get(f"{index}.hidden_states.{layer}") for layer in self.manifest.layers.ids}
        return Sample(
            input_ids=get(f"{index}.input_ids"),
            loss_mask=get(f"{index}.loss_mask"),
            hidden_states=states,
            last_hidden_state=get(f"{index}.last_hidden_state"),
        )


class StoreWriter:
    """A store to write: made, or gone on with where an earlier run stopped."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Makes the store, or opens it to go on.

        Raises:
            StoreError: the folder holds the store of another run, or is being written by another process.
            DiskError: it cannot be written.
        """
        self.store = Store(path, manifest)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if (path / MANIFEST).exists():
                _refuse_another(path, manifest)
            else:
                write_whole(path / MANIFEST, manifest.model_dump_json(indent=1).encode())
            self._lock = (path / MANIFEST).open("rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{path} is being written by another process", next_step="wait until it ends") from error
        for left in path.glob("*.part"):
            left.unlink()

    def missing(self) -> tuple[list[int], list[Finding]]:
        """The shards to write, and what is wrong with those of them that are there."""
        numbers, findings = [], []
        for number in range(self.store.manifest.shards):
            if found := self.store.verify_shard(number):
                numbers.append(number)
                findings += [f for f in found if f.kind != "missing"]
        return numbers, findings

    def write(self, number: int, samples: Sequence[Sample]) -> None:
        """Writes one shard, which replaces a damaged one.

        Raises:
            DiskError: the disk is full or cannot be written. What was there before is still valid.
        """
        writer = self.store.shard_writer(number)
        try:
            for index, sample in zip(self.store.manifest.samples_of(number), samples, strict=True):
                for name, tensor in sample.tensors().items():
                    writer.put(index, name, 0, as_bytes(tensor))
        except BaseException:
            writer.drop()
            raise
        writer.finish()

    def close(self) -> None:
        """Lets another process write."""
        self._lock.close()


def state_names(ids: Iterable[int]) -> list[str]:
    """A sample's tensors of states in a shard: those of the layers, in that order, and the last hidden state."""
    return [*(f"hidden_states.{layer}" for layer in ids), "last_hidden_state"]


def as_bytes(tensor: "Tensor") -> memoryview:
    """A contiguous tensor's bytes, where they are."""
    import torch

    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def _safetensors_name(tensor: "Tensor") -> str:
    import torch

    return {torch.int64: "I64", torch.bool: "BOOL", torch.bfloat16: "BF16"}[tensor.dtype]


def read_manifest(path: Path) -> Manifest:
    """The manifest of the store at `path`.

    Raises:
        StoreError: there is no store, or its manifest is not one that this version writes.
    """
    try:
        return Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise StoreError(f"there is no store at {path}", next_step="run `draftmill extract` first") from error
    except (OSError, ValidationError) as error:
        raise StoreError(
            f"{path / MANIFEST} cannot be read: {error}", next_step="extract into another folder"
        ) from error


def _refuse_another(path: Path, manifest: Manifest) -> None:
    if different := read_manifest(path).differences(manifest):
        raise StoreError(
            f"{path} holds the store of another run; they differ in: {', '.join(different)}",
            cause="the recipe, the data, the target or the stack has changed since it was written",
            next_step="give this run another name ([run] name), or move that folder away; nothing was changed in it",
        )


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    error: type[Exception] = SafetensorError
    return error
