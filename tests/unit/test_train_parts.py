"""Training's parts that need no model: order, vocabulary, schedule, checkpoints, the record."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import DiskError, StoreError, TrainingError
from draftmill.files import whole_folder
from draftmill.recipe import Train
from draftmill.train import attention, checkpoint, loss, objective, order, record, schedule, ttt, vocabulary

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(rows=lengths, budget=st.integers(1, 120), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_sample_is_in_exactly_one_pack_within_the_budget(
    rows: list[int], budget: int, seed: int, epoch: int
) -> None:
    shuffled = order.shuffled(range(len(rows)), seed=seed, epoch=epoch)
    packs = order.packs(shuffled, rows, budget)
    assert [index for pack in packs for index in pack] == shuffled
    assert sorted(shuffled) == list(range(len(rows)))
    assert all(sum(rows[i] for i in pack) <= budget or len(pack) == 1 for pack in packs)


@given(rows=lengths, budget=st.integers(1, 120), seed=st.integers(0, 9), skip=st.integers(0, 60))
def test_the_stream_goes_on_from_any_position(rows: list[int], budget: int, seed: int, skip: int) -> None:
    def packs(start: order.Position) -> list[tuple[tuple[int, ...], order.Position]]:
        found = order.stream(range(len(rows)), rows, budget=budget, seed=seed, start=start)
        return list(islice(found, skip + 10))

    whole = packs(order.Position())
    start = whole[skip - 1][1] if skip else order.Position()
    assert packs(start)[:10] == whole[skip : skip + 10]
    per_epoch = sum(1 for _, position in whole if position.epoch == 0) + 1
    if len(whole) >= per_epoch:
        assert sorted(i for pack, _ in whole[:per_epoch] for i in pack) == list(range(len(rows)))


@given(rows=lengths, budget=st.integers(1, 120), ranks=st.sampled_from([1, 2, 3]), local=st.integers(1, 3))
def test_the_ranks_share_each_step_and_miss_nothing(rows: list[int], budget: int, ranks: int, local: int) -> None:
    steps, each = 8, ranks * local

    def packs() -> Iterator[tuple[tuple[int, ...], order.Position]]:
        return order.stream(range(len(rows)), rows, budget=budget, seed=1, start=order.Position())

    whole = list(islice(packs(), steps * each))
    of_rank = [
        list(islice(order.shares(packs(), each_step=each, rank=rank, ranks=ranks), steps * local))
        for rank in range(ranks)
    ]
    for number in range(steps):
        group = whole[number * each : (number + 1) * each]
        own = [share[number * local : (number + 1) * local] for share in of_rank]
        # Rank r has each step's packs r, r + ranks and so on, and all know where the step ends.
        assert [pack for of_one in zip(*own, strict=True) for pack, _ in of_one] == [pack for pack, _ in group]
        assert {after for share in own for _, after in share} == {group[-1][1]}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(order.shuffled(range(30), seed=s, epoch=e)) for s in range(3) for e in range(3)]
    assert len(set(orders)) == 9
    assert order.shuffled(range(8), seed=0, epoch=0) == [5, 0, 3, 6, 4, 7, 2, 1]  # the same on every machine


def counts(size: int, *samples: tuple[list[int], list[int]]) -> vocabulary.Counts:
    found = vocabulary.Counts(size)
    for ids, mask in samples:
        found.add(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), name="a sample")
    return found


def test_the_draft_says_the_most_frequent_supervised_tokens() -> None:
    found = counts(10, ([7, 7, 7, 5, 5, 9, 3, 3, 3], [1, 1, 1, 1, 1, 1, 0, 0, 0]))
    chosen = vocabulary.choose(found, 4, [2])
    assert chosen.ids == (2, 5, 7, 9)
    assert chosen.coverage == 1.0
    assert vocabulary.choose(found, 2, [2]).ids == (2, 7)
    assert vocabulary.choose(found, 2, [2]).coverage == 0.5
    # Ties: those that are seen unsupervised come first, then low ids.
    assert vocabulary.choose(found, 6, [2]).ids == (0, 2, 3, 5, 7, 9)


@given(ids=st.lists(st.integers(0, 39), min_size=1, max_size=80), size=st.integers(2, 40))
def test_the_mappings_lead_from_each_vocabulary_to_the_other(ids: list[int], size: int) -> None:
    found = counts(40, (ids, [1] * len(ids)))
    chosen = vocabulary.choose(found, size, [])
    t2d, d2t = chosen.mappings()
    assert (t2d.dtype, d2t.dtype) == (torch.bool, torch.int64)
    assert (torch.arange(size) + d2t).tolist() == list(chosen.ids) == t2d.nonzero().squeeze(1).tolist()
    assert len(chosen.ids) == size == int(t2d.sum())


def test_the_whole_vocabulary() -> None:
    chosen = vocabulary.choose(counts(6, ([1, 5], [1, 1])), None, [2])
    t2d, d2t = chosen.mappings()
    assert chosen.ids == tuple(range(6))
    assert bool(t2d.all())
    assert d2t.tolist() == [0] * 6
    assert chosen.coverage == 1.0


@pytest.mark.parametrize("size", [7, 1])
def test_an_impossible_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(TrainingError, match="not possible"):
        vocabulary.choose(counts(6, ([1], [1])), size, [2, 3])


@pytest.mark.parametrize("token", [-1, 6])
def test_an_id_outside_the_vocabulary_names_the_sample(token: int) -> None:
    with pytest.raises(StoreError, match="a sample holds token ids outside the target's vocabulary of 6"):
        counts(6, ([1, token], [1, 1]))


def test_the_schedules() -> None:
    def rates(name: str) -> list[float]:
        settings = Train.model_validate({"steps": 12, "warmup_steps": 2, "schedule": name})
        return [schedule.factor(step, settings) for step in range(1, 13)]

    for name in ("cosine", "linear", "constant"):
        assert rates(name)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates("constant")[2:] == [1.0] * 10
    assert rates("linear")[2:] == pytest.approx([1 - k / 10 for k in range(10)])
    cosine = rates("cosine")[2:]
    assert cosine[5] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
    assert 0 < cosine[-1] < 0.03


def a_checkpoint(step: int) -> checkpoint.Checkpoint:
    tensors = {"model": {"w": torch.full((3,), float(step))}, "optimiser": {"state": {}}}
    position = order.Position(epoch=step // 10, cursor=step % 10)
    return checkpoint.Checkpoint(step=step, position=position, seconds=1.5 * step, tensors=tensors)


IDENTITY = {"store": "abc", "train": {"steps": 9, "layers": (1, 2)}}


def test_the_newest_checkpoint_comes_back_and_old_ones_go(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, identity=IDENTITY) is None
    for step in (5, 12, 100):
        checkpoint.save(tmp_path, a_checkpoint(step), identity=IDENTITY, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012", "step-00000100"]
    found = checkpoint.load(tmp_path, identity=IDENTITY)
    assert found is not None
    assert (found.step, found.position, found.seconds) == (100, order.Position(epoch=10, cursor=0), 150.0)
    assert found.tensors["model"]["w"].tolist() == [100.0] * 3


def test_the_best_weights_stay_for_as_long_as_a_checkpoint_calls_them_so(tmp_path: Path) -> None:
    trained = {"w": torch.zeros(3)}
    for step, best in ((10, 10), (20, 10), (30, 30)):
        if step == best:
            checkpoint.save_best(tmp_path, step, {"w": torch.full((3,), float(step))})
        found = replace(a_checkpoint(step), best=checkpoint.Best(step=best, figures={"x": 1.5}, since=step - best))
        checkpoint.save(tmp_path, found, identity=IDENTITY, keep=2)
    # Without the newest, as its own error message advises where it is damaged, training goes on from the one before.
    shutil.rmtree(tmp_path / "step-00000030")
    before = checkpoint.load(tmp_path, identity=IDENTITY)
    assert before is not None
    assert before.best == checkpoint.Best(step=10, figures={"x": 1.5}, since=10)
    checkpoint.load_best(tmp_path, 10, trained)
    assert trained["w"].tolist() == [10.0] * 3
    # When no checkpoint calls them the best any more they go.
    for step in (40, 50):
        later = replace(a_checkpoint(step), best=checkpoint.Best(step=30, figures={}))
        checkpoint.save(tmp_path, later, identity=IDENTITY, keep=2)
    assert sorted(path.name for path in tmp_path.glob("best-*")) == ["best-00000030"]


def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, a_checkpoint(5), identity=IDENTITY, keep=2)
    with pytest.raises(TrainingError, match="store: abc there, xyz now"):
        checkpoint.load(tmp_path, identity={**IDENTITY, "store": "xyz"})
    assert (tmp_path / "step-00000005" / "state.pt").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "no index", "no state", "no json"])
def test_a_damaged_checkpoint_is_named(damage: str, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, a_checkpoint(5), identity=IDENTITY, keep=2)
    state, index = folder / "state.pt", folder / "checkpoint.json"
    content = state.read_bytes()
    if damage == "cut":
        state.write_bytes(content[:-7])
    elif damage == "flip":
        state.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    elif damage == "no json":
        index.write_text("{")
    else:
        (index if damage == "no index" else state).unlink()
    with pytest.raises(TrainingError, match=r"step-00000005 is damaged"):
        checkpoint.load(tmp_path, identity=IDENTITY)


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, a_checkpoint(5), identity=IDENTITY, keep=1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, a_checkpoint(6), identity=IDENTITY, keep=1)
    found = checkpoint.load(tmp_path, identity=IDENTITY)
    assert found is not None
    assert found.step == 5
    # A process that was killed leaves its unfinished folder, which nothing takes for a checkpoint.
    shutil.copytree(tmp_path / "step-00000005", tmp_path / ".step-00000007.part")
    found = checkpoint.load(tmp_path, identity=IDENTITY)
    assert found is not None
    assert found.step == 5


def test_a_full_disk_keeps_the_checkpoint_before(small_disk: Path) -> None:
    checkpoint.save(small_disk, a_checkpoint(5), identity=IDENTITY, keep=1)
    large = checkpoint.Checkpoint(
        step=6, position=order.Position(), seconds=0.0, tensors={"model": {"w": torch.zeros(4_000_000)}}
    )
    with pytest.raises(DiskError, match=r"step-00000006.*the disk is full"):
        checkpoint.save(small_disk, large, identity=IDENTITY, keep=1)
    found = checkpoint.load(small_disk, identity=IDENTITY)
    assert found is not None
    assert found.step == 5
    assert os.listdir(small_disk) == ["step-00000005"]  # noqa: PTH208


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "draft"
    with pytest.raises(ValueError, match="stop"), whole_folder(final) as work:
        (work / "a").write_text("1")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    for text in ("1", "2"):
        with whole_folder(final) as work:
            (work / text).write_text(text)
    assert [path.name for path in final.iterdir()] == ["2"]


def test_the_record_is_cut_back_to_where_the_run_goes_on(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in range(1, 8)]
    metrics.write_text("".join(rows) + '{"step": 8, "lo')
    assert record.kept(metrics, 5) == rows[:5]
    assert record.kept(metrics, 9) == rows
    assert record.kept(metrics, 0) == []
    with record.Record(metrics, tmp_path / "board", start=5, steps=9) as written:
        written.write({"step": 6, "loss": 0.5}, {"train/loss": 0.5}, "")
        assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def pack(lengths: tuple[int, ...], mask: list[int]) -> ttt.Pack:
    count = sum(lengths)
    return ttt.Pack(
        input_ids=torch.arange(count),
        hidden_states=torch.zeros(count, 3),
        last_hidden_state=torch.zeros(count, 1),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        lengths=lengths,
    )


def test_the_plan_reads_what_is_supervised_and_never_the_neighbour() -> None:
    rows = ttt.plan(pack((4, 3), [0, 1, 1, 1, 1, 0, 1]), 3)
    active = len(rows.active)
    guesses = zip((rows.places // active).tolist(), rows.active[rows.places % active].tolist(), strict=True)
    told = sorted((*guess, rows.supervised[t].item()) for guess, t in zip(guesses, rows.targets, strict=True))
    assert told == [
        *((0, 1, 1), (0, 2, 2), (0, 3, 3), (0, 4, 4), (0, 6, 6)),
        *((1, 0, 1), (1, 1, 2), (1, 2, 3), (1, 5, 6)),
        *((2, 0, 2), (2, 1, 3), (2, 4, 6)),
    ]
    assert rows.starts == (5, 4, 3)
    assert rows.active.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert ttt.plan(pack((4, 3), [0, 0, 0, 1, 0, 0, 0]), 2).active.tolist() == [2, 3]


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 0], [1, 1, 1]])
def test_a_plan_of_a_sample_shorter_than_the_steps(mask: list[int]) -> None:
    rows = ttt.plan(pack((1, 1, 1), mask), 3)
    assert rows.starts == (sum(mask), 0, 0)


def test_the_parts_of_a_plan_hold_every_target_and_guess_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ttt.plan(pack((9, 4), [0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]), 3)
    monkeypatch.setattr(ttt, "_TARGETS", 4)
    rows = ttt.plan(pack((9, 4), [0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]), 3)
    assert len(whole.parts) == 1
    assert [len(rows.supervised[part.targets]) for part in rows.parts] == [4, 3, 3]
    targets = torch.cat([part.rows + part.targets.start for part in rows.parts])
    places = torch.cat([part.places for part in rows.parts])
    assert torch.equal(targets, whole.targets) and torch.equal(places, whole.places)
    assert torch.cat([rows.places[part.guesses] for part in rows.parts]).equal(places)
    assert all(0 <= int(row) < part.targets.stop - part.targets.start for part in rows.parts for row in part.rows)


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (2, 2)])
@pytest.mark.parametrize("rows_of", [(300,), (1, 128, 127, 60), (70, 5, 200, 40)])
@pytest.mark.parametrize("every", [1, 3, 40])
def test_both_ways_of_attention_give_the_same_numbers_and_gradients(
    heads: int, shared: int, rows_of: tuple[int, ...], every: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    count = sum(rows_of)
    asked = attention.queries_of(torch.arange(0, count, every), rows_of).to(torch.device("cpu"), 500)
    shapes = ((len(asked.rows), heads, 16), (count, shared, 16), (count, shared, 16))
    query, key, value = (torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes)
    found = []
    for way in (attention.by_document, attention.by_block):
        mixed, total = way(query, (key, value), asked, 0.3)
        # Both results count, each differently, so that both gradients are compared.
        ((mixed * torch.arange(16)).sum() + (total**2).sum()).backward()  # type: ignore[no-untyped-call]
        found.append([mixed, total, *(x.grad.clone() for x in (query, key, value) if x.grad is not None)])
        query.grad = key.grad = value.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert len(found[0]) == 5
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_block_of_the_mask_is_skipped_where_no_query_reads_it() -> None:
    # Samples of 200 and 150 rows; blocks of 128 rows and room for five of them.
    asked = attention.queries_of(torch.arange(350), (200, 150)).to(torch.device("cpu"), 600)
    dense = asked.blocks.to_dense()[0, 0]
    assert dense.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0] * 5, [0] * 5]
    long = attention.queries_of(torch.arange(384), (384,)).to(torch.device("cpu"), 384)
    assert long.blocks.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]  # those below the diagonal need no mask


def reference_loss(kind: str, draft: list[float], target: list[float]) -> float:
    """Of one row, in Python's own floats."""

    def softmax(logits: list[float]) -> list[float]:
        powers = [math.exp(x - max(logits)) for x in logits]
        return [x / sum(powers) for x in powers]

    q, p = softmax(draft), softmax(target)
    overlap = sum(map(min, p, q))
    return {
        "forward_kl": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
        "cross_entropy": -math.log(q[target.index(max(target))]),
        "total_variation": 1 - overlap,
        "acceptance": -math.log(overlap),
    }[kind]


