"""`draftmill extract` with the real engine: killed, interrupted, damaged, and whole in the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftmill.recipe import Recipe
from draftmill.store import Store
from draftmill.tokens import TokenSample

SHARDS = 120
SHARD_SAMPLES = 2
RECIPE = """
[run]
name = "{name}"
folder = "{folder}"
[target]
path = "{target}"
dtype = "float32"
[data]
max_length = 64
[[data.sources]]
format = "tokens"
path = "unused"
[extract]
layers = [3, 1, 2]
shard_samples = {shard_samples}
max_num_batched_tokens = 64
tensor_parallel = {tensor_parallel}
[evaluate]
[[evaluate.prompts]]
name = "unused"
format = "messages"
path = "unused"
"""


class Run:
    """One run's recipe, with samples prepared."""

    def __init__(self, name: str, folder: Path, target: Path, tensor_parallel: int = 1) -> None:
        text = RECIPE.format(
            name=name, folder=folder, target=target, shard_samples=SHARD_SAMPLES, tensor_parallel=tensor_parallel
        )
        self.file = folder / f"{name}.toml"
        self.file.write_text(text, encoding="utf-8")
        self.folder = Recipe.load(self.file).folder
        self.log = folder / f"{name}.log"
        self.folder.prepared.mkdir(parents=True)
        chosen = random.Random(0)
        for split, count in (("train", SHARDS * SHARD_SAMPLES - 1), ("held_out", 5)):
            lines = []
            for i in range(count):
                ids = [chosen.randrange(3, 128) for _ in range(chosen.randint(1, 64))]
                lines.append(TokenSample(id=str(i), input_ids=ids, loss_mask=[k % 2 for k in range(len(ids))]).line())
            (self.folder.prepared / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    @property
    def shards(self) -> list[Path]:
        return sorted((self.folder.root / "store").glob("*/shard-*.safetensors"))

    def places(self) -> dict[Path, tuple[int, int]]:
        """What changes when a shard is written again."""
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in self.shards}

    def checksums(self) -> list[str]:
        stores = [Store.open(path) for path in (self.folder.store_train, self.folder.store_held_out)]
        assert [finding for store in stores for finding in store.verify()] == []
        return [store[i].checksum() for store in stores for i in range(len(store))]


