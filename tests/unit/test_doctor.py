"""Readings of many machines, and what is said of each: an 8-GPU node as it should be, and others unlike it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from draftmill import cli, doctor
from draftmill.doctor import PROFILES, exit_code, judge
from draftmill.node import LIMIT_FREE, Docker, Gpu, Node, Unread

GB = 1_000_000_000
BROKEN = Unread("Unknown Error")


def card(index: int, **changed: Any) -> Gpu:
    """An RTX PRO 6000 Blackwell, idle."""
    values: dict[str, Any] = {
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": f"GPU-{index}",
        "bus": f"00000000:{index:02X}:00.0",
        "capability": (12, 0),
        "memory": 102_641_958_912,
        "memory_free": 101_900_000_000,
        "ecc": True,
        "ecc_errors": 0,
        "mig": False,
        "persistence": True,
        "temperature": 34,
        "power_limit": 600.0,
        "power_default": 600.0,
        "slowed": (),
        "processes": (),
        "pcie_generation": 1,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "nvlinks": 0,
    }
    return Gpu(index=index, **{**values, **changed})


PAIRS = [(first, second) for first in range(8) for second in range(first + 1, 8)]
DOCKER = Docker(version="28.1.1", buildx="0.23.0", compose="2.35.1", runtimes=("nvidia", "runc"), toolkit="1.17.8")
GOOD = Node(
    driver="575.57.08",
    module="575.57.08",
    cuda=(12, 9),
    gpus=tuple(card(index) for index in range(8)),
    peers=dict.fromkeys(PAIRS, True),
    acs=(),
    iommu=False,
    shm=540 * GB,
    memlock=LIMIT_FREE,
    open_files=1_048_576,
    huge_pages=0,
    cores=128,
    numa_nodes=2,
    memory=1080 * GB,
    disk_free=6000 * GB,
    image_free=400 * GB,
    docker=DOCKER,
)


def with_card(index: int, **changed: Any) -> Node:
    assert not isinstance(GOOD.gpus, Unread)
    return replace(GOOD, gpus=tuple(card(i, **changed) if i == index else gpu for i, gpu in enumerate(GOOD.gpus)))


def with_docker(**changed: Any) -> Node:
    return replace(GOOD, docker=replace(DOCKER, **changed))


NONE = Unread("NVML Shared Library Not Found")
LAPTOP = replace(
    GOOD, driver=NONE, module=NONE, cuda=NONE, gpus=NONE, peers={}, memory=17 * GB, cores=8, memlock=8_388_608
)

# A name, the machine, the profile, what is not ok: {row: verdict}, and the exit code.
CASES: list[tuple[str, Node, str, dict[str, str], int]] = [
    ("as it should be", GOOD, "blackwell-8", {}, 0),
    ("the same for any GPU", GOOD, "any-gpu", {}, 0),
    ("one GPU missing", replace(GOOD, gpus=tuple(card(i) for i in range(7))), "blackwell-8", {"GPUs": "critical"}, 1),
    ("one too many", replace(GOOD, gpus=tuple(card(i) for i in range(9))), "blackwell-8", {"GPUs": "critical"}, 1),
    ("seven do for any", replace(GOOD, gpus=tuple(card(i) for i in range(7))), "any-gpu", {}, 0),
    ("mixed drivers", replace(GOOD, module="570.133.20"), "blackwell-8", {"driver and kernel module": "critical"}, 1),
    (
        "a driver too old",
        replace(GOOD, driver="550.163.01", module="550.163.01", cuda=(12, 4)),
        "blackwell-8",
        {"driver": "critical", "CUDA of the driver": "critical"},
        1,
    ),
    ("the oldest driver", replace(GOOD, driver="570.26", module="570.26", cuda=(12, 8)), "blackwell-8", {}, 0),
    ("ECC errors", with_card(5, ecc_errors=2), "blackwell-8", {"GPU 5 ECC errors": "critical"}, 1),
    ("ECC off", with_card(0, ecc=False), "blackwell-8", {"GPU 0 ECC": "warn"}, 0),
    (
        "ECC off and its counter not told",
        with_card(0, ecc=False, ecc_errors=Unread("Not Supported")),
        "blackwell-8",
        {"GPU 0 ECC": "warn"},
        0,
    ),
    ("PCIe x8", with_card(6, pcie_width=8), "blackwell-8", {"GPU 6 PCIe width": "warn"}, 0),
    ("a slot of x8", with_card(6, pcie_width=8, pcie_width_max=8), "blackwell-8", {}, 0),
    ("MIG on", with_card(1, mig=True), "blackwell-8", {"GPU 1 MIG": "critical"}, 1),
    ("no persistence", with_card(1, persistence=False), "blackwell-8", {"GPU 1 persistence": "warn"}, 0),
    ("hot", with_card(2, temperature=91), "blackwell-8", {"GPU 2 temperature": "warn"}, 0),
    ("held down", with_card(2, slowed=("HwThermalSlowdown",)), "blackwell-8", {"GPU 2 clocks": "warn"}, 0),
    ("power lowered", with_card(2, power_limit=450.0), "blackwell-8", {"GPU 2 power limit": "warn"}, 0),
    ("another process", with_card(3, processes=(4711,)), "blackwell-8", {"GPU 3 processes": "warn"}, 0),
    (
        "another process with memory",
        with_card(3, processes=(4711,), memory_free=60 * GB),
        "blackwell-8",
        {"GPU 3 processes": "warn", "GPU 3 free memory": "warn"},
        0,
    ),
    (
        "another card",
        with_card(4, name="NVIDIA H200", capability=(9, 0)),
        "blackwell-8",
        {"GPUs of one kind": "warn", "GPU 4 name": "warn", "GPU 4 compute capability": "critical"},
        1,
    ),
    ("an old card", with_card(0, capability=(7, 5)), "any-gpu", {"GPU 0 compute capability": "critical"}, 1),
    ("ACS redirects", replace(GOOD, acs=("0000:40:01.1", "0000:80:01.1")), "blackwell-8", {"ACS": "warn"}, 0),
    ("ACS as no root", replace(GOOD, acs=Unread("only root")), "blackwell-8", {"ACS": "unknown"}, 2),
    ("the IOMMU translates", replace(GOOD, iommu=True), "blackwell-8", {"IOMMU": "warn"}, 0),
    (
        "with NVLink, ACS does not matter",
        replace(GOOD, acs=("0000:40:01.1",), iommu=True, gpus=tuple(card(i, nvlinks=18) for i in range(8))),
        "blackwell-8",
        {},
        0,
    ),
    (
        "one GPU, ACS does not matter",
        replace(GOOD, acs=("0000:40:01.1",), iommu=True, gpus=(card(0),), peers={}),
        "any-gpu",
        {},
        0,
    ),
    ("no peers", replace(GOOD, peers={**GOOD.peers, (0, 4): False}), "blackwell-8", {"peer access": "warn"}, 0),
    ("peers unread", replace(GOOD, peers={**GOOD.peers, (0, 4): BROKEN}), "blackwell-8", {"peer access": "unknown"}, 2),
    ("/dev/shm of 64 MB", replace(GOOD, shm=67_108_864), "blackwell-8", {"/dev/shm": "critical"}, 1),
    ("/dev/shm of 64 MB does for a CPU", replace(GOOD, shm=67_108_864), "cpu", {}, 0),
    ("memlock of 64 kB", replace(GOOD, memlock=65_536), "blackwell-8", {"memlock": "critical"}, 1),
    ("1024 open files", replace(GOOD, open_files=1024), "blackwell-8", {"open files": "warn"}, 0),
    (
        "no runtime",
        with_docker(runtimes=("runc",), toolkit=Unread("no nvidia-ctk")),
        "blackwell-8",
        {"GPUs in containers": "critical"},
        1,
    ),
    (
        "toolkit there, Docker not restarted",
        with_docker(runtimes=("runc",)),
        "blackwell-8",
        {"GPUs in containers": "critical"},
        1,
    ),
    ("CDI in place of a runtime", with_docker(runtimes=("runc",), cdi=True), "blackwell-8", {}, 0),
    (
        "no engine",
        with_docker(version=BROKEN, runtimes=()),
        "blackwell-8",
        {"Docker": "unknown", "GPUs in containers": "unknown"},
        2,
    ),
    ("an old engine", with_docker(version="19.03.15"), "blackwell-8", {"Docker": "warn"}, 0),
    ("an old Compose", with_docker(compose="2.17.0"), "blackwell-8", {"Docker Compose": "warn"}, 0),
    ("in the container", replace(GOOD, container=True, image_free=0, docker=Docker()), "blackwell-8", {}, 0),
    (
        "no room for the image",
        replace(GOOD, image_free=9 * GB),
        "blackwell-8",
        {"free disk for the image": "critical"},
        1,
    ),
    ("little room for runs", replace(GOOD, disk_free=300 * GB), "blackwell-8", {"free disk for runs": "warn"}, 0),
    ("little memory", replace(GOOD, memory=128 * GB), "blackwell-8", {"host memory": "warn"}, 0),
    ("few cores", replace(GOOD, cores=16), "blackwell-8", {"CPU cores": "warn"}, 0),
    (
        "NVML fails on one call",
        replace(GOOD, gpus=tuple(card(i, power_limit=BROKEN) for i in range(8))),
        "blackwell-8",
        {f"GPU {i} power limit": "unknown" for i in range(8)},
        2,
    ),
    (
        "NVML fails on one call of one GPU",
        with_card(7, ecc_errors=BROKEN),
        "blackwell-8",
        {"GPU 7 ECC errors": "unknown"},
        2,
    ),
    (
        "unread and critical",
        with_card(7, ecc_errors=BROKEN, mig=True),
        "blackwell-8",
        {"GPU 7 ECC errors": "unknown", "GPU 7 MIG": "critical"},
        1,
    ),
    ("no GPU", LAPTOP, "any-gpu", {"host memory": "warn", "memlock": "critical", "GPUs": "critical"}, 1),
    ("no GPU, and none wanted", LAPTOP, "cpu", {}, 0),
    ("a small laptop", replace(LAPTOP, memory=8 * GB), "cpu", {"host memory": "warn"}, 0),
    ("an empty reading", Node(), "cpu", {}, 2),
]


def test_there_are_at_least_forty() -> None:
    assert len({name for name, *_ in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize(("machine", "profile", "expected", "code"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_machine_is_judged(machine: Node, profile: str, expected: dict[str, str], code: int) -> None:
    rows = judge(machine, PROFILES[profile])
    if machine != Node():
        assert {row.what: row.verdict for row in rows if row.verdict != "ok"} == expected
    assert exit_code(rows) == code
    for row in rows:
        if row.verdict in ("warn", "critical"):
            assert row.do, f"{row.what}: nothing to do is said"


def test_a_gpu_that_does_not_answer_leaves_the_rest_judged() -> None:
    lost = Gpu(index=3, **{name: Unread("GPU is lost") for name in Gpu.__dataclass_fields__ if name != "index"})
    assert not isinstance(GOOD.gpus, Unread)
    rows = judge(replace(GOOD, gpus=(*GOOD.gpus[:3], lost, *GOOD.gpus[4:])), PROFILES["blackwell-8"])
    unknown = [row for row in rows if row.verdict == "unknown"]
    assert {row.what.split()[1] for row in unknown} == {"3"}
    assert all("GPU is lost" in row.found for row in unknown)
    assert sum(row.what.startswith("GPU 4 ") and row.verdict == "ok" for row in rows) > 10


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "node", lambda runs: with_card(1, mig=True))
    done = CliRunner().invoke(cli.app, ["doctor", "--profile", "blackwell-8", "--json"])
    tree = json.loads(done.stdout)
    assert done.exit_code == tree["exit_code"] == 1
    assert set(tree) == {"profile", "exit_code", "rows"}
    assert {tuple(row) for row in tree["rows"]} == {("what", "found", "wanted", "verdict", "do")}


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "node", lambda runs: LAPTOP)
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.startswith("no GPU was found: NVML Shared Library Not Found\n")
    assert CliRunner().invoke(cli.app, ["doctor", "--profile", "cpu"]).exit_code == 0
