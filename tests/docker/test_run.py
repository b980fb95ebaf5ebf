"""The stages, each in a container of its own, as compose.yaml starts them: in order, from the top of this file."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from containers import UID, Compose

from draftmill.store import Store

TRAINING = "draftmill-test-train"


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_the_stack_is_the_manifest_s(compose: Compose) -> None:
    assert "torch 2.10.0" in compose("run", "--rm", "test")


def test_extract_writes_a_store_that_is_whole(compose: Compose) -> None:
    compose("run", "--rm", "prepare")
    compose("run", "--rm", "extract")
    for part in ("train", "held_out"):
        command = [sys.executable, "-m", "draftmill", "store", "verify", str(compose.run_folder / "store" / part)]
        subprocess.run(command, check=True)


def test_the_store_is_the_one_that_is_written_outside(compose: Compose, tmp_path: Path) -> None:
    """The same prepared samples, extracted here by `.venv`, within test_parity's tolerance of the container's."""
    text = (compose.folder / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace('"/models/', f'"{compose.folder}/models/'))
    shutil.copytree(compose.run_folder / "prepared", tmp_path / "runs" / "demo" / "prepared")
    shutil.copytree(compose.run_folder / "target", tmp_path / "runs" / "demo" / "target")
    command = [sys.executable, "-m", "draftmill", "extract", "--recipe", "recipe.toml"]
    subprocess.run(command, cwd=tmp_path, check=True)
    inside, outside = (
        Store.open(folder / "store" / "train") for folder in (compose.run_folder, tmp_path / "runs" / "demo")
    )
    assert len(inside) == len(outside) > 10
    for index in range(len(inside)):
        found, expected = inside[index], outside[index]
        assert found.input_ids.equal(expected.input_ids)
        states = [(found.last_hidden_state, expected.last_hidden_state)]
        states += [(found.hidden_states[k], expected.hidden_states[k]) for k in expected.hidden_states]
        for mine, theirs in states:
            cosines = torch.cosine_similarity(mine.double(), theirs.double(), dim=-1)
            assert float(cosines.median()) >= 0.999


def test_train_told_to_stop_keeps_its_work_and_goes_on(compose: Compose) -> None:
    log = compose.run_folder / "metrics.jsonl"
    compose("run", "--detach", "--name", TRAINING, "train")
    try:
        until(lambda: log.exists() and log.read_text().count("\n") >= 2)
        docker("stop", "--time", "120", TRAINING)
        said = docker("logs", TRAINING)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", TRAINING).strip() == "130", said
    finally:
        docker("rm", "--force", TRAINING)
    checkpoints = list((compose.run_folder / "checkpoints").iterdir())
    assert checkpoints
    steps = [json.loads(line).get("step") for line in log.read_text().splitlines()]
    assert max(step for step in steps if step is not None) < 12
    compose("run", "--rm", "train")
    assert (compose.run_folder / "draft" / "config.json").exists()
    steps = [json.loads(line).get("step") for line in log.read_text().splitlines()]
    steps = [step for step in steps if step is not None]
    assert steps.count(1) <= 1, "it began anew"


def test_evaluate_and_report(compose: Compose) -> None:
    compose("run", "--rm", "evaluate")
    compose("run", "--rm", "report")
    assert json.loads((compose.run_folder / "evaluation.json").read_text())
    assert (compose.run_folder / "report.html").stat().st_size > 1000


def test_every_output_is_the_caller_s(compose: Compose) -> None:
    owners = {path.stat().st_uid for path in (compose.folder / "runs").rglob("*")}
    assert owners == {UID}


def test_serve_answers_a_chat_request(compose: Compose) -> None:
    compose("up", "--detach", "serve")
    try:
        until(lambda: answers("health"), seconds=300)
        check = docker("inspect", "--format", "{{json .Config.Healthcheck.Test}}", "draftmill-test-serve-1")
        probe = json.loads(check)[1:]
        docker("exec", "draftmill-test-serve-1", *probe)
        question = {
            "model": "demo",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "What is two and two?"}],
        }
        answer = ask("v1/chat/completions", question)
        assert json.loads(answer)["choices"][0]["message"]["content"]
        started = time.monotonic()
        compose("stop", "--timeout", "60", "serve")
        assert time.monotonic() - started < 50, "SIGTERM did not reach the server"
    finally:
        compose("rm", "--force", "--stop", "serve")


def test_a_recipe_that_is_not_mounted_is_said(compose: Compose) -> None:
    said = compose("run", "--rm", "extract", "extract", "--recipe", "other.toml", code=10)
    assert "a folder that is not mounted" in said


def test_a_host_without_gpus_is_said_by_the_cuda_service(compose: Compose) -> None:
    words = compose.command("run", "--rm", "test")
    cpu = next(number for number, word in enumerate(words) if word.endswith("compose.cpu.yaml"))
    alone = words[: cpu - 1] + words[cpu + 1 :]
    done = subprocess.run(alone, env=compose.environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert 'could not select device driver "nvidia"' in done.stderr  # the engine's words; README.md explains them


def test_doctor_finds_the_container_fit(compose: Compose) -> None:
    assert "cpu: usable" in compose("run", "--rm", "doctor")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--env", "DRAFTMILL_VARIANT=cuda"), "no GPU is attached: start it with --gpus all"),
        (("--env", "DRAFTMILL_VARIANT=cuda"), "/dev/shm has 64 MB, and vLLM's workers meet there: add --ipc=host"),
        ((), "no volume at /work/runs: what is written there ends with the container"),
        (("--read-only",), "UID 23456 cannot write to /cache"),
    ],
)
def test_what_a_container_lacks_is_said(built: str, options: tuple[str, ...], said: str) -> None:
    command = ["docker", "run", "--rm", "--user", str(UID), *options, built, "extract", "--recipe", "other.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in done.stderr
    assert done.returncode == 10
    assert "Traceback" not in done.stderr


def answers(path: str) -> bool:
    try:
        ask(path)
    except OSError:
        return False
    return True


def ask(path: str, body: object = None) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:18000/{path}", json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bytes(reply.read())


def until(condition: object, seconds: float = 240) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.5)
