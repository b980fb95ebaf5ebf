import json
from pathlib import Path

import pytest

from draftmill.errors import DataError
from draftmill.tokens import TokenSample, read_samples

GOOD = TokenSample(id="a", input_ids=[1, 2, 3], loss_mask=[0, 1, 1])


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD.line() * 2)
    assert list(read_samples(path, vocab_size=4)) == [GOOD, GOOD]


def test_a_sample_without_an_id_is_known_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [1], "loss_mask": [True]}))
    assert list(read_samples(path)) == [TokenSample(id="a.jsonl:1", input_ids=[1], loss_mask=[1])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2"),
        (b"\xff", "line 2: .*utf-8"),
        (b"[]", "no object"),
        (b"{}", "no object"),
        (b'{"input_ids": [], "loss_mask": []}', "empty"),
        (b'{"input_ids": [1.5], "loss_mask": [1]}', "whole numbers"),
        (b'{"input_ids": [true], "loss_mask": [1]}', "whole numbers"),
        (b'{"input_ids": [4], "loss_mask": [1]}', "token id 4 is outside the target's vocabulary of 4"),
        (b'{"input_ids": [-1], "loss_mask": [1]}', "token id -1"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids and 1 values"),
        (b'{"input_ids": [1], "loss_mask": [2]}', "zeros and ones"),
        (b'{"input_ids": [1]}', "zeros and ones"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.line().encode() + line + b"\n")
    with pytest.raises(DataError, match=words) as caught:
        list(read_samples(path, vocab_size=4))
    assert "a.jsonl, line 2" in caught.value.what


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl"):
        list(read_samples(tmp_path / "no.jsonl"))
