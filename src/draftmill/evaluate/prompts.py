"""Prompt sets: files of HumanEval, MT-Bench or plain messages, read and turned into token ids by the target's chat
template.
"""

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import DataError, TargetError
from draftmill.recipe import Prompts, resolve
from draftmill.tokens import read_samples

GZIP_MAGIC = b"\x1f\x8b"
ROLES = ("system", "user", "assistant")

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as the target sees it. `token_ids` end with the template's generation prompt."""

    id: str
    token_ids: tuple[int, ...]


def load(prompts: Prompts, tokenizer: Any, *, room: int, vocab_size: int | None = None) -> list[Prompt]:
    """Reads a prompt set and applies the tokenizer's chat template.

    Args:
        tokenizer: the target's, as Hugging Face loads it.
        room: the most tokens a prompt may have, so that its answer still fits the target's limit.
        vocab_size: the target's, which ids that come as such are held against.

    Raises:
        DataError: the file is missing, empty or cut off, a line is invalid, or a prompt does not fit.
        TargetError: the tokenizer has no chat template.
    """
    path = resolve(prompts.path)
    if prompts.format == "tokens":
        read = _before_answers(prompts, path, vocab_size)
    else:
        rows = _rows(prompts, path)
        read = [Prompt(id=key, token_ids=_encode(tokenizer, messages, path, key)) for key, messages in rows]
    if not read:
        raise DataError(f"{path} holds no prompt", next_step=f"check the path of the prompt set {prompts.name!r}")
    if overlong := [(p.id, len(p.token_ids)) for p in read if len(p.token_ids) > room]:
        names = ", ".join(f"{key} ({length} tokens)" for key, length in overlong[:5])
        raise DataError(
            f"{len(overlong)} prompts of {path} are longer than {room} tokens: {names}",
            cause="prompt, new tokens and drafted tokens have to fit the target's limit together, and where the "
            "reference loop decodes, its sliding window",
            next_step="take these prompts out, or lower [evaluate] max_new_tokens",
        )
    return read


def _before_answers(prompts: Prompts, path: Path, vocab_size: int | None) -> list[Prompt]:
    """Of each sample what comes before its first supervised token; of one that none precedes, nothing."""
    starts = (
        (sample.id, sample.input_ids[: sample.loss_mask.index(1)])
        for sample in read_samples(path, vocab_size)
        if 1 in sample.loss_mask
    )
    taken = itertools.islice(((key, ids) for key, ids in starts if ids), prompts.limit)
    return [Prompt(id=key, token_ids=tuple(ids)) for key, ids in taken]


def _rows(prompts: Prompts, path: Path) -> Iterator[tuple[str, list[Message]]]:
    read = {"humaneval": _humaneval, "mt_bench": _mt_bench, "messages": _messages}[prompts.format]
    count = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        if count == prompts.limit:
            return
        count += 1
        try:
            row = json.loads(line.decode("utf-8"))
            key, messages = read(row)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{path}, line {number}, is no {prompts.format} prompt: {reason}",
                next_step="correct that line, or the format that the recipe gives this file",
            ) from error
        yield key or f"line {number}", messages


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, gzip or not, one at a time."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            yield from gzip.GzipFile(fileobj=raw) if packed else raw
    except (OSError, EOFError) as error:
        raise DataError(
            f"cannot read the prompts {path}: {error}",
            cause="a wrong path, or a file that was not downloaded to its end",
            next_step="check the recipe's [[evaluate.prompts]] and the file",
        ) from error


def _humaneval(row: dict[str, Any]) -> tuple[str, list[Message]]:
    return str(row["task_id"]), [_message("user", row["prompt"])]


def _mt_bench(row: dict[str, Any]) -> tuple[str, list[Message]]:
    """The first turn: the second needs an answer to the first, and so would depend on the model."""
    return str(row["question_id"]), [_message("user", row["turns"][0])]


def _messages(row: dict[str, Any]) -> tuple[str, list[Message]]:
    """`messages` up to the last that is not the assistant's, or one `prompt`."""
    key = str(row.get("id", ""))
    if "messages" not in row:
        return key, [_message("user", row["prompt"])]
    messages = [_message(m["role"], m["content"]) for m in row["messages"]]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("there is nothing to answer")
    return key, messages


def _message(role: object, content: object) -> Message:
    if role not in ROLES:
        raise ValueError(f"the role {role!r} is none of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise ValueError("a turn is empty or no text")
    return {"role": str(role), "content": content}


def _encode(tokenizer: Any, messages: Sequence[Message], path: Path, key: str) -> tuple[int, ...]:
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        raise TargetError(
            "the target's tokenizer has no chat template",
            cause="a base model, or a folder without chat_template.jinja",
            next_step="name a chat model, or add its template to the target's folder",
        )
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise DataError(
            f"the target's chat template refuses prompt {key} of {path}: {error}", next_step="take this prompt out"
        ) from error
    return tuple(int(i) for i in ids)
