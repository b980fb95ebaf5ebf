"""The arithmetic of an evaluation, on counts small enough to check by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill import evaluate
from draftmill.errors import DataError
from draftmill.evaluate import reference, results, vllm_engine
from draftmill.evaluate.prompts import Prompt
from draftmill.evaluate.results import Counts, Decoded


def counts(*accepted: int, k: int = 3) -> Counts:
    return Counts(drafts=len(accepted), accepted=tuple(sum(a > j for a in accepted) for j in range(k)))


def test_the_acceptance_length_is_vllms() -> None:
    # vLLM's SpecDecodingLogging: 1 + num_accepted_tokens / num_drafts, and per position over num_drafts.
    total = results.total([counts(3, 0, 1), counts(2)])
    assert total == Counts(drafts=4, accepted=(3, 2, 1))
    assert results.acceptance_length(total) == 1 + 6 / 4


def test_nothing_drafted_is_no_length() -> None:
    with pytest.raises(DataError, match="nothing was drafted"):
        results.acceptance_length(results.total([counts(), counts()]))


def test_the_interval_is_repeatable_and_covers() -> None:
    rng = random.Random(4)
    inside = 0
    for trial in range(60):  # prompts whose true acceptance length is 2
        prompts = [counts(*(rng.choice((0, 1, 2)) for _ in range(20))) for _ in range(40)]
        length = results.acceptance_length(results.total(prompts))
        found = results.interval(prompts, centre=length, seed=trial, resamples=200)
        inside += found.low <= 2 <= found.high
        assert found == results.interval(prompts, centre=length, seed=trial, resamples=200)
    assert 51 <= inside <= 60


def test_the_interval_of_equal_prompts_is_a_point_and_follows_its_centre() -> None:
    same = [counts(1, 2)] * 5
    found = results.interval(same, centre=2.5, seed=0)
    assert (found.low, found.high) == (2.5, 2.5)
    moved = results.interval(same, centre=2.6, seed=0)
    assert (moved.low, moved.high) == pytest.approx((2.6, 2.6))


def test_prompts_vary_the_interval_and_not_their_steps() -> None:
    alike = [counts(0, 2, 0, 2)] * 20
    apart = [counts(0, 0, 0, 0), counts(2, 2, 2, 2)] * 10
    a, b = (results.interval(x, centre=2.0, seed=0) for x in (alike, apart))
    assert a.high - a.low == 0
    assert b.high - b.low > 0.5


@pytest.mark.parametrize(
    ("expected", "found", "rows"),
    [
        ([[1, 2]], [[1, 2]], []),
        ([[1, 2], [3]], [[1, 4], [3]], [(0, 1)]),
        ([[1, 2]], [[1]], [(0, 1)]),
        ([[1], [5, 6]], [[1, 2], [6, 6]], [(0, 1), (1, 0)]),
    ],
)
def test_the_first_difference(expected: list[list[int]], found: list[list[int]], rows: list[tuple[int, int]]) -> None:
    assert results.differing(expected, found) == rows


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 3, 4], [1, 2, 3]), ([1, 9, 3], [1, 9]), ([9], [9]), ([], []), ([1, 2, 3, 9], [1, 2, 3])],
)
def test_an_output_ends_with_its_stop_token_or_at_the_limit(tokens: list[int], expected: list[int]) -> None:
    assert reference.cut(tokens, 3, [9]) == expected


def test_counts_from_the_tokens_of_each_step() -> None:
    # The first step read the prompt; a step of n tokens accepted n - 1.
    assert vllm_engine.count([[5], [1, 2, 3, 4], [7], [], [8, 9]], 3) == counts(3, 0, 1)


class Scripted:
    """An engine that says what it is told to."""

    name, version, dtype, device = "vllm", "1", "bfloat16", "none"

    def gap(self, token_ids: list[int]) -> float:
        return {(1, 1, 7): 0.25, (2, 2): 0.5}[tuple(token_ids)]


def test_a_set_is_compared_with_the_targets_own_output() -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(i, i)) for i in range(3)]
    plain = Decoded(outputs=[[7], [7, 8], [7]], seconds=2.0, counts=[])
    found = Decoded(
        outputs=[[7], [7, 9], [8]],
        seconds=4.0,
        counts=[counts(1), counts(1), counts()],
        totals=Counts(drafts=2, accepted=(2, 1, 0)),
    )
    s = evaluate.compare(Scripted(), "set", prompts, found, plain, seed=0)  # type: ignore[arg-type]
    assert (s.equal, s.prompts, s.tokens, s.tokens_per_second, s.plain_tokens_per_second) == (1, 3, 4, 1.0, 2.0)
    assert s.first_difference == results.Difference(prompt="p1", position=1, expected=8, found=9, top2_gap=0.25)
    assert s.largest_gap == 0.5
    # The engine's own totals decide, and the interval is around them.
    assert (s.acceptance_length, s.acceptance_per_position) == (2.5, [1.0, 0.5, 0.0])
    assert s.interval.low <= 2.5 <= s.interval.high


@pytest.mark.parametrize("text", ["", "{}", '{"fingerprint": 1}', "not json"])
def test_a_file_of_another_format_is_no_evaluation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evaluation.json"
    assert results.Evaluation.read(path) is None
    path.write_text(text)
    assert results.Evaluation.read(path) is None


@dataclass
class Output:
    token_ids: list[int]


@dataclass
class Reply:
    request_id: str
    outputs: list[Output]
    finished: bool


class Server:
    """vLLM's engine as it is stepped: each request in flight gets its prompt's first id, three times."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[int]] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: object) -> None:
        self.waiting[name] = [prompt["prompt_token_ids"][0]] * 3
        self.most = max(self.most, len(self.waiting))

    def step(self) -> list[Reply]:
        replies = []
        for name, left in list(self.waiting.items()):
            token = left.pop()
            replies.append(Reply(request_id=name, outputs=[Output([token])], finished=not left))
            if not left:
                del self.waiting[name]
        return replies


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> tuple[vllm_engine.VllmEngine, Server]:
    monkeypatch.setattr(vllm_engine, "has_cuda", lambda: True)
    settings = vllm_engine.Settings(
        target=Path("t"), draft=Path("d"), dtype="bfloat16", draft_tokens=3, max_new_tokens=3, stop=(0,), batch=8,
        concurrency=(1, 3, 16), max_model_len=9, tensor_parallel=1, gpu_memory_utilization=0.5,
        trust_remote_code=False, seed=0,
    )  # fmt: skip
    made, server = vllm_engine.VllmEngine(settings), Server()
    made.llm = SimpleNamespace(llm_engine=server, get_metrics=list)
    made.drafting = False
    return made, server


