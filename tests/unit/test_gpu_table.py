"""The tests of a GPU, where there is none: they fail, and say why."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"


def test_without_a_gpu_they_fail_and_none_is_skipped() -> None:
    # Where there is a GPU after all, hiding it from CUDA makes it as if there were none.
    command = [sys.executable, "-m", "pytest", "-q", str(CONFTEST.parent / "test_node.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert "tests/gpu needs a GPU" in told and "sees none here" in told
    assert "passed" not in told and "skipped" not in told


def test_the_table_has_a_line_a_test() -> None:
    spec = importlib.util.spec_from_file_location("gpu_conftest", CONFTEST)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def report(name: str, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(nodeid=f"tests/gpu/test_x.py::{name}", duration=seconds)

    stats = {
        "passed": [report("b[1]", 1.0), report("b[2]", 2.6), report("a", 0.2)],
        "failed": [report("b[3]", 1.0)],
        "error": [report("c[1-x]", 0.0)],
        "skipped": [report("d", 0.0)],
        "warnings": [object()],
    }
    assert module.table(stats)[2:] == [
        "| tests/gpu/test_x.py::a | 1 | 0 | 0 | 0 |",
        "| tests/gpu/test_x.py::b | 2 | 1 | 0 | 5 |",
        "| tests/gpu/test_x.py::c | 0 | 1 | 0 | 0 |",
        "| tests/gpu/test_x.py::d | 0 | 0 | 1 | 0 |",
    ]
