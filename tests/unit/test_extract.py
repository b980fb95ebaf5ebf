"""Extraction with an engine that computes nothing: what is asked of it, what is kept, and what stops it."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill import compute, extract
from draftmill.errors import DataError, DiskError, Interrupted, LayerError, StackError, StoreError, TargetError
from draftmill.extract.engine import SETTING, first
from draftmill.extract.keep import Keeper
from draftmill.recipe import Recipe
from draftmill.store import Store
from draftmill.tokens import TokenSample

WIDTH, VOCABULARY, LIMIT = 8, 100, 20
LENGTHS = [3, 1, 5, 2, 20, 4, 7]
RECIPE = """
[run]
name = "r"
folder = "{folder}"
[target]
path = "{folder}/target"
dtype = "float32"
[data]
max_length = 64
[[data.sources]]
format = "tokens"
path = "unused"
[extract]
layers = [3, 1]
shard_samples = 2
[evaluate]
[[evaluate.prompts]]
name = "unused"
format = "messages"
path = "unused"
"""


def states(ids: list[int], layer: int) -> torch.Tensor:
    """What the fake engine says a layer's input is: of these ids and this layer alone."""
    return (torch.tensor(ids)[:, None] + torch.arange(WIDTH) / 8 + 100 * layer).float()


