"""The tables: a check is a row here. What needs more than one reading to say is a function above them."""

from typing import Any

from draftmill.doctor.rows import GB, Check, Profile, at_least, both, dotted, on_off, release, size
from draftmill.node import Node, Read, Unread

CUDA = (12, 8)  # what the image is built with
DRIVER = "570.26"  # the first Linux driver with CUDA 12.8 (CUDA toolkit release notes, table 3)
IMAGE = 14 * GB  # the image unpacked, with what is packed while it is pulled
HOT = 85  # degrees Celsius


def wants_gpus(machine: Any, profile: Profile) -> bool:
    return profile.gpus > 0


def on_host(machine: Node, profile: Profile) -> bool:
    return not machine.container


def gpus_seen(machine: Node, profile: Profile) -> bool:
    return not isinstance(machine.gpus, Unread)


def no_nvlink(machine: Node, profile: Profile) -> bool:
    """Several GPUs that meet over PCIe, where ACS and the IOMMU stand between them."""
    found = machine.gpus
    return not isinstance(found, Unread) and len(found) > 1 and any(gpu.nvlinks == 0 for gpu in found)


def attached(machine: Node) -> Read[str]:
    """How Docker attaches GPUs; where it does not, what is there of it."""
    found = machine.docker
    if "nvidia" in found.runtimes:
        return "runtime nvidia"
    if found.cdi:
        return "CDI"
    if isinstance(found.version, Unread):
        return found.version
    if isinstance(found.toolkit, Unread):
        return "neither"
    return f"neither, though its toolkit {found.toolkit} is installed: not configured, or Docker was not restarted"


def peers(machine: Node) -> Read[tuple[tuple[int, int], ...]]:
    """The pairs of GPUs that do not reach each other."""
    apart = tuple(pair for pair, found in machine.peers.items() if found is False)
    unread = [found for found in machine.peers.values() if isinstance(found, Unread)]
    return unread[0] if unread and not apart else apart


HOST = (
    at_least(
        what="host memory",
        value=lambda machine: machine.memory,
        least=lambda profile: profile.memory,
        bad="warn",
        show=size,
        do="loading the target may fail: take a machine with more, or a smaller target",
    ),
    at_least(
        what="CPU cores",
        value=lambda machine: machine.cores,
        least=lambda profile: max(2, 4 * profile.gpus),
        bad="warn",
        do="the workers will wait for each other: give them more",
    ),
    at_least(
        what="/dev/shm",
        value=lambda machine: machine.shm,
        least=lambda profile: 8 * GB if profile.gpus else GB // 20,
        show=size,
        do="vLLM's workers meet there: add --ipc=host or --shm-size=16g (compose.yaml has it)",
    ),
    at_least(
        what="memlock",
        value=lambda machine: machine.memlock,
        least=GB,
        show=size,
        do="pinned buffers fail: --ulimit memlock=-1, or `* - memlock unlimited` in /etc/security/limits.conf",
        when=wants_gpus,
    ),
    at_least(
        what="open files",
        value=lambda machine: machine.open_files,
        least=4096,
        bad="warn",
        do="ulimit -n 65536, or --ulimit nofile=65536",
    ),
    at_least(
        what="free disk for runs",
        value=lambda machine: machine.disk_free,
        least=lambda profile: profile.disk,
        bad="warn",
        show=size,
        do="`draftmill extract` says how much it will write before it starts; another disk is run.folder",
    ),
    at_least(
        what="free disk for the image",
        value=lambda machine: machine.image_free,
        least=IMAGE,
        show=size,
        do="docker system prune, or move Docker's data-root",
        when=on_host,
    ),
    release(
        what="Docker",
        value=lambda machine: machine.docker.version,
        least="20.10",
        bad="warn",
        do="install a later one",
        unread="install and start Docker, or go without it: ./just setup",
        when=on_host,
    ),
    release(
        what="Docker's buildx",
        value=lambda machine: machine.docker.buildx,
        least="0.10",
        bad="warn",
        do="install a later one",
        unread="install Docker's buildx plugin",
        when=on_host,
    ),
    release(
        what="Docker Compose",
        value=lambda machine: machine.docker.compose,
        least="2.26",
        bad="warn",
        do="install a later one: compose.cpu.yaml's `!reset` needs it",
        unread="install Docker's Compose plugin",
        when=on_host,
    ),
    Check(
        what="GPUs in containers",
        value=attached,
        good=lambda found, profile: found.startswith(("runtime", "CDI")),
        wanted="NVIDIA's runtime, or CDI",
        do="nvidia-ctk runtime configure --runtime=docker, then restart Docker (a reload is not enough); "
        "without nvidia-ctk, install nvidia-container-toolkit first",
        unread="start Docker",
        when=lambda machine, profile: on_host(machine, profile) and wants_gpus(machine, profile),
    ),
)

