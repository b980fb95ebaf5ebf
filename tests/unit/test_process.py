import sys

import pytest

from draftmill.errors import ProcessError
from draftmill.process import QUOTED_LINES, run


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
