import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftmill import compute
from draftmill.recipe import Recipe


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\nmodel name\t: bf16 machine\n", False),
        ("", False),
    ],
)
def test_bfloat16_in_hardware_is_read_from_the_flags(tmp_path: Path, text: str, native: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert compute.cpu_has_bf16(tmp_path / "cpuinfo") is native


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    assert compute.cpu_has_bf16(tmp_path / "none") is False


@pytest.mark.parametrize(
    ("asked", "cuda", "native", "dtype"),
    [
        ("auto", True, False, "bfloat16"),
        ("auto", False, True, "bfloat16"),
        ("auto", False, False, "float32"),
        ("float32", True, True, "float32"),
        ("bfloat16", False, False, "bfloat16"),
    ],
)
def test_the_targets_dtype(monkeypatch: pytest.MonkeyPatch, asked: str, cuda: bool, native: bool, dtype: str) -> None:
    recipe: Any = Recipe.load(None, {"target.dtype": f'"{asked}"'})
    monkeypatch.setattr(compute, "has_cuda", lambda: cuda)
    monkeypatch.setattr(compute, "cpu_has_bf16", lambda: native)
    assert compute.target_dtype(recipe) == dtype


def test_what_the_user_has_set_for_vllm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "has_cuda", lambda: False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    compute.set_up_vllm(tensor_parallel=3)
    assert compute.os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert compute.os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_an_engines_output_goes_to_its_log_and_ours_to_the_user(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
from pathlib import Path
from draftmill import compute
print("before")
with compute.engine_output_to(Path({str(tmp_path / "log")!r})) as console:
    print("noise")
    print("noise too", file=sys.stderr)
    subprocess.run(["echo", "noise of a child"])
    console.print("for the user")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["before", "for the user", "after", ""]
    assert done.stderr == ""
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["noise", "noise of a child", "noise too"]


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert compute.last_error(log) == ""
    log.write_text("ValueError: first\nINFO fine\n(Worker) RuntimeError: the cause\n  at the end\n")
    assert compute.last_error(log) == "(Worker) RuntimeError: the cause"
