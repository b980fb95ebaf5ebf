"""A shard in the making. Its layout follows from its samples' lengths, so that rows go to their place as they come.

A shard is a safetensors file. Its header, which ends with the checksums, has the same length before these are known as
after: the tensors are written first and the header last, and then the file gets its name.
"""

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.files import disk_errors, sync

ROW_BYTES = {"I64": 8, "BF16": 2, "BOOL": 1}  # of one value, by safetensors' names
UNKNOWN = "0" * 32  # in a checksum's place until it is known
_HEADER = 8  # the header's length stands before it, in so many bytes


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One tensor of a sample. `width` is None where a row is one value."""

    sample: int
    name: str
    dtype: str
    rows: int
    width: int | None = None

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES[self.dtype] * (self.width or 1)

    @property
    def shape(self) -> list[int]:
        return [self.rows] if self.width is None else [self.rows, self.width]


class _Tensor:
    """Where a tensor's rows go, how many are there, and their digest so far."""

    def __init__(self, spec: Spec, offset: int) -> None:
        import xxhash

        self.spec, self.offset, self.done = spec, offset, 0
        self.digest = xxhash.xxh3_128()


class ShardWriter:
    """One shard, written by any number of threads: each tensor's rows in their order, the tensors in any."""

    def __init__(self, path: Path, specs: Iterable[Spec]) -> None:
        """Makes the unfinished file.

        Args:
            path: the shard's; until it is whole the file has another name.

        Raises:
            DiskError: it cannot be made.
        """
        self.path, self.part = path, path.with_suffix(".part")
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, str], _Tensor] = {}
        size = 0
        for spec in sorted(specs, key=lambda s: -ROW_BYTES[s.dtype]):  # so that each tensor is aligned
            self._tensors[spec.sample, spec.name] = _Tensor(spec, size)
            size += spec.rows * spec.row_bytes
        self._left = sum(tensor.spec.rows > 0 for tensor in self._tensors.values())
        self._start = len(self._header({tensor.spec.sample: UNKNOWN for tensor in self._tensors.values()}))
        with disk_errors(path.parent, self.part):
            self._file = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def put(self, sample: int, name: str, first: int, rows: Any) -> bool:
        """Writes rows of one tensor, of which those that are there already are left out.

        Args:
            first: the number of the first of them; none before it may be lacking.
            rows: their bytes, contiguous.

        Returns:
            Whether these were the last that the shard lacked.

        Raises:
            DiskError: the disk is full or cannot be written.
        """
        tensor = self._tensors[sample, name]
        width = tensor.spec.row_bytes
        data = memoryview(rows).cast("B")[: (tensor.spec.rows - first) * width]
        if first > tensor.done:
            raise ValueError(f"{name} of sample {sample}: row {first} comes after row {tensor.done - 1}")
        data = data[(tensor.done - first) * width :]
        if not data:
            return False
        with disk_errors(self.path.parent):
            place = self._start + tensor.offset + tensor.done * width
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], place + written)
        tensor.digest.update(data)
        tensor.done += len(data) // width
        if tensor.done < tensor.spec.rows:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def finish(self) -> None:
        """Writes the header and gives the file its name: it is on the disk when this returns.

        Raises:
            DiskError: as `put`.
        """
        if self._left:
            raise ValueError(f"{self.path.name} lacks rows of {self._left} tensors")
        samples: dict[int, dict[str, str]] = {}
        for tensor in self._tensors.values():
            spec = tensor.spec
            line = describe(spec.name, spec.dtype, spec.shape, tensor.digest.hexdigest())
            samples.setdefault(spec.sample, {})[spec.name] = line
        header = self._header({sample: checksum(lines) for sample, lines in samples.items()})
        with disk_errors(self.path.parent, self.part):
            try:
                os.pwrite(self._file, header, 0)
                os.fsync(self._file)
            finally:
                os.close(self._file)
            self.part.rename(self.path)
            sync(self.path.parent)

    def drop(self) -> None:
        """Takes the unfinished file away."""
        os.close(self._file)
        self.part.unlink(missing_ok=True)

    def _header(self, checksums: Mapping[int, str]) -> bytes:
        """Checksums as JSON in the metadata, by the sample's index."""
        found: dict[str, Any] = {"__metadata__": {"checksums": json.dumps({str(k): v for k, v in checksums.items()})}}
        for tensor in self._tensors.values():
            spec = tensor.spec
            end = tensor.offset + spec.rows * spec.row_bytes
            place = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [tensor.offset, end]}
            found[f"{spec.sample}.{spec.name}"] = place
        text = json.dumps(found).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(_HEADER, "little") + text


def describe(name: str, dtype: str, shape: list[int], digest: str) -> str:
    """What a sample's checksum knows of one of its tensors."""
    return f"{name} {dtype} {shape} {digest}\n"


def checksum(lines: Mapping[str, str]) -> str:
    """A sample's checksum, of what `describe` gives for each of its tensors: it tells damage, not malice."""
    import xxhash

    return str(xxhash.xxh3_128("".join(lines[name] for name in sorted(lines)).encode()).hexdigest())


def digest(data: Any) -> str:
    """The digest of a tensor's bytes."""
    import xxhash

    return str(xxhash.xxh3_128(data).hexdigest())
