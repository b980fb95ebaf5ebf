"""Runs `draftmill extract` again and again, each time in a process of its own that ends as a command does.

For each line of standard input, which names a recipe and a log: forks, prints the child's id, and when it has ended its
status. What such a short run takes is its imports: made once, here, for all of them.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def extract(recipe: str, log: str) -> None:
    from draftmill.cli import main

    os.setsid()
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["draftmill", "extract", "--recipe", recipe]
    main()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like
    import speculators.data_generation.vllm_hidden_states_generator  # noqa: F401
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker import cpu_worker  # noqa: F401

    # Workers are forked too. One such holds the pipe's end whose closing would tell it that its parent has died, so the
    # kernel tells it. The spawned ones of the command itself need no such help.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=die_with_parent)
    print("ready", file=answers)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            extract(*line.rstrip("\n").split("\t"))
            os._exit(0)
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


if __name__ == "__main__":
    serve()