GPUS = (
    Check(
        what="GPUs",
        value=lambda machine: () if isinstance(machine.gpus, Unread) else machine.gpus,
        good=lambda found, profile: (
            len(found) == profile.gpus if profile.exactly else len(found) >= max(1, profile.gpus)
        ),
        wanted=lambda profile: f"{profile.gpus}" if profile.exactly else f"{profile.gpus} or more",
        show=lambda found: str(len(found)),
        do="none: install NVIDIA's driver, or start the container with --gpus all. Too few: one fell off the bus "
        "(dmesg | grep -i xid), or is not passed in (nvidia-smi -L)",
    ),
    Check(
        what="GPUs of one kind",
        value=lambda machine: tuple(sorted({gpu.name for gpu in machine.gpus if isinstance(gpu.name, str)})),
        good=lambda found, profile: len(found) <= 1,
        wanted="one",
        bad="warn",
        show=", ".join,
        do="the slowest sets the pace of all: choose like ones with CUDA_VISIBLE_DEVICES",
        when=gpus_seen,
    ),
    release(
        what="driver",
        value=lambda machine: machine.driver,
        least=DRIVER,
        do="install a later one, then restart",
        when=gpus_seen,
    ),
    Check(
        what="CUDA of the driver",
        value=lambda machine: machine.cuda,
        good=lambda found, profile: found >= CUDA,
        wanted=f"{dotted(CUDA)} or later",
        show=dotted,
        do="install a later driver, then restart",
        when=gpus_seen,
    ),
    Check(
        what="driver and kernel module",
        value=lambda machine: both(machine.driver, machine.module),
        good=lambda found, profile: found[0] == found[1],
        wanted="one version",
        show=lambda found: found[0] if found[0] == found[1] else f"{found[0]} and {found[1]}",
        do="the driver was replaced while its module was loaded: restart the machine",
        when=gpus_seen,
    ),
    Check(
        what="peer access",
        value=peers,
        good=lambda found, profile: not found,
        wanted="every pair",
        bad="warn",
        show=lambda found: (
            f"none between {found[0][0]} and {found[0][1]}, {len(found)} pairs" if found else "every pair"
        ),
        do="their traffic goes through the host; set NCCL_P2P_DISABLE=1 where collectives hang",
        when=lambda machine, profile: gpus_seen(machine, profile) and len(machine.gpus) > 1,
    ),
    Check(
        what="ACS",
        value=lambda machine: machine.acs,
        good=lambda found, profile: not found,
        wanted="no redirect",
        bad="warn",
        show=lambda found: f"redirects at {found[0]}, {len(found)} bridges" if found else "no redirect",
        do="collectives may hang: switch it off in the firmware or with setpci, or set NCCL_P2P_DISABLE=1",
        unread="run it as root, on the host",
        when=no_nvlink,
    ),
    Check(
        what="IOMMU",
        value=lambda machine: machine.iommu,
        good=lambda found, profile: not found,
        wanted="off, or passing through",
        bad="warn",
        show=lambda found: "translates" if found else "off, or passing through",
        do="boot with iommu=pt: translated peer traffic hangs or crawls",
        when=no_nvlink,
    ),
)

