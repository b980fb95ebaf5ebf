import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftmill import cli
from draftmill.errors import DiskError, StoreError
from draftmill.layers import LayerContract
from draftmill.store import Manifest, Sample, Store, StoreWriter
from draftmill.target import TargetIdentity

H = 4
IDS = (3, 1)


def manifest(lengths: tuple[int, ...] = (3, 1, 5, 2, 4), **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "target": TargetIdentity(fingerprint="f", hidden_size=H, num_layers=5, vocab_size=50),
        "tokenizer_digest": "t",
        "layers": LayerContract(ids=IDS, num_layers=5),
        "computed_in": "float32",
        "dataset_digest": "d",
        "lengths": lengths,
        "shard_samples": 2,
        "stack": {"torch": "2"},
        "recipe": {"layers": None},
    }
    return Manifest(**{**fields, **changes})


def sample(index: int, length: int) -> Sample:
    generator = torch.Generator().manual_seed(index)

    def states() -> torch.Tensor:
        return torch.randn(length, H, generator=generator).to(torch.bfloat16)

    return Sample(
        input_ids=torch.randint(0, 50, (length,), generator=generator),
        loss_mask=torch.arange(length) % 2 == 0,
        hidden_states={k: states() for k in IDS},
        last_hidden_state=states(),
    )


def fill(path: Path, of: Manifest) -> Store:
    writer = StoreWriter(path, of)
    for number in writer.missing()[0]:
        writer.write(number, [sample(i, of.lengths[i]) for i in of.samples_of(number)])
    writer.close()
    return Store.open(path)


def equal(a: Sample, b: Sample) -> bool:
    return a.checksum() == b.checksum()


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple), shard=st.integers(1, 5))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: tuple[int, ...], shard: int
) -> None:
    store = fill(tmp_path_factory.mktemp("store"), manifest(lengths, shard_samples=shard))
    assert len(store) == len(lengths)
    assert store.lengths == lengths
    assert store.verify() == []
    for i, length in enumerate(lengths):
        assert equal(store[i], sample(i, length))
        assert store[i].hidden_states[IDS[0]].dtype == torch.bfloat16
        assert list(store[i].hidden_states) == list(IDS)


def test_the_order_of_layers_is_the_contracts(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", manifest())
    assert tuple(store[0].hidden_states) == (3, 1)


@pytest.mark.parametrize("index", [-1, 5, 100])
def test_an_index_out_of_range(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError):
        fill(tmp_path / "s", manifest())[index]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-7])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "a byte flipped":
        data[-3] ^= 1
        path.write_bytes(data)
    elif how == "header flipped":
        data[4] ^= 255
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("deleted", "missing"),
        ("truncated", "unreadable"),
        ("emptied", "unreadable"),
        ("a byte flipped", "corrupt"),
        ("header flipped", "unreadable"),
    ],
)
def test_damage_is_found_named_and_repaired(tmp_path: Path, how: str, kind: str) -> None:
    of = manifest()
    path = tmp_path / "s"
    fill(path, of)
    damage(path / "shard-00001.safetensors", how)
    [finding] = Store.open(path, partial=True).verify()
    assert finding.kind == kind
    assert "shard-00001" in finding.place
    writer = StoreWriter(path, of)
    numbers, findings = writer.missing()
    assert numbers == [1]
    assert findings == ([] if how == "deleted" else [finding])
    writer.close()
    assert fill(path, of).verify() == []


