"""What a run ran on: versions, CPU, memory and GPUs. No host name, no user name, no path outside the run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from draftmill.compute import stack_versions

PATCH_MARK = "+draftmill."


class Machine(BaseModel):
    """The machine that wrote the report. `cores` are those this process may use."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    cpu: str
    cores: int
    memory_gib: float
    gpus: list[str]
    system: str

    @classmethod
    def read(cls) -> Machine:
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return cls(
            cpu=cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(memory, 1),
            gpus=gpus,
            system=f"{platform.system()} {platform.machine()}",
        )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the kernel gives it, else its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def versions() -> dict[str, str]:
    """The versions of Python, draftmill and the stack; what is not installed is left out."""
    found = {"python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["draftmill"] = importlib.metadata.version("draftmill")
    return found | stack_versions()


def patch_digest(speculators: str | None) -> str | None:
    """The first 12 digits of the patch series' sha256, as the patched library's version has them; None if unpatched."""
    _, mark, digest = (speculators or "").partition(PATCH_MARK)
    return digest if mark else None


def now() -> str:
    """This moment with its offset from UTC, to the second (ISO 8601)."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
