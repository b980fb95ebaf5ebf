"""What the worker keeps: from the layers' inputs to the shard, and what a slow or a full disk does to the next step."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from draftmill import shard
from draftmill.errors import DiskError, TargetError
from draftmill.extract.keep import ON_HOST, Keeper, Taps
from draftmill.extract.locate import decoder_layers
from draftmill.layers import LayerContract
from draftmill.store import Manifest, Store, StoreWriter
from draftmill.target import TargetIdentity

H, BUDGET, IDS = 4, 8, (3, 1)
NAMES = [*(f"hidden_states.{k}" for k in IDS), "last_hidden_state"]


class Layer(nn.Module):
    """A decoder layer as vLLM's are: the residual is carried beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return residual * 0 + 1, residual


class Reversed(nn.Module):
    """One that takes them in another order and by other names, as gpt-oss's."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return Layer.forward(self, positions, x, residual)  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(count)])
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, *, by_name: bool = False) -> torch.Tensor:
        hidden, residual = x, None
        for layer in self.layers:
            named = {"positions": x, "residual": residual}
            if isinstance(layer, Reversed):
                hidden, residual = layer(x=hidden, **named) if by_name else layer(hidden, x, residual)
            else:
                hidden, residual = layer(hidden_states=hidden, **named) if by_name else layer(x, hidden, residual)
        return hidden + residual


class Seeing(nn.Module):
    """A model that nests its language model beside a tower with as many layers."""

    def __init__(self, *, says_which: bool) -> None:
        super().__init__()
        self.tower = nn.ModuleList([Layer() for _ in range(5)])
        self.language_model = nn.ModuleDict({"model": Model()})
        if says_which:
            self.get_language_model = lambda: self.language_model["model"]


@pytest.mark.parametrize("kind", [Layer, Reversed])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_input_of_a_layer_is_tapped(kind: type[nn.Module], by_name: bool) -> None:
    model = Model(kind)
    taps = Taps(decoder_layers(model, 5), (3, 0), torch.zeros(BUDGET, H))
    x = torch.arange(6.0 * H).reshape(6, H)
    model(x, by_name=by_name)
    assert torch.equal(taps.buffers[0][:6], x + 3)  # three layers added one each
    assert torch.equal(taps.buffers[1][:6], x)


def test_of_two_lists_the_language_model_s_is_taken() -> None:
    model = Seeing(says_which=True)
    assert decoder_layers(model, 5) is model.language_model["model"].layers


@pytest.mark.parametrize(
    ("model", "count", "words"),
    [
        (Seeing(says_which=False), 5, "2 lists of 5 decoder layers were found"),
        (Model(), 4, "0 lists of 4 decoder layers"),
        (Model(nn.ReLU), 5, "0 lists of 5 decoder layers"),
    ],
)
def test_what_is_not_found_is_refused(model: nn.Module, count: int, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        decoder_layers(model, count)


def states(sample: int, rows: range, source: int) -> torch.Tensor:
    return torch.tensor([[100.0 * sample + row + source / 4] * H for row in rows])


class Kept:
    """A keeper on a store of two shards of two samples, and steps that compute what `states` says."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest(
            target=TargetIdentity(fingerprint="", hidden_size=H, num_layers=5, vocab_size=9), tokenizer_digest="",
            layers=LayerContract(ids=IDS, num_layers=5), computed_in="", dataset_digest="", lengths=(5, 3, 12, 1),
            shard_samples=2, stack={}, recipe={},
        )  # fmt: skip
        self.store = StoreWriter(folder / "store", manifest).store
        self.taps: Any = SimpleNamespace(buffers=[torch.zeros(BUDGET, H) for _ in IDS])
        self.keeper = Keeper(self.taps, NAMES, BUDGET, H)
        self.keeper.stores([str(self.store.path)])
        for number in range(2):
            lengths = [manifest.lengths[i] for i in manifest.samples_of(number)]
            self.keeper.open(0, number, [[1] * n for n in lengths], [[0] * n for n in lengths])

    def step(self, *rows: tuple[int, range]) -> None:
        """One step, of these rows of these samples."""
        for number, buffer in enumerate(self.taps.buffers):
            found = torch.cat([states(i, r, number) for i, r in rows])
            buffer[: len(found)] = found
        last = torch.cat([*(states(i, r, len(IDS)) for i, r in rows), torch.full((2, H), -1.0)])  # padded
        self.keeper.step(last, [(f"0:{i}-89abcdef", r.start, len(r)) for i, r in rows])

    def check(self) -> None:
        store = Store.open(self.store.path)
        assert store.verify() == []
        for index, length in enumerate(store.lengths):
            sample = store[index]
            for number, found in enumerate([*(sample.hidden_states[k] for k in IDS), sample.last_hidden_state]):
                assert torch.equal(found, states(index, range(length), number).bfloat16())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path)


def test_rows_go_to_their_samples(kept: Kept) -> None:
    kept.step((0, range(5)), (1, range(2)))
    kept.step((1, range(2, 3)), (2, range(7)))
    kept.step((2, range(7, 12)), (3, range(1)))
    kept.keeper.drain()
    assert kept.keeper.finished() == ([(0, 0), (0, 1)], None)
    assert kept.keeper.finished() == ([], None)
    kept.check()


def test_a_request_that_is_computed_anew(kept: Kept) -> None:
    """As vLLM does with one that it had to put back, for want of room."""
    kept.step((0, range(5)), (1, range(3)))
    kept.step((2, range(7)))
    kept.step((2, range(4)), (3, range(1)))
    kept.step((2, range(4, 12)))
    kept.keeper.drain()
    assert kept.keeper.finished()[1] is None
    kept.check()


def test_requests_of_nobody_are_left_alone(kept: Kept) -> None:
    kept.keeper.step(torch.zeros(3, H), [("7-0123abcd", 0, 3)])
    kept.step((0, range(5)), (1, range(3)))
    kept.keeper.drain()
    assert kept.keeper.finished() == ([(0, 0)], None)


def test_a_slow_disk_holds_the_next_step_back(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, put, begun = threading.Event(), shard.ShardWriter.put, []

    def slow(*arguments: Any) -> bool:
        go_on.wait()
        return put(*arguments)

    def steps() -> None:
        for row in range(ON_HOST + 3):
            kept.step((2, range(row, row + 1)))
            begun.append(row)

    monkeypatch.setattr(shard.ShardWriter, "put", slow)
    thread = threading.Thread(target=steps)
    thread.start()
    end = time.monotonic() + 60
    while len(begun) < ON_HOST and time.monotonic() < end:
        time.sleep(0.01)
    thread.join(0.5)
    assert begun == list(range(ON_HOST))
    go_on.set()
    thread.join()
    kept.step((2, range(ON_HOST + 3, 12)), (3, range(1)))
    kept.step((0, range(5)), (1, range(3)))
    kept.keeper.drain()
    kept.check()


def test_a_full_disk_is_told_and_holds_nothing_up(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.step((0, range(5)), (1, range(3)))
    kept.keeper.drain()

    def full(*_: Any) -> bool:
        raise DiskError("the disk is full", next_step="make room")

    monkeypatch.setattr(shard.ShardWriter, "put", full)
    for row in range(ON_HOST + 3):
        kept.step((2, range(row, row + 1)))
    kept.keeper.drain()
    assert kept.keeper.finished() == ([(0, 0)], ("DiskError", "the disk is full", "", "make room"))
    assert Store.open(kept.store.path, partial=True).verify_shard(0) == []