def test_every_byte_of_a_shard_counts(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", manifest((2,), shard_samples=1))
    path = store.shard(0)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert Store.open(tmp_path / "s").verify(), place


def test_a_damaged_sample_is_named_when_it_is_read(tmp_path: Path) -> None:
    fill(tmp_path / "s", manifest())
    damage(tmp_path / "s" / "shard-00001.safetensors", "truncated")
    with pytest.raises(StoreError, match=r"sample 2 .* cannot be read"):
        Store.open(tmp_path / "s")[2]


def test_a_sample_of_another_length_than_the_manifests_is_named_when_it_is_read(tmp_path: Path) -> None:
    of = manifest()
    fill(tmp_path / "s", of)
    other = fill(tmp_path / "other", manifest(lengths=(3, 2, 5, 2, 4)))
    other.shard(0).replace(tmp_path / "s" / other.shard(0).name)
    with pytest.raises(StoreError, match=r"sample 1 .* it has 2 tokens, the manifest says 1"):
        Store.open(tmp_path / "s")[1]


def test_an_unfinished_store_opens_only_when_asked(tmp_path: Path) -> None:
    of = manifest()
    writer = StoreWriter(tmp_path / "s", of)
    writer.write(0, [sample(i, of.lengths[i]) for i in of.samples_of(0)])
    with pytest.raises(StoreError, match="lacks 2 of 3 shards, the first shard-00001"):
        Store.open(tmp_path / "s")
    assert equal(Store.open(tmp_path / "s", partial=True)[1], sample(1, of.lengths[1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset_digest", "other"),
        ("layers", LayerContract(ids=(1, 3), num_layers=5)),
        ("lengths", (3, 1, 5, 2, 3)),
        ("computed_in", "bfloat16"),
        ("stack", {"torch": "3"}),
        ("target", TargetIdentity(fingerprint="g", hidden_size=H, num_layers=5, vocab_size=50)),
    ],
)
def test_another_runs_store_is_refused_and_left_alone(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "s"
    fill(path, manifest())
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(StoreError, match=f"differ in: {field}"):
        StoreWriter(path, manifest(**{field: value}))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path / "s", manifest())
    with pytest.raises(StoreError, match="another process"):
        StoreWriter(tmp_path / "s", manifest())
    first.close()
    StoreWriter(tmp_path / "s", manifest()).close()


def test_what_a_killed_writer_left_is_taken_away(tmp_path: Path) -> None:
    fill(tmp_path / "s", manifest())
    (tmp_path / "s" / "shard-00002.part").write_bytes(b"half")
    StoreWriter(tmp_path / "s", manifest()).close()
    assert not list((tmp_path / "s").glob("*.part"))


def test_a_write_that_stops_before_its_rename_leaves_the_old_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = manifest()
    before = fill(tmp_path / "s", of).shard(0).read_bytes()
    writer = StoreWriter(tmp_path / "s", of)

    def stop(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        writer.write(0, [sample(i + 9, of.lengths[i]) for i in of.samples_of(0)])
    assert Store.open(tmp_path / "s").shard(0).read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_what_the_disk_refuses_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    of = manifest()
    store = fill(tmp_path / "s", of)
    writer = StoreWriter(tmp_path / "s", of)

    def refuse(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match="the disk is full" if number == errno.ENOSPC else "Read-only"):
        writer.write(0, [sample(i, of.lengths[i]) for i in of.samples_of(0)])
    assert not list((tmp_path / "s").glob("*.part"))
    assert store.verify() == []


def test_a_full_disk(small_disk: Path) -> None:
    of = manifest(lengths=(4000,) * 40, shard_samples=4)
    writer = StoreWriter(small_disk / "s", of)
    written = 0
    with pytest.raises(DiskError, match="the disk is full"):
        for number in range(of.shards):
            writer.write(number, [sample(i, of.lengths[i]) for i in of.samples_of(number)])
            written += 1
    assert 0 < written < of.shards
    store = Store.open(small_disk / "s", partial=True)
    assert [f for f in store.verify() if f.kind != "missing"] == []
    assert not list((small_disk / "s").glob("*.part"))


@pytest.mark.parametrize("text", ["", "{}", "[", json.dumps({"format": 1, "unknown": 2})])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match="cannot be read"):
        Store.open(tmp_path)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(tmp_path / "nowhere")


def test_the_estimate_is_what_is_written(tmp_path: Path) -> None:
    of = manifest(lengths=(400, 300), shard_samples=2)
    store = fill(tmp_path / "s", of)
    header = 8 + int.from_bytes(store.shard(0).read_bytes()[:8], "little")
    assert store.shard(0).stat().st_size - header == of.bytes_of(range(2))


def test_what_a_store_says_of_itself(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", manifest())
    store.shard(1).unlink()
    done = CliRunner().invoke(cli.app, ["store", "info", str(tmp_path / "s")])
    lines = {line.split("  ")[0].strip(): line for line in done.output.splitlines()}
    assert "15, 5 in the longest" in lines["tokens"]
    assert "2 of 3" in lines["shards"]
    assert "3, 1: input of decoder layer k" in lines["layers"]


def test_what_a_sample_holds(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", manifest())
    done = CliRunner().invoke(cli.app, ["store", "sample", str(tmp_path / "s"), "2"], terminal_width=120)
    rows = {line.split()[1]: line for line in done.output.splitlines() if "." in line or "_" in line}
    assert list(rows) == ["input_ids", "loss_mask", "hidden_states.3", "hidden_states.1", "last_hidden_state"]
    assert "[5, 4]" in rows["hidden_states.3"]
    assert f"{store[2].hidden_states[3].abs().max().item():.4g}" in rows["hidden_states.3"]
    refused = CliRunner().invoke(cli.app, ["store", "sample", str(tmp_path / "s"), "5"])
    assert isinstance(refused.exception, StoreError)
