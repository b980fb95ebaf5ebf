"""A shard written row by row, in whatever order samples come, is the shard that is written at once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftmill.shard import ShardWriter, Spec
from draftmill.store import as_bytes

ROWS = (3, 1, 5)
WIDTH = 4


def specs() -> list[Spec]:
    states = [Spec(sample=i, name="states", dtype="BF16", rows=n, width=WIDTH) for i, n in enumerate(ROWS)]
    return [Spec(sample=i, name="mask", dtype="BOOL", rows=n) for i, n in enumerate(ROWS)] + states


def value(spec: Spec) -> torch.Tensor:
    if spec.dtype == "BOOL":
        return torch.arange(spec.rows) % 2 == spec.sample % 2
    return (torch.arange(spec.rows * WIDTH).reshape(spec.rows, WIDTH) + 100 * spec.sample).bfloat16()


def written_at_once(path: Path) -> bytes:
    writer = ShardWriter(path, specs())
    complete = [writer.put(s.sample, s.name, 0, as_bytes(value(s))) for s in specs()]
    assert complete == [False] * (len(complete) - 1) + [True]
    writer.finish()
    return path.read_bytes()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_in_pieces_and_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Pieces that begin before what is there, as of a request that was computed anew, change nothing."""
    folder = tmp_path_factory.mktemp("shard")
    writer = ShardWriter(folder / "pieces.safetensors", specs())
    lacking = {(s.sample, s.name): (s, 0) for s in specs()}
    while lacking:
        spec, done = lacking[data.draw(st.sampled_from(sorted(lacking)))]
        first = data.draw(st.integers(0, done))
        end = data.draw(st.integers(done + 1, spec.rows))
        complete = writer.put(spec.sample, spec.name, first, as_bytes(value(spec)[first:end]))
        if end == spec.rows:
            del lacking[spec.sample, spec.name]
        else:
            lacking[spec.sample, spec.name] = spec, end
        assert complete == (not lacking)
    writer.finish()
    assert (folder / "pieces.safetensors").read_bytes() == written_at_once(folder / "whole.safetensors")


def test_it_is_safetensors(tmp_path: Path) -> None:
    written_at_once(tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        for spec in specs():
            assert torch.equal(file.get_tensor(f"{spec.sample}.{spec.name}"), value(spec))


def test_rows_beyond_the_last_are_left_out(tmp_path: Path) -> None:
    """A token that was sampled after the prompt has a row too."""
    writer = ShardWriter(tmp_path / "s.safetensors", [Spec(sample=0, name="mask", dtype="BOOL", rows=2)])
    assert writer.put(0, "mask", 0, as_bytes(torch.tensor([True, True, True])))
    assert not writer.put(0, "mask", 2, as_bytes(torch.tensor([True])))
    writer.finish()


def test_a_gap_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s.safetensors", specs())
    with pytest.raises(ValueError, match="mask of sample 2: row 1 comes after row -1"):
        writer.put(2, "mask", 1, as_bytes(torch.tensor([True])))


def test_an_unfinished_shard_gets_no_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s.safetensors", specs())
    writer.put(0, "mask", 0, as_bytes(value(specs()[0])))
    with pytest.raises(ValueError, match="lacks rows of 5 tensors"):
        writer.finish()
    assert not (tmp_path / "s.safetensors").exists()
    writer.drop()
    assert list(tmp_path.iterdir()) == []
