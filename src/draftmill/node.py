"""What a machine is: its GPUs as NVML tells them, its kernel's limits, its disks, its Docker. `doctor` judges it.

Nothing here changes anything, and nothing raises: what cannot be read is an `Unread` in its place, with the reason.
"""

import contextlib
import functools
import itertools
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftmill import engine
from draftmill.files import free
from draftmill.process import run

ACS_CAPABILITY = 0x000D  # PCI Express Base Specification, Access Control Services
ACS_REDIRECTS = 0x0004 | 0x0008  # its control register: P2P request redirect, P2P completion redirect
INSIDE = Path("/opt/draftmill/manifest.txt")  # our image has it
LIMIT_FREE = 1 << 62  # RLIM_INFINITY, as a size


@dataclass(frozen=True)
class Unread:
    """A value that could not be read."""

    reason: str


type Read[T] = T | Unread


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Sizes in bytes, power in watts, temperatures in degrees Celsius."""

    index: int
    name: Read[str] = Unread("not asked")
    uuid: Read[str] = Unread("not asked")
    bus: Read[str] = Unread("not asked")
    capability: Read[tuple[int, int]] = Unread("not asked")
    memory: Read[int] = Unread("not asked")
    memory_free: Read[int] = Unread("not asked")
    ecc: Read[bool] = Unread("not asked")
    ecc_errors: Read[int] = Unread("not asked")  # uncorrected, over the card's life
    mig: Read[bool] = Unread("not asked")
    persistence: Read[bool] = Unread("not asked")
    temperature: Read[int] = Unread("not asked")
    power_limit: Read[float] = Unread("not asked")
    power_default: Read[float] = Unread("not asked")
    slowed: Read[tuple[str, ...]] = Unread("not asked")  # why its clocks are held down
    processes: Read[tuple[int, ...]] = Unread("not asked")  # their ids
    pcie_generation: Read[int] = Unread("not asked")
    pcie_generation_max: Read[int] = Unread("not asked")
    pcie_width: Read[int] = Unread("not asked")
    pcie_width_max: Read[int] = Unread("not asked")
    nvlinks: Read[int] = Unread("not asked")  # active ones


@dataclass(frozen=True, kw_only=True)
class Docker:
    """The engine as `docker info` tells it, and what is installed beside it."""

    version: Read[str] = Unread("not asked")
    buildx: Read[str] = Unread("not asked")
    compose: Read[str] = Unread("not asked")
    runtimes: tuple[str, ...] = ()
    cdi: bool = False  # a CDI specification of NVIDIA's is there
    toolkit: Read[str] = Unread("not asked")  # NVIDIA's container toolkit
    folder: str = "/var/lib/docker"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine's readings. Sizes in bytes."""

    driver: Read[str] = Unread("not asked")
    module: Read[str] = Unread("not asked")  # the kernel module's version, the driver's other half
    cuda: Read[tuple[int, int]] = Unread("not asked")  # the newest CUDA that the driver runs
    gpus: Read[tuple[Gpu, ...]] = Unread("not asked")
    peers: dict[tuple[int, int], Read[bool]] = field(default_factory=dict)  # whether two GPUs reach each other directly
    acs: Read[tuple[str, ...]] = Unread("not asked")  # bridges that redirect peer traffic to the root
    iommu: Read[bool] = Unread("not asked")  # whether it translates
    shm: Read[int] = Unread("not asked")
    memlock: Read[int] = Unread("not asked")
    open_files: Read[int] = Unread("not asked")
    huge_pages: Read[int] = Unread("not asked")
    cores: Read[int] = Unread("not asked")
    numa_nodes: Read[int] = Unread("not asked")
    memory: Read[int] = Unread("not asked")
    disk_free: Read[int] = Unread("not asked")  # where the runs go
    image_free: Read[int] = Unread("not asked")  # where the engine keeps its images
    container: bool = False  # whether this was read in our image, where Docker is out of reach
    docker: Docker = Docker()


def read[T](ask: Callable[[], T]) -> Read[T]:
    """What `ask` gives, or why it gives nothing."""
    try:
        return ask()
    except Exception as error:  # NVML's, the kernel's, a word that is no number: one unread value each
        return Unread(f"{type(error).__name__}: {error}".removeprefix("NVMLError_"))