class FakeEngine:
    """Stands for vLLM's engine and its one worker, which keeps what it computes: a chunk of the first prompt a step.

    Notes what it is asked, and fails before the step that it is told to, when all that was computed is written.
    """

    started: list[Any]
    computed: list[list[int]]
    fail_at: int | None
    failure: BaseException
    chunk = 6

    def __init__(self, arguments: Any) -> None:
        self.started.append(arguments)
        ids = arguments.additional_config[SETTING]
        self.layers = ids
        self.taps = SimpleNamespace(buffers=[torch.zeros(self.chunk, WIDTH) for _ in ids])
        names = [*(f"hidden_states.{k}" for k in ids), "last_hidden_state"]
        self.keeper = Keeper(cast("Any", self.taps), names, self.chunk, WIDTH)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.waiting: list[tuple[str, list[int], int]] = []
        self.keeping = False

    @classmethod
    def from_engine_args(cls, arguments: Any) -> "FakeEngine":
        return cls(arguments)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "keep":
            self.keeping = bool(args[0])
            return [self.keeper.stores(args[0])]
        if method == "open_shard":
            return [self.keeper.open(*args)]
        assert method == "finished"
        if args[0]:
            self.keeper.drain()
        return [None, self.keeper.finished()]

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.max_tokens == 1
        self.waiting.append((name, prompt["prompt_token_ids"], 0))

    def step(self) -> list[Any]:
        if self.keeping and len(self.computed) == self.fail_at:
            self.keeper.drain()
            raise self.failure
        name, ids, done = self.waiting.pop(0)
        rows = ids[done : done + self.chunk]
        if self.keeping:
            for k, buffer in zip(self.layers, self.taps.buffers, strict=True):
                buffer[: len(rows)] = states(rows, k)
            self.keeper.step(states(rows, 9), [(f"{name}-0123abcd", done, len(rows))])
        ends = done + len(rows) == len(ids)
        if not ends:
            self.waiting.insert(0, (name, ids, done + len(rows)))
        elif self.keeping:
            self.computed.append(ids)
        return [SimpleNamespace(request_id=name, finished=ends)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    class Engine(FakeEngine):
        started, computed, fail_at = [], [], None

    module = ModuleType("vllm")
    module.LLMEngine = Engine  # type: ignore[attr-defined]
    module.EngineArgs = module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    distributed = ModuleType("vllm.distributed")
    distributed.cleanup_dist_env_and_memory = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setattr(compute, "set_up_vllm", lambda tensor_parallel: None)
    return Engine


def sample(index: int, length: int) -> TokenSample:
    ids = [(7 * index + i) % VOCABULARY for i in range(length)]
    return TokenSample(id=f"s{index}", input_ids=ids, loss_mask=[i % 2 for i in range(length)])


SAMPLES = [sample(i, n) for i, n in enumerate(LENGTHS)]
HELD_OUT = [sample(50, 6)]


class Job(NamedTuple):
    """A recipe, and where its files are."""

    root: Path
    recipe: Recipe

    def prepare(self, train: list[TokenSample] = SAMPLES, held_out: list[TokenSample] = HELD_OUT) -> None:
        self.recipe.folder.prepared.mkdir(parents=True, exist_ok=True)
        for name, samples in (("train", train), ("held_out", held_out)):
            text = "".join(s.line() for s in samples)
            (self.recipe.folder.prepared / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def set(self, **overrides: str) -> "Job":
        text = RECIPE.format(folder=self.root)
        named = {key.replace("__", "."): value for key, value in overrides.items()}
        return Job(self.root, Recipe.parse(text, name="test", overrides=named))

    @property
    def shards(self) -> list[Path]:
        return sorted(self.recipe.folder.store_train.glob("shard-*.safetensors"))


def make_job(root: Path) -> Job:
    target = root / "target"
    target.mkdir()
    config = {
        "num_hidden_layers": 5,
        "hidden_size": WIDTH,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LIMIT,
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "model.safetensors").write_bytes(b"weights")
    job = Job(root, Recipe.parse(RECIPE.format(folder=root), name="test"))
    job.prepare()
    return job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def test_every_sample_is_extracted_in_its_order(job: Job, engine: type[FakeEngine]) -> None:
    extract.extract(job.recipe)
    for path, samples in ((job.recipe.folder.store_train, SAMPLES), (job.recipe.folder.store_held_out, HELD_OUT)):
        store = Store.open(path)
        assert store.verify() == []
        assert store.lengths == tuple(len(s.input_ids) for s in samples)
        for i, expected in enumerate(samples):
            assert store[i].input_ids.tolist() == expected.input_ids
            assert store[i].loss_mask.int().tolist() == expected.loss_mask
            assert list(store[i].hidden_states) == [3, 1]
            for k, rows in {**store[i].hidden_states, 9: store[i].last_hidden_state}.items():
                assert torch.equal(rows, states(expected.input_ids, k).to(torch.bfloat16))
    [started] = engine.started
    assert (started.max_model_len, started.dtype, started.trust_remote_code) == (LIMIT + 1, "float32", False)
    assert started.enable_prefix_caching is False


def test_the_rates_are_written(job: Job, engine: type[FakeEngine]) -> None:
    extract.extract(job.recipe)
    rates = json.loads(job.recipe.folder.extraction_json.read_text())
    tokens = sum(LENGTHS) + 6
    assert rates["tokens"] == tokens
    assert rates["tokens_per_second"] == pytest.approx(tokens / rates["seconds"])
    assert rates["plain_prefill_tokens_per_second"] > 0
    assert 0 < rates["plain_prefill_tokens"] <= sum(LENGTHS)
    folder = job.recipe.folder
    files = [*folder.store_train.glob("shard-*"), *folder.store_held_out.glob("shard-*")]
    assert rates["bytes"] == sum(file.stat().st_size for file in files)


def test_the_rates_are_of_all_attempts(job: Job, engine: type[FakeEngine]) -> None:
    def rates() -> dict[str, Any]:
        found = json.loads(job.recipe.folder.extraction_json.read_text())
        assert isinstance(found, dict)
        return found

    engine.fail_at, engine.failure = 4, KeyboardInterrupt()
    with pytest.raises(Interrupted):
        extract.extract(job.recipe)
    before = rates()
    assert before["tokens"] == sum(LENGTHS[:4])
    engine.fail_at = None
    extract.extract(job.recipe)
    assert rates()["tokens"] == sum(LENGTHS) + 6
    assert rates()["seconds"] > before["seconds"]
    for path in (job.recipe.folder.store_train, job.recipe.folder.store_held_out):
        shutil.rmtree(path)
    extract.extract(job.recipe)
    assert rates()["tokens"] == sum(LENGTHS) + 6


def test_a_whole_store_starts_no_engine(job: Job, engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    extract.extract(job.recipe)
    extract.extract(job.recipe)
    assert len(engine.started) == 1
    assert "are whole" in capsys.readouterr().out


@pytest.mark.parametrize("stopped_at", range(5))
def test_a_stopped_run_goes_on_where_it_stopped(job: Job, engine: type[FakeEngine], stopped_at: int) -> None:
    engine.fail_at, engine.failure = min(2 * stopped_at, 7), KeyboardInterrupt()
    with pytest.raises(Interrupted, match=f"{stopped_at} of 5 shards are written"):
        extract.extract(job.recipe)
    assert len(job.shards) == min(stopped_at, 4)
    kept = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in job.shards}
    engine.fail_at = None
    extract.extract(job.recipe)
    assert engine.computed == [s.input_ids for s in (*SAMPLES, *HELD_OUT)]  # each once
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept} == kept
    assert Store.open(job.recipe.folder.store_train).verify() == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
def test_a_damaged_shard_alone_is_done_again(
    job: Job, engine: type[FakeEngine], capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    extract.extract(job.recipe)
    before = {path.name: path.read_bytes() for path in job.shards}
    engine.computed.clear()
    path = job.shards[1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if damage == "truncated" else data)
    extract.extract(job.recipe)
    assert engine.computed == [s.input_ids for s in SAMPLES[2:4]]
    assert {path.name: path.read_bytes() for path in job.shards} == before
    if damage != "deleted":
        assert "shard-00001.safetensors" in capsys.readouterr().out


def test_a_disk_that_is_too_small_is_refused_first(
    job: Job, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=1000))
    with pytest.raises(DiskError, match="do not fit") as caught:
        extract.extract(job.recipe)
    assert "--yes" in caught.value.next_step
    assert "48 tokens" in capsys.readouterr().out
    assert engine.started == []
    assert not job.recipe.folder.store_train.exists()
    extract.extract(job.recipe, yes=True)
    assert Store.open(job.recipe.folder.store_train).verify() == []


def test_what_is_there_needs_no_room(job: Job, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    extract.extract(job.recipe)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=0))
    extract.extract(job.recipe)


