import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.errors import ProcessError
from draftmill.process import QUOTED_LINES, foreground, run


def test_returns_standard_output_alone() -> None:
    assert run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"]) == "out\n"


def test_environment_is_added_to() -> None:
    assert (
        run([sys.executable, "-c", "import os; print(os.environ['X'], 'PATH' in os.environ)"], env={"X": "1"})
        == "1 True\n"
    )


def test_stdin_is_given() -> None:
    assert run([sys.executable, "-c", "print(input())"], stdin="hello") == "hello\n"


def test_a_failure_quotes_the_last_lines() -> None:
    with pytest.raises(ProcessError) as caught:
        run([sys.executable, "-c", "print(*range(100), sep='\\n'); raise SystemExit(3)"], next_step="do this")
    assert "ended with 3" in caught.value.what
    assert caught.value.what.splitlines()[-1] == "99"
    assert len(caught.value.what.splitlines()) == QUOTED_LINES + 1
    assert caught.value.next_step == "do this"


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ProcessError, match="no-such-program"):
        run(["no-such-program"])


def test_foreground_returns_the_exit_code() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert foreground([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_passes_a_signal_on_once(number: signal.Signals, tmp_path: Path) -> None:
    child = f"""
import pathlib, signal, time
seen = []
signal.signal({int(number)}, lambda n, _: seen.append(n))
print("ready", flush=True)
deadline = time.monotonic() + 20
while not seen and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.3)
pathlib.Path({str(tmp_path / "seen")!r}).write_text(repr(len(seen)))
raise SystemExit(5)
"""
    parent = (
        f"import sys; from draftmill.process import foreground; sys.exit(foreground([sys.executable, '-c', {child!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        os.killpg(started.pid, number)  # as a terminal does
        assert started.wait() == 5
    assert (tmp_path / "seen").read_text() == "1"