def node(runs: Path) -> Node:
    """Reads this machine.

    Args:
        runs: the folder for outputs; its disk is looked at.
    """
    beside = docker()
    return Node(
        **_nvml(),
        acs=read(lambda: tuple(redirecting(Path("/sys/bus/pci/devices")))),
        iommu=read(lambda: translating(Path("/sys/kernel/iommu_groups"))),
        module=read(lambda: _module(Path("/proc/driver/nvidia/version"))),
        shm=read(lambda: _size(Path("/dev/shm"))),
        memlock=read(lambda: _limit(resource.RLIMIT_MEMLOCK)),
        open_files=read(lambda: _limit(resource.RLIMIT_NOFILE)),
        huge_pages=read(lambda: meminfo()["HugePages_Total"]),
        cores=read(lambda: len(os.sched_getaffinity(0))),
        numa_nodes=read(lambda: len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        memory=read(lambda: meminfo()["MemTotal"]),
        disk_free=read(lambda: free(runs)),
        image_free=read(lambda: free(Path(beside.folder))),
        container=INSIDE.exists(),
        docker=beside,
    )


def _nvml() -> dict[str, Any]:
    """The fields that NVML knows."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, no driver, no device: each means that there is no GPU to ask
        missing = Unread(str(error))
        return {"driver": missing, "cuda": missing, "gpus": missing}
    try:
        count = read(pynvml.nvmlDeviceGetCount)
        gpus = count if isinstance(count, Unread) else tuple(gpu(pynvml, index) for index in range(count))
        return {
            "driver": read(pynvml.nvmlSystemGetDriverVersion),
            "cuda": read(lambda: _cuda(pynvml.nvmlSystemGetCudaDriverVersion_v2())),
            "gpus": gpus,
            "peers": {} if isinstance(count, Unread) else peers(pynvml, count),
        }
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def gpu(nvml: Any, index: int) -> Gpu:
    """Asks NVML (the module `pynvml`) for everything about one GPU; what it does not tell is unread."""
    handle = read(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(handle, Unread):
        return Gpu(index=index, **{name: handle for name in Gpu.__dataclass_fields__ if name != "index"})

    def ask(name: str, *more: Any) -> Callable[[], Any]:
        return lambda: getattr(nvml, name)(handle, *more)

    questions: dict[str, Callable[[], Any]] = {
        "name": ask("nvmlDeviceGetName"),
        "uuid": ask("nvmlDeviceGetUUID"),
        "bus": lambda: ask("nvmlDeviceGetPciInfo")().busId,
        "capability": lambda: tuple(ask("nvmlDeviceGetCudaComputeCapability")()),
        "memory": lambda: ask("nvmlDeviceGetMemoryInfo")().total,
        "memory_free": lambda: ask("nvmlDeviceGetMemoryInfo")().free,
        "ecc": lambda: bool(ask("nvmlDeviceGetEccMode")()[0]),
        "ecc_errors": ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        ),
        "mig": lambda: bool(ask("nvmlDeviceGetMigMode")()[0]),
        "persistence": lambda: bool(ask("nvmlDeviceGetPersistenceMode")()),
        "temperature": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power_limit": lambda: ask("nvmlDeviceGetPowerManagementLimit")() / 1000,
        "power_default": lambda: ask("nvmlDeviceGetPowerManagementDefaultLimit")() / 1000,
        "slowed": lambda: tuple(slowdowns(nvml, ask("nvmlDeviceGetCurrentClocksEventReasons")())),
        "processes": lambda: tuple(one.pid for one in ask("nvmlDeviceGetComputeRunningProcesses")()),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "nvlinks": lambda: links(nvml, handle),
    }
    return Gpu(index=index, **{name: read(question) for name, question in questions.items()})


def links(nvml: Any, handle: Any) -> int:
    """How many of a GPU's NVLinks are up; 0 for a GPU that has none."""
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # past the last of them
            break
    return up


def slowdowns(nvml: Any, reasons: int) -> Iterator[str]:
    """The reasons, out of NVML's bits, for which a GPU that should run at full speed does not."""
    named = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
    for name in named:
        if reasons & getattr(nvml, f"nvmlClocksEventReason{name}", getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)):
            yield name


def peers(nvml: Any, count: int) -> dict[tuple[int, int], Read[bool]]:
    """For every pair of GPUs, whether the driver lets one read the other's memory."""

    def reach(first: int, second: int) -> bool:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in (first, second)]
        status = nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_READ)
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    return {pair: read(functools.partial(reach, *pair)) for pair in itertools.combinations(range(count), 2)}


def redirecting(devices: Path) -> Iterator[str]:
    """The PCI bridges whose ACS sends traffic between two GPUs up to the root, by their address.

    Raises:
        PermissionError: the configuration is cut off behind its first 64 bytes, as it is for all but root.
    """
    for folder in sorted(devices.iterdir()):
        if not (folder / "class").read_text().startswith("0x0604"):
            continue
        control = acs_control((folder / "config").read_bytes())
        if control and control & ACS_REDIRECTS:
            yield folder.name


def acs_control(config: bytes) -> int | None:
    """ACS's control register in a PCI Express function's configuration; None where it has no ACS."""
    if len(config) <= 256:
        if len(config) < 256:
            raise PermissionError("only root reads a bridge's whole configuration")
        return None  # a conventional PCI function
    at = 0x100
    for _ in range(960 // 2):  # more capabilities than fit mean a circle
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = head >> 20
        if at < 0x100:
            return None
    return None


def translating(groups: Path) -> bool:
    """Whether an IOMMU translates for some device: a group whose type is not `identity`."""
    types = [(group / "type").read_text().strip() for group in groups.iterdir() if (group / "type").exists()]
    return any(kind != "identity" for kind in types)


def docker() -> Docker:
    """Asks the engine, and the commands beside it; what does not answer is unread."""
    info = read(engine.about)
    told: dict[str, Any] = {} if isinstance(info, Unread) else info
    return Docker(
        version=info if isinstance(info, Unread) else read(lambda: _version(told["ServerVersion"])),
        buildx=read(lambda: _version(run(["docker", "buildx", "version"]))),
        compose=read(lambda: _version(run(["docker", "compose", "version", "--short"]))),
        runtimes=tuple(told.get("Runtimes") or ()),
        cdi=any(list(Path(folder).glob("*nvidia*")) for folder in ("/etc/cdi", "/var/run/cdi")),
        toolkit=read(lambda: _version(run(["nvidia-ctk", "--version"]))),
        folder=told.get("DockerRootDir", Docker.folder),
    )


def _version(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+", text)
    if not found:
        raise ValueError(f"no version in {text!r}")
    return found.group()


def _cuda(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


def _module(path: Path) -> str:
    return _version(path.read_text().splitlines()[0].replace("Open Kernel Module for x86_64", ""))


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return LIMIT_FREE if soft == resource.RLIM_INFINITY else soft


def _size(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_frsize * found.f_blocks


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """The kernel's table of memory, in bytes; pages as their count."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found
