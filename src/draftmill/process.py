"""Run a command: quietly, quoting its last lines if it fails, or in the foreground, with our signals passed on."""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftmill.errors import ProcessError

QUOTED_LINES = 15


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    next_step: str = "",
) -> str:
    """Runs `command` to its end and returns its standard output.

    Args:
        env: variables added to this process's own.
        next_step: what the user should do if it fails.

    Raises:
        ProcessError: the program is missing, or ended with another code than 0.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **env} if env else None,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ProcessError(f"cannot run {words[0]}: {error.strerror}", next_step=f"install {words[0]}") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-QUOTED_LINES:])
        raise ProcessError(f"`{shlex.join(words)}` ended with {done.returncode}:\n{tail}", next_step=next_step)
    return done.stdout


def foreground(command: Sequence[str | Path]) -> int:
    """Runs `command` on our terminal and returns its exit code; SIGINT and SIGTERM are passed on to it, once each.

    The command gets a process group of its own, so that a terminal's Ctrl-C reaches it through us alone: a program that
    saves its work on the first signal is not cut short by a second.
    """
    with subprocess.Popen([str(word) for word in command], process_group=0) as child:
        previous = {
            number: signal.signal(number, lambda received, _: child.send_signal(received))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