LOSSES = ("forward_kl", "cross_entropy", "total_variation", "acceptance")


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_losss_value_and_gradient_are_those_in_double_precision(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    draft = (3 * torch.randn(5, 17, generator=generator)).to(dtype)
    target = (3 * torch.randn(4, 17, generator=generator)).to(dtype)
    rows = torch.tensor([0, 2, 2, 3, 1])
    logits = draft.float().requires_grad_()
    value = objective.of_guesses(kind, compiled=False)(logits, target, rows).sum()
    value.backward()
    exact = draft.double()

    def at(row: int, column: int, by: float) -> float:
        moved = exact[row].tolist()
        moved[column] += by
        return reference_loss(kind, moved, target[rows[row]].double().tolist())

    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(sum(at(row, 0, 0.0) for row in range(5)), rel=1e-5)
    step = 1e-6
    slopes = [[(at(i, j, step) - at(i, j, -step)) / (2 * step) for j in range(17)] for i in range(5)]
    wanted = torch.tensor(slopes, dtype=torch.float64)
    assert logits.grad is not None
    assert float((logits.grad.double() - wanted).norm() / wanted.norm()) < 1e-3


def test_the_recipe_names_every_loss() -> None:
    assert get_args(Train.model_fields["loss"].annotation) == tuple(objective._LOSSES) == LOSSES


def test_the_walk_counts_what_greedy_decoding_would() -> None:
    rows = ttt.plan(pack((6,), [0, 1, 1, 1, 1, 1]), 3)
    assert rows.active.tolist() == [0, 1, 2, 3, 4, 5]
    eligible = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    nothing = torch.zeros_like(eligible)
    assert loss.acceptance_walk(nothing, eligible, rows) == (4, 4)  # row 5 is the answer's end: nobody guesses after it
    # From row 1 two guesses are right: three tokens are gained; from row 4 one more: the sample ends.
    right = nothing.clone()
    right[0, [1, 4]] = True
    right[1, 1] = True
    assert loss.acceptance_walk(right, eligible, rows) == (5, 2)
