# ruff: noqa: N802, N815 - NVML's names
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill import node
from draftmill.node import Unread


class NVMLError(Exception):
    pass


class Nvml:
    """NVML of two GPUs, of which one call fails on one."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_STATUS_OK = 0
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    nvmlClocksEventReasonSwThermalSlowdown = 0x20

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150, free=149),
            "nvmlDeviceGetEccMode": lambda handle: [1, 1],
            "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x41,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=4711)],
            "nvmlDeviceGetP2PStatus": lambda first, second, what: 0,
        }
        if name in answers:
            return answers[name]
        if name.startswith("NVML_"):
            return 0
        return self.fail

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 2:
            raise NVMLError("Invalid Argument")
        return 1

    def fail(self, *given: Any) -> Any:
        raise NVMLError("Not Supported")


def test_what_one_call_does_not_tell_leaves_the_rest_read() -> None:
    found = node.gpu(Nvml(), 1)
    assert (found.index, found.name, found.capability, found.ecc) == (1, "NVIDIA H200", (9, 0), True)
    assert (found.memory, found.memory_free, found.power_limit) == (150, 149, 700.0)
    assert (found.processes, found.slowed, found.nvlinks) == ((4711,), ("HwThermalSlowdown",), 2)
    assert found.uuid == Unread("NVMLError: Not Supported")


def test_peers_are_every_pair() -> None:
    assert node.peers(Nvml(), 3) == {(0, 1): True, (0, 2): True, (1, 2): True}


def config(*capabilities: tuple[int, int]) -> bytes:
    """A function's configuration of 4096 bytes with these extended capabilities, each with a control register at +6."""
    data = bytearray(4096)
    at = 0x100
    for number, (kind, control) in enumerate(capabilities):
        following = at + 0x40 if number + 1 < len(capabilities) else 0
        struct.pack_into("<IHH", data, at, kind | 1 << 16 | following << 20, 0, control)
        at = following
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (config((0x0001, 0), (0x000D, 0x001D)), 0x1D),
        (config((0x000D, 0)), 0),
        (config((0x0001, 0)), None),
        (bytes(4096), None),
        (bytes(256), None),
        (config((0x0001, 0))[:0x100] + struct.pack("<I", 0x0001 | 0x100 << 20) + bytes(3836), None),
    ],
    ids=["on", "off", "none", "empty", "conventional", "a circle"],
)
def test_acs_is_read_from_the_configuration(data: bytes, found: int | None) -> None:
    assert node.acs_control(data) == found


def test_only_root_reads_acs() -> None:
    with pytest.raises(PermissionError):
        node.acs_control(bytes(64))


def test_bridges_that_redirect_are_named(tmp_path: Path) -> None:
    for name, kind, control in (
        ("0000:00:01.0", "0x060400", 0x1D),
        ("0000:00:02.0", "0x060400", 1),
        ("0000:01:00.0", "0x030200", 0x1D),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(kind + "\n")
        (tmp_path / name / "config").write_bytes(config((0x000D, control)))
    assert list(node.redirecting(tmp_path)) == ["0000:00:01.0"]


def test_an_iommu_that_passes_through_does_not_translate(tmp_path: Path) -> None:
    for number, kind in enumerate(("identity", "identity")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "type").write_text(kind + "\n")
    assert not node.translating(tmp_path)
    (tmp_path / "1" / "type").write_text("DMA-FQ\n")
    assert node.translating(tmp_path)


def test_memory_is_in_bytes_and_pages_are_counted(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nHugePages_Total:      16\n")
    assert node.meminfo(tmp_path / "meminfo") == {"MemTotal": 1 << 20, "HugePages_Total": 16}


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    found = node.node(tmp_path / "not" / "there" / "yet")
    assert isinstance(found.memory, int)
    assert isinstance(found.shm, int)
    assert isinstance(found.disk_free, int)
