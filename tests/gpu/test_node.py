"""What NVML tells `node` of each GPU, held against nvidia-smi's own XML. Fails where there is no GPU."""

import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from draftmill.doctor import PROFILES, judge
from draftmill.node import Gpu, Node, Unread, node

GPU_FIELDS = [name for name in Gpu.__dataclass_fields__ if name != "index"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return node(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def told() -> ET.Element:
    return ET.fromstring(subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, check=True).stdout)


def gpus(machine: Node) -> tuple[Gpu, ...]:
    assert not isinstance(machine.gpus, Unread), machine.gpus.reason
    assert machine.gpus
    return machine.gpus


def test_every_field_is_read(machine: Node) -> None:
    for gpu in gpus(machine):
        assert [name for name in GPU_FIELDS if isinstance(getattr(gpu, name), Unread)] == []


def test_the_driver_is_nvidia_smi_s(machine: Node, told: ET.Element) -> None:
    assert machine.driver == machine.module == told.findtext("driver_version")
    assert machine.cuda == tuple(map(int, str(told.findtext("cuda_version")).split(".")))
    assert len(gpus(machine)) == int(str(told.findtext("attached_gpus")))


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("name", "product_name"),
        ("uuid", "uuid"),
        ("memory", "fb_memory_usage/total"),
        ("ecc", "ecc_mode/current_ecc"),
        ("mig", "mig_mode/current_mig"),
        ("persistence", "persistence_mode"),
        ("power_limit", "gpu_power_readings/current_power_limit"),
        ("power_default", "gpu_power_readings/default_power_limit"),
        ("pcie_generation", "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        ("pcie_generation_max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        ("pcie_width", "pci/pci_gpu_link_info/link_widths/current_link_width"),
        ("pcie_width_max", "pci/pci_gpu_link_info/link_widths/max_link_width"),
    ],
)
def test_a_reading_is_nvidia_smi_s(field: str, path: str, machine: Node, told: ET.Element) -> None:
    for gpu, element in zip(gpus(machine), told.findall("gpu"), strict=True):
        expected, found = str(element.findtext(path)), getattr(gpu, field)
        if isinstance(found, bool):
            assert found == (expected == "Enabled")
        elif field == "memory":
            assert found >> 20 == int(expected.removesuffix(" MiB"))
        elif isinstance(found, str):
            assert found == expected
        else:
            assert found == float(expected.removesuffix(" W").removesuffix("x"))


def test_the_machine_is_judged(machine: Node) -> None:
    rows = judge(machine, PROFILES["any-gpu"])
    assert [row for row in rows if row.what.startswith("GPU 0") and row.verdict in ("critical", "unknown")] == []
    assert Path("/proc/driver/nvidia/version").exists()
