"""Packs read ahead of the step that trains on them, in the order asked for: the device does not wait for a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftmill.train import ttt

if TYPE_CHECKING:
    import torch

    from draftmill.train.data import Samples

_READERS = 2
_AHEAD = 2  # packs that are read or being read while one is trained on


@dataclass(frozen=True, kw_only=True)
class Batch[T]:
    """One pack on the device, and the rows that its loss reads. `tag` is what came with its indices."""

    indices: tuple[int, ...]
    tag: T
    pack: ttt.Pack
    host_rows: ttt.Plan
    rows: ttt.Plan


def batches[T](
    source: Iterable[tuple[tuple[int, ...], T]], samples: Samples, *, steps: int, room: int, device: torch.device
) -> Generator[Batch[T]]:
    """Reads the packs of `source`, a few ahead of the caller; close it when no more are wanted.

    Args:
        steps: TTT steps that the loss goes through.
        room: rows that a pack holds at most, but for a sample that is longer by itself.

    Raises:
        StoreError: a sample cannot be read, or holds NaN or infinite states.
    """
    import torch

    cuda = device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def read(indices: tuple[int, ...]) -> tuple[ttt.Pack, ttt.Plan]:
        host = samples.pack(indices, dtype=torch.bfloat16 if cuda else torch.float32, pinned=cuda)
        rows = ttt.plan(host, steps)
        with torch.cuda.stream(stream):
            pack = host.to(device)
            if not pack.finite():  # waits for the copy too
                samples.refuse(indices)
        return pack, rows

    def placed(indices: tuple[int, ...], tag: T, future: Future[tuple[ttt.Pack, ttt.Plan]]) -> Batch[T]:
        pack, host_rows = future.result()
        if cuda:
            pack.used_by(torch.cuda.current_stream(device))
        rows = host_rows.to(device, max(room, len(pack.input_ids)))
        return Batch(indices=indices, tag=tag, pack=pack, host_rows=host_rows, rows=rows)

    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="packs")
    waiting: deque[tuple[tuple[int, ...], T, Any]] = deque()
    try:
        for indices, tag in source:
            waiting.append((indices, tag, readers.submit(read, indices)))
            if len(waiting) > _AHEAD:
                yield placed(*waiting.popleft())
        while waiting:
            yield placed(*waiting.popleft())
    finally:
        readers.shutdown(cancel_futures=True)