def test_a_disk_that_fills_in_the_middle(small_disk: Path, engine: type[FakeEngine]) -> None:
    job = make_job(small_disk)
    long = [sample(i, LIMIT) for i in range(400)]
    job.prepare(train=long)
    job = job.set(extract__shard_samples="20")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    with pytest.raises(DiskError, match="the disk is full") as caught:
        extract.extract(job.recipe, yes=True)
    assert "it resumes" in caught.value.next_step
    written = len(job.shards)
    assert 0 < written < 20
    kinds = {f.kind for f in Store.open(job.recipe.folder.store_train, partial=True).verify()}
    assert kinds == {"missing"}
    ballast.unlink()
    extract.extract(job.recipe)
    assert Store.open(job.recipe.folder.store_train).verify() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"extract__layers": "[1, 3]"}, "layers"),
        ({"extract__shard_samples": "3"}, "shard_samples"),
        ({"extract__max_num_batched_tokens": "512"}, "recipe"),
        ({"target__dtype": '"bfloat16"'}, "computed_in"),
    ],
)
def test_another_runs_store_is_refused(job: Job, engine: type[FakeEngine], change: dict[str, str], field: str) -> None:
    extract.extract(job.recipe)
    before = {path.name: path.read_bytes() for path in job.shards}
    with pytest.raises(StoreError, match=field):
        extract.extract(job.set(**change).recipe)
    assert {path.name: path.read_bytes() for path in job.shards} == before


