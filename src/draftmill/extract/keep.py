"""The path of a token's states, in the worker that computed them: from the device to the shards on disk.

    layer's input -> tap (a fixed buffer, so that compiled and captured graphs write to it)
                  -> one of two copies on the device, cast to bfloat16
                  -> pinned host memory, on a stream of its own while the next step runs
                  -> a thread for each state, which writes the rows to their place in the shard

The buffers bound what is in flight: where the disk is slow, the next step waits for one, and the scheduler with it.
"""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftmill.errors import DraftmillError
from draftmill.extract import locate
from draftmill.shard import ShardWriter
from draftmill.store import Store, as_bytes, read_manifest

ON_DEVICE, ON_HOST = 2, 4  # buffers of one step each


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows of one step that are a sample's: `rows` of them from row `at` of the step, the sample's from `first`.

    `key` is the shard's store and number.
    """

    key: tuple[int, int]
    shard: ShardWriter
    sample: int
    first: int
    at: int
    rows: int


@dataclass(kw_only=True)
class Step:
    """A step's states on their way out. `left` counts the threads that are not done with it."""

    host: torch.Tensor
    ready: Any
    spans: list[Span]
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class Taps:
    """Buffers [steps' token budget, H] that hold the inputs of the asked layers, as the last forward pass left them."""

    def __init__(self, layers: torch.nn.ModuleList, ids: Sequence[int], buffer: torch.Tensor) -> None:
        """Args:
        buffer: as large as each is to be, in the model's dtype and on its device.
        """
        self.buffers = [torch.zeros_like(buffer) for _ in ids]
        for layer, buffer in zip((layers[k] for k in ids), self.buffers, strict=True):
            layer.register_forward_pre_hook(_hook(buffer, locate.arguments(layer)), with_kwargs=True)


def _hook(buffer: torch.Tensor, names: tuple[str, ...]) -> Any:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, residual = locate.stream(names, args, kwargs)
        torch.ops.draftmill.tap(buffer, hidden, residual)

    return hook


