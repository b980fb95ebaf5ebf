"""SIGTERM and Ctrl-C during training: the step in progress is finished and a checkpoint written."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within the `with` block, `name` becomes the signal's name when one arrives; a second one acts as it always
    did.
    """

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread only; elsewhere the owner of that thread decides.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