CARD = (
    Check(
        what="name",
        value=lambda gpu: gpu.name,
        good=lambda found, profile: profile.card in found,
        wanted=lambda profile: profile.card or "any",
        bad="warn",
        do="this profile is for another card: try --profile any-gpu",
    ),
    at_least(
        what="compute capability",
        value=lambda gpu: gpu.capability,
        least=lambda profile: profile.capability,
        show=dotted,
        do="the stack has no kernels for it",
    ),
    Check(
        what="free memory",
        value=lambda gpu: both(gpu.memory_free, gpu.memory),
        good=lambda found, profile: found[0] >= 0.9 * found[1],
        wanted="nine tenths or more",
        bad="warn",
        show=lambda found: f"{size(found[0])} of {size(found[1])}",
        do="something else holds it: nvidia-smi; or lower extract.gpu_memory_utilization",
    ),
    Check(
        what="processes",
        value=lambda gpu: gpu.processes,
        good=lambda found, profile: not found,
        wanted="none",
        bad="warn",
        show=lambda found: ", ".join(map(str, found)) or "none",
        do="wait for it, or leave this GPU out with CUDA_VISIBLE_DEVICES",
    ),
    Check(
        what="ECC errors",
        value=lambda gpu: gpu.ecc_errors,
        good=lambda found, profile: found == 0,
        wanted="none uncorrected",
        do="its results cannot be trusted: nvidia-smi -q -d ECC, and have the card looked at",
        when=lambda gpu, profile: gpu.ecc is not False,
    ),
    Check(
        what="ECC",
        value=lambda gpu: gpu.ecc,
        good=lambda found, profile: found,
        wanted="on",
        bad="warn",
        show=on_off,
        do="nvidia-smi -e 1, then restart: a flipped bit goes into the draft unseen otherwise",
    ),
    Check(
        what="MIG",
        value=lambda gpu: gpu.mig,
        good=lambda found, profile: not found,
        wanted="off",
        show=on_off,
        do="a slice has less memory and no peers: nvidia-smi -mig 0",
    ),
    Check(
        what="persistence",
        value=lambda gpu: gpu.persistence,
        good=lambda found, profile: found,
        wanted="on",
        bad="warn",
        show=on_off,
        do="every start waits for the driver otherwise: nvidia-smi -pm 1",
    ),
    Check(
        what="temperature",
        value=lambda gpu: gpu.temperature,
        good=lambda found, profile: found < HOT,
        wanted=f"below {HOT} °C",
        bad="warn",
        show=lambda found: f"{found} °C",
        do="it will slow down: look at its fans and the air",
    ),
    Check(
        what="clocks",
        value=lambda gpu: gpu.slowed,
        good=lambda found, profile: not found,
        wanted="not held down",
        bad="warn",
        show=lambda found: ", ".join(found) or "not held down",
        do="power or cooling falls short: nvidia-smi -q -d PERFORMANCE",
    ),
    Check(
        what="power limit",
        value=lambda gpu: both(gpu.power_limit, gpu.power_default),
        good=lambda found, profile: found[0] >= 0.95 * found[1],
        wanted="the card's own",
        bad="warn",
        show=lambda found: f"{found[0]:.0f} of {found[1]:.0f} W",
        do="someone lowered it: nvidia-smi -pl sets it back",
    ),
    Check(
        what="PCIe width",
        value=lambda gpu: both(gpu.pcie_width, gpu.pcie_width_max),
        good=lambda found, profile: found[0] >= found[1],
        wanted="the most that it has",
        bad="warn",
        show=lambda found: f"x{found[0]} of x{found[1]}",
        do="the card sits badly or in another slot's lanes: reseat it",
    ),
    Check(
        what="PCIe generation",
        value=lambda gpu: both(gpu.pcie_generation, gpu.pcie_generation_max),
        good=lambda found, profile: found[0] <= found[1],
        wanted="at rest, up to the most that it has",
        bad="warn",
        show=lambda found: f"{found[0]} of {found[1]}",
    ),
)
