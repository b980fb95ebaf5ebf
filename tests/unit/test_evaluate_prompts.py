"""Prompt files in their three formats, whole and damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from draftmill.errors import DataError, TargetError
from draftmill.evaluate import prompts
from draftmill.recipe import Prompts


class Words:
    """A tokenizer whose token ids are the lengths of words, after a mark for each turn's role."""

    chat_template: str | None = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        if len(messages) > 3:
            raise TemplateError("too many turns")
        marks = {"system": 100, "user": 101, "assistant": 102}
        return [i for m in messages for i in (marks[m["role"]], *map(len, m["content"].split()))] + [102]


def load(path: Path, kind: Any, *, room: int = 50, limit: int | None = None, tokenizer: Any = None) -> list[Any]:
    made = Prompts(name="set", format=kind, path=str(path), limit=limit)
    return [(p.id, list(p.token_ids)) for p in prompts.load(made, tokenizer or Words(), room=room)]


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f", "test": "x"}, ("HumanEval/0", [101, 3, 1, 102])),
        ("mt_bench", {"question_id": 81, "turns": ["one two", "and three"]}, ("81", [101, 3, 3, 102])),
        ("messages", {"prompt": "hello"}, ("line 1", [101, 5, 102])),
        ("messages", {"id": 7, "messages": [{"role": "user", "content": "a"}]}, ("7", [101, 1, 102])),
        (
            "messages",
            {
                "messages": [
                    {"role": "system", "content": "s s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "what a model said"},
                ]
            },
            ("line 1", [100, 1, 1, 101, 1, 102]),
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_each_format_is_read(
    tmp_path: Path, kind: str, row: dict[str, Any], expected: tuple[str, list[int]], packed: bool
) -> None:
    data = json.dumps(row).encode() + b"\n\n"
    path = tmp_path / "prompts"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert load(path, kind) == [expected]


def test_the_limit_takes_the_first(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\nnot read\n')
    assert [key for key, _ in load(path, "messages", limit=2)] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("humaneval", b'{"prompt": "x"}', "'task_id' is missing"),
        ("humaneval", b'{"task_id": "x"', "line 2, is no humaneval prompt"),
        ("mt_bench", b'{"question_id": 1, "turns": []}', "line 2"),
        ("mt_bench", b"[1, 2]", "line 2"),
        ("messages", b'{"messages": [{"role": "robot", "content": "x"}]}', "'robot' is none of"),
        ("messages", b'{"messages": [{"role": "user", "content": " "}]}', "empty or no text"),
        ("messages", b'{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
        ("messages", b'{"messages": []}', "nothing to answer"),
        ("messages", b'{"prompt": "\xff"}', "utf-8"),
        ("messages", b'{"prompt": 3}', "empty or no text"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, kind: str, line: bytes, words: str) -> None:
    good = {
        "humaneval": b'{"task_id": "t", "prompt": "p"}',
        "mt_bench": b'{"question_id": 1, "turns": ["p"]}',
        "messages": b'{"prompt": "p"}',
    }
    path = tmp_path / "p.jsonl"
    path.write_bytes(good[kind] + b"\n" + line + b"\n")
    with pytest.raises(DataError, match="line 2") as caught:
        load(path, kind)
    assert words in caught.value.what


def test_files_that_hold_nothing_usable(tmp_path: Path) -> None:
    empty, cut = tmp_path / "empty", tmp_path / "cut.gz"
    empty.write_text("\n")
    cut.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 500)[:40])
    for path, words in ((tmp_path / "missing", "cannot read"), (empty, "holds no prompt"), (cut, "cannot read")):
        with pytest.raises(DataError, match=words) as caught:
            load(path, "messages")
        assert str(path) in caught.value.what


def test_prompts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "short", "prompt": "a"}\n{"id": "long", "prompt": "a b c d"}\n')
    assert len(load(path, "messages", room=6)) == 2
    with pytest.raises(DataError, match=r"long \(6 tokens\)") as caught:
        load(path, "messages", room=5)
    assert "short" not in caught.value.what


def test_the_template_decides(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": [{"role": "user", "content": "a"}] * 4}) + "\n")
    with pytest.raises(DataError, match="too many turns"):
        load(path, "messages")
    base = Words()
    base.chat_template = None
    with pytest.raises(TargetError, match="no chat template"):
        load(path, "messages", tokenizer=base)


def test_samples_give_what_comes_before_their_first_answer(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]},
        {"id": "never", "input_ids": [5, 6], "loss_mask": [0, 0]},
        {"id": "at once", "input_ids": [5, 6], "loss_mask": [1, 1]},
        {"id": "b", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "c", "input_ids": [3, 2], "loss_mask": [0, 1]},
    ]
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(path, "tokens") == [("a", [5, 6]), ("b", [1]), ("c", [3])]
    assert load(path, "tokens", limit=2) == [("a", [5, 6]), ("b", [1])]
    with pytest.raises(DataError, match="longer than 1 tokens: a"):
        load(path, "tokens", room=1)
    with pytest.raises(DataError, match="line 1: token id 9 is outside the target's vocabulary of 9"):
        prompts.load(Prompts(name="set", format="tokens", path=str(path)), Words(), room=50, vocab_size=9)
    path.write_text('{"input_ids": [1], "loss_mask": []}\n')
    with pytest.raises(DataError, match="line 1: 1 input_ids and 0 values"):
        load(path, "tokens")
