"""What training writes while it runs: metrics.jsonl, TensorBoard's scalars and the progress bar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from draftmill.files import write_whole

if TYPE_CHECKING:
    from types import TracebackType


class Record:
    """One object for all three, open for the length of a run.

    metrics.jsonl holds a JSON object a step; each line is flushed. When a run goes on from step s, what was written
    after s is cut off, so that no step is there twice.
    """

    def __init__(self, metrics: Path, tensorboard: Path, *, start: int, steps: int) -> None:
        """`start`: steps already done; `steps`: steps in all."""
        self._metrics = metrics
        self._tensorboard = tensorboard
        self._start = start
        self._steps = steps

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from torch.utils.tensorboard import SummaryWriter

        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._metrics, "".join(kept(self._metrics, self._start)).encode())
        self._file = self._metrics.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(self._tensorboard), purge_step=self._start + 1)
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("train", total=self._steps, completed=self._start, note="")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._board.close()
        self._file.close()

    def write(self, line: Mapping[str, Any], scalars: Mapping[str, float], note: str) -> None:
        """Records one step: its line of metrics.jsonl, TensorBoard's scalars, and what stands beside the progress
        bar.
        """
        self._file.write(json.dumps(dict(line)) + "\n")
        self._file.flush()
        step = line["step"]
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        self._progress.update(self._task, completed=step, note=note)


def kept(metrics: Path, step: int) -> list[str]:
    """The lines of metrics.jsonl up to `step`; a line that a killed run left half-written is not among them."""
    if step == 0 or not metrics.exists():
        return []
    lines = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if number <= step and line.endswith("\n"):
            lines.append(line)
    return lines