def test_other_data_is_another_run(job: Job, engine: type[FakeEngine]) -> None:
    extract.extract(job.recipe)
    job.prepare(train=SAMPLES[::-1])
    with pytest.raises(StoreError, match="dataset_digest"):
        extract.extract(job.recipe)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([], "holds no samples"),
        ([*SAMPLES, sample(8, LIMIT + 1)], "sample s8 has 21 tokens, the limit is 20"),
        ([TokenSample(id="a", input_ids=[VOCABULARY], loss_mask=[1])], "line 1: token id 100 is outside"),
        ([TokenSample(id="a", input_ids=[1, 2], loss_mask=[1])], "line 1: 2 input_ids and 1 values of loss_mask"),
    ],
)
def test_samples_that_do_not_fit_the_target(
    job: Job, engine: type[FakeEngine], train: list[TokenSample], words: str
) -> None:
    job.prepare(train=train)
    with pytest.raises(DataError, match=words):
        extract.extract(job.recipe)
    assert engine.started == []


def test_a_sample_longer_than_the_recipe_says(job: Job, engine: type[FakeEngine]) -> None:
    with pytest.raises(DataError, match="sample s4 has 20 tokens, the limit is 19"):
        extract.extract(job.set(data__max_length="19").recipe)


def test_nothing_is_prepared(job: Job, engine: type[FakeEngine]) -> None:
    (job.recipe.folder.prepared / "train.jsonl").unlink()
    with pytest.raises(DataError, match="cannot read") as caught:
        extract.extract(job.recipe)
    assert "draftmill prepare" in caught.value.next_step


@pytest.mark.parametrize(("layers", "words"), [("[5]", "out of range"), ("[1, 1]", "repeated"), ("[0]", "range")])
def test_layers_that_are_none(job: Job, engine: type[FakeEngine], layers: str, words: str) -> None:
    with pytest.raises(LayerError, match=words):
        extract.extract(job.set(extract__layers=layers).recipe)


def test_a_target_without_weights(job: Job, engine: type[FakeEngine]) -> None:
    (job.root / "target" / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no weights"):
        extract.extract(job.recipe)


def test_a_target_that_nests_its_language_model(job: Job, engine: type[FakeEngine]) -> None:
    path = job.root / "target" / "config.json"
    path.write_text(json.dumps({"model_type": "two", "text_config": json.loads(path.read_text())}))
    extract.extract(job.recipe)
    assert Store.open(job.recipe.folder.store_train).manifest.layers.num_layers == 5


def test_no_held_out_samples(job: Job, engine: type[FakeEngine]) -> None:
    job.prepare(held_out=[])
    extract.extract(job.recipe)
    assert len(Store.open(job.recipe.folder.store_held_out)) == 0


def test_an_engine_that_fails_in_the_middle(job: Job, engine: type[FakeEngine]) -> None:
    engine.fail_at, engine.failure = 4, RuntimeError("the KV cache is too small")
    with pytest.raises(StackError, match="the KV cache is too small") as caught:
        extract.extract(job.recipe)
    assert "extract.log" in caught.value.next_step
    assert len(job.shards) == 2


def test_an_engine_that_does_not_start(job: Job, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeEngine, arguments: Any) -> None:
        os.write(2, logged)
        raise Exception("WorkerProc initialization failed")

    monkeypatch.setattr(engine, "__init__", refuse)
    logged = b"(Worker pid=7) ValueError: the head size 7 is not supported\n"
    with pytest.raises(StackError, match="ValueError: the head size 7 is not supported"):
        extract.extract(job.recipe)
    logged = b"nothing that says why\n"
    with pytest.raises(StackError, match="WorkerProc initialization failed"):
        extract.extract(job.recipe)


def test_no_vllm(job: Job, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(StackError, match="is not installed"):
        extract.extract(job.recipe)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_the_first_samples_of_so_many_tokens(lengths: list[int], limit: int) -> None:
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    found = first(samples, limit)
    assert found == samples[: len(found)]
    assert len(found) == 1 or sum(lengths[: len(found)]) <= limit
    assert len(found) == len(samples) or sum(lengths[: len(found) + 1]) > limit