class Server:
    """Starts extractions, one at a time, in processes that share their imports."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def start(self, run: Run) -> int:
        assert self.process.stdin
        self.process.stdin.write(f"{run.file}\t{run.log}\n")
        self.process.stdin.flush()
        return int(self._line())

    def wait(self, child: int) -> int:
        """The exit code, or the negative signal, of an extraction, and that none of its workers outlives it."""
        code = int(self._line())
        wait_until(lambda: not group_lives(child), "a worker outlived its extraction")
        return code

    def run(self, run: Run) -> int:
        return self.wait(self.start(run))


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def wait_until(true: Callable[[], bool], otherwise: str, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, str(Path(__file__).with_name("extract_server.py"))]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Server(process)
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="module")
def unbroken(server: Server, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run("unbroken", tmp_path_factory.mktemp("unbroken"), tiny_llama)
    assert server.run(run) == 0, run.log.read_text()
    return run


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Path) -> Run:
    return Run("run", tmp_path, tiny_llama)


def test_killed_at_ten_random_moments(server: Server, unbroken: Run, run: Run) -> None:
    """Three in the start, by the clock; seven while it writes, by the shards that are there."""
    seed = random.randrange(1_000_000)
    print("seed", seed)
    chosen = random.Random(seed)
    for number in range(10):
        child = server.start(run)
        if number in (0, 3, 6):
            time.sleep(chosen.uniform(0, 1))
        else:
            enough = len(run.shards) + chosen.randint(1, 5)
            wait_until(lambda: len(run.shards) >= enough or not lives(child), "nothing is written")  # noqa: B023
            time.sleep(chosen.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert server.wait(child) == -signal.SIGKILL, run.log.read_text()
        for path in (run.folder.store_train, run.folder.store_held_out):
            if path.exists() and (path / "manifest.json").exists():
                assert {f.kind for f in Store.open(path, partial=True).verify()} <= {"missing"}
    kept = run.places()
    assert 7 <= len(kept) < len(unbroken.shards)
    assert server.run(run) == 0, run.log.read_text()
    assert run.checksums() == unbroken.checksums()
    assert {path: place for path, place in run.places().items() if path in kept} == kept
    assert not list((run.folder.root / "store").glob("**/*.part"))


def counted(run: Run) -> int:
    return int(json.loads(run.folder.extraction_json.read_text())["tokens"])


def test_damage_is_found_named_and_repaired(server: Server, unbroken: Run) -> None:
    before, tokens = unbroken.checksums(), counted(unbroken)
    truncated, flipped, deleted = unbroken.shards[1], unbroken.shards[7], unbroken.shards[-3]
    truncated.write_bytes(truncated.read_bytes()[:-11])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    deleted.unlink()
    kept = {path: place for path, place in unbroken.places().items() if path not in (truncated, flipped)}
    assert server.run(unbroken) == 0
    said = unbroken.log.read_text()
    for path, kind in ((truncated, "unreadable"), (flipped, "corrupt")):
        assert any(path.name in line and kind in line for line in said.splitlines()), said
    assert unbroken.checksums() == before
    assert {path: place for path, place in unbroken.places().items() if path in kept} == kept
    again = counted(unbroken) - tokens
    stores = {path: Store.open(path) for path in (unbroken.folder.store_train, unbroken.folder.store_held_out)}
    numbers = [(stores[path.parent], int(path.stem[-5:])) for path in (truncated, flipped, deleted)]
    assert again == sum(store.lengths[i] for store, n in numbers for i in store.manifest.samples_of(n))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(server: Server, unbroken: Run, run: Run, number: signal.Signals) -> None:
    child = server.start(run)
    wait_until(lambda: len(run.shards) >= 3 or not lives(child), "nothing is written")
    os.kill(child, number)
    assert server.wait(child) == 130, run.log.read_text()
    said = run.log.read_text()
    assert "run the same command again" in said
    assert "Traceback" not in said
    kept = run.places()
    assert server.run(run) == 0
    assert run.checksums() == unbroken.checksums()
    assert {path: place for path, place in run.places().items() if path in kept} == kept


def test_a_worker_that_dies(server: Server, tiny_llama: Path, tmp_path: Path) -> None:
    """One of two ranks: with one, the worker is the process itself, whose death the tests above are about."""
    run = Run("run", tmp_path, tiny_llama, tensor_parallel=2)
    child = server.start(run)
    wait_until(lambda: len(run.shards) >= 3 or not lives(child), "nothing is written")
    _, worker = workers(child)
    os.kill(worker, signal.SIGKILL)
    assert server.wait(child) == 16, run.log.read_text()
    said = run.log.read_text()
    assert "vLLM failed" in said
    assert "Traceback" not in said


def workers(parent: int) -> list[int]:
    """The engine's processes, less multiprocessing's own helper."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(c) for c in children if "resource_tracker" not in Path(f"/proc/{c}/cmdline").read_text()]


def test_the_command_itself(server: Server, unbroken: Run, run: Run) -> None:
    """As a user types it: killed, then stopped by Ctrl-C, which a terminal sends to the workers too."""
    command = [sys.executable, "-m", "draftmill", "extract", "--recipe", str(run.file)]
    for send, number, code in ((os.kill, signal.SIGKILL, -9), (os.killpg, signal.SIGINT, 130)):
        enough = len(run.shards) + 3
        with run.log.open("wb") as log:
            process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: len(run.shards) >= enough or process.poll() is not None, "nothing is written")  # noqa: B023
        send(process.pid, number)
        assert process.wait(60) == code, run.log.read_text()
        wait_until(lambda: not group_lives(process.pid), "a worker outlived its extraction", 30)  # noqa: B023
    said = run.log.read_text()
    assert "GB free" in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert len(run.shards) < len(unbroken.shards)
    assert server.run(run) == 0
    assert run.checksums() == unbroken.checksums()