@torch.library.custom_op("draftmill::tap", mutates_args={"buffer"})
def tap(buffer: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Keeps a layer's input, the sum of both, in the buffer's first rows."""
    kept = buffer[: hidden.shape[0]]
    if residual is None:
        kept.copy_(hidden)
    else:
        torch.add(hidden, residual, out=kept)


tap.register_fake(lambda *_: None)


class Keeper:
    """Takes the states of each step and writes them to the shards that are open."""

    def __init__(self, taps: Taps, names: Sequence[str], budget: int, width: int) -> None:
        """Args:
        names: of the tensors that a sample has of each tap and of the last hidden state, in that order.
        """
        self.taps, self.names = taps, list(names)
        self.cuda = taps.buffers[0].is_cuda
        shape = (len(names), budget, width)
        device = taps.buffers[0].device
        self._device = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(ON_DEVICE * self.cuda)]
        self._copied: list[Any] = [None] * len(self._device)
        self._side: Any = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._steps = 0
        self.waited = 0.0  # seconds in which the next step could not begin, since no buffer was free
        self.written = [0.0 for _ in names]  # seconds in which each thread wrote
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(ON_HOST):
            self._free.put(torch.empty(shape, dtype=torch.bfloat16, pin_memory=self.cuda))
        self._open: dict[tuple[int, int], ShardWriter] = {}
        self._stores: list[Store] = []
        self._finished: collections.deque[tuple[int, int]] = collections.deque()
        self._trouble: Exception | None = None
        self._in_flight = 0
        self._idle = threading.Condition()
        self._work: list[queue.SimpleQueue[Step]] = [queue.SimpleQueue() for _ in names]
        self._whole: queue.SimpleQueue[tuple[tuple[int, int], ShardWriter]] = queue.SimpleQueue()
        for number, work in enumerate(self._work):
            threading.Thread(target=self._write, args=(number, work), daemon=True).start()
        threading.Thread(target=self._finish, daemon=True).start()

    def stores(self, paths: Sequence[str]) -> None:
        """Names the stores that samples are of; each has its manifest."""
        self._stores = [Store(Path(path), read_manifest(Path(path))) for path in paths]

    def open(self, store: int, number: int, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> None:
        """Begins a shard, with its samples' token ids and loss masks."""
        with self._kept_trouble():
            shard = self._stores[store].shard_writer(number)
            samples = self._stores[store].manifest.samples_of(number)
            for sample, token_ids, mask in zip(samples, ids, masks, strict=True):
                shard.put(sample, "input_ids", 0, as_bytes(torch.tensor(token_ids)))
                shard.put(sample, "loss_mask", 0, as_bytes(torch.tensor(mask, dtype=torch.bool)))
            self._open[store, number] = shard

    def step(self, last: torch.Tensor, requests: Sequence[tuple[str, int, int]]) -> None:
        """Takes what the taps hold, and the last hidden state, of one step.

        Args:
            last: [tokens, H], of at least as many rows as were scheduled.
            requests: (id, tokens computed before, tokens of this step), in the order of the rows.
        """
        spans, at = [], 0
        for name, first, rows in requests:
            if (span := self._span(name, first, at, rows)) is not None:
                spans.append(span)
            at += rows
        if not spans or self._trouble is not None:
            return
        start = time.monotonic()
        host = self._free.get()
        self.waited += time.monotonic() - start
        with self._idle:
            self._in_flight += 1
        sources = [*self.taps.buffers, last]
        ready = self._copy(sources, host, at)
        step = Step(host=host, ready=ready, spans=spans, left=len(self._work))
        for work in self._work:
            work.put(step)

    def finished(self) -> tuple[list[tuple[int, int]], tuple[str, str, str, str] | None]:
        """The shards that are on the disk since this was asked last, as (store, number), and what has gone wrong."""
        done = []
        while self._finished:  # a thread adds to it meanwhile
            done.append(self._finished.popleft())
        return done, _described(self._trouble)

    def drain(self) -> None:
        """Waits until all that was taken is on the disk, or something has gone wrong."""
        with self._idle:
            self._idle.wait_for(lambda: self._in_flight == 0)

    def _span(self, name: str, first: int, at: int, rows: int) -> Span | None:
        store, colon, sample = name.rpartition("-")[0].partition(":")
        if not colon:
            return None
        key = int(store), int(sample) // self._stores[int(store)].manifest.shard_samples
        shard = self._open.get(key)
        if shard is None:
            return None
        return Span(key=key, shard=shard, sample=int(sample), first=first, at=at, rows=rows)

    def _copy(self, sources: Sequence[torch.Tensor], host: torch.Tensor, rows: int) -> Any:
        """Begins the copy to the host; gives the event after which it is there."""
        if not self.cuda:
            for place, source in zip(host, sources, strict=True):
                place[:rows].copy_(source[:rows])
            return None
        turn = self._steps % ON_DEVICE
        self._steps += 1
        main, staged = torch.cuda.current_stream(), self._device[turn]
        if self._copied[turn] is not None:
            main.wait_event(self._copied[turn])
        for place, source in zip(staged, sources, strict=True):
            place[:rows].copy_(source[:rows])
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for place, source in zip(host, staged, strict=True):
                place[:rows].copy_(source[:rows], non_blocking=True)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        self._copied[turn] = event
        return event

    def _write(self, number: int, work: "queue.SimpleQueue[Step]") -> None:
        """A thread: writes one state's rows of every step, in the order of the steps."""
        while True:
            step = work.get()
            with self._kept_trouble():
                if step.ready is not None:
                    step.ready.synchronize()
                start, rows = time.monotonic(), step.host[number]
                for span in step.spans:
                    if self._trouble is not None:
                        break
                    data = as_bytes(rows[span.at : span.at + span.rows])
                    if span.shard.put(span.sample, self.names[number], span.first, data):
                        with self._idle:
                            self._in_flight += 1
                        self._whole.put((span.key, span.shard))
                self.written[number] += time.monotonic() - start
            with step.lock:
                step.left -= 1
                done = step.left == 0
            if done:
                self._free.put(step.host)
                self._one_less()

    def _finish(self) -> None:
        """A thread: gives whole shards their names, which waits for the disk."""
        while True:
            key, shard = self._whole.get()
            with self._kept_trouble():
                shard.finish()
                del self._open[key]
                self._finished.append(key)
            self._one_less()

    def _one_less(self) -> None:
        with self._idle:
            self._in_flight -= 1
            self._idle.notify_all()

    @contextlib.contextmanager
    def _kept_trouble(self) -> Iterator[None]:
        """Keeps the first error of a thread for the driver, which asks for it: nobody waits for the thread itself."""
        try:
            yield
        except Exception as error:
            self._trouble = self._trouble or error


def _described(error: Exception | None) -> tuple[str, str, str, str] | None:
    """An error as plain words, which cross processes: its class, what, cause and next step."""
    if error is None:
        return None
    if isinstance(error, DraftmillError):
        return type(error).__name__, error.what, error.cause, error.next_step
    return "StackError", f"{type(error).__name__}: {error}", "", ""