def test_requests_are_kept_in_flight_up_to_the_number_asked_for(engine: tuple[vllm_engine.VllmEngine, Server]) -> None:
    made, server = engine
    ticks: list[int] = []
    prompts = [[number] for number in range(7)]
    found = made.decode(prompts, ticks.append, drafting=False, at_once=2)
    assert found.outputs == [[number] * 3 for number in range(7)]  # in the prompts' order
    assert (server.most, sum(ticks)) == (2, 7)
    made.decode(prompts, ticks.append, drafting=False)
    assert server.most == 7
    server.most = 0
    made.decode([[number] for number in range(20)], ticks.append, drafting=False)
    assert server.most == 8  # the batch, though as many as 16 are measured


def test_a_rate_is_taken_with_each_number_of_requests_in_flight(engine: tuple[vllm_engine.VllmEngine, Server]) -> None:
    made, server = engine
    decoded: list[tuple[int, int | None]] = []
    plain = made.decode

    def decode(prompts: Any, tick: Any, *, drafting: bool, at_once: int | None = None) -> Decoded:
        server.most = 0
        found = plain(prompts, tick, drafting=drafting, at_once=at_once)
        decoded.append((len(prompts), server.most))
        return found

    made.decode = decode  # type: ignore[method-assign]
    rates = made.rates([[1], [2], [3]], drafting=False)
    assert decoded == [(8, 1), (8, 3), (32, 16)]  # the prompts come again where they are too few
    assert len(rates) == 3 and all(rate > 0 for rate in rates)


def test_rates_with_and_without_a_draft_are_paired() -> None:
    class Rated(Scripted):
        def decode(self, prompts: Any, tick: Any, *, drafting: bool) -> Decoded:
            tick(len(prompts))
            return Decoded(outputs=[[7]] * len(prompts), seconds=1.0, counts=[counts(1)] * len(prompts))

        def rates(self, prompts: Any, *, drafting: bool) -> list[float]:
            return [30.0, 60.0] if drafting else [20.0, 50.0]

    sets = {"set": [Prompt(id="p", token_ids=(1, 1))]}
    (found,) = evaluate.measure(Rated(), sets, concurrency=[1, 4], seed=0)  # type: ignore[arg-type]
    assert [(r.concurrency, r.tokens_per_second, r.plain_tokens_per_second) for r in found.rates] == [
        (1, 30.0, 20.0),
        (4, 60.0, 50.0),
    ]
