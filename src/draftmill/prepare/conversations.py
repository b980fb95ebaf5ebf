"""Conversations out of files: read as a stream, brought to one form, or refused with a reason."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftmill.errors import DataError
from draftmill.recipe import Source, resolve
from draftmill.tokens import TokenSample, parse

Role = Literal["system", "user", "assistant"]
ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns of the user and the assistant in alternation, the user's first; before them perhaps the system's."""

    turns: tuple[Turn, ...]
    place: str

    @property
    def digest(self) -> str:
        """sha256 of roles and contents: two conversations with one digest are duplicates."""
        parts = [[turn.role, turn.content] for turn in self.turns]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()

    def asks(self, pattern: str) -> bool:
        """Whether the user says something that matches a regular expression."""
        return any(re.search(pattern, turn.content) for turn in self.turns if turn.role == "user")

    def messages(self) -> list[dict[str, str]]:
        """The form that chat templates take."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    def without_answers(self, turns: int) -> "Conversation":
        """The system's message and the first user turns alone, to be answered anew."""
        system = [turn for turn in self.turns if turn.role == "system"]
        user = [turn for turn in self.turns if turn.role == "user"][:turns]
        return Conversation(turns=(*system, *user), place=self.place)


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Something that was read and cannot be used."""

    reason: str
    place: str


def read(
    source: Source, vocab_size: int, *, answered: bool, keep_going: bool
) -> Iterator[Conversation | TokenSample | Dropped]:
    """Reads one source, in its order.

    Args:
        answered: a conversation needs an answer of the assistant's, and ends with it.
        keep_going: count what is broken as dropped, instead of stopping there.

    Raises:
        DataError: the file is missing, or broken at a place that is named.
    """
    path = resolve(source.path)
    values = _array(path, keep_going) if source.format == "sharegpt" else _lines(path, keep_going)
    try:
        for place, value in values:
            if isinstance(value, Dropped):
                yield value
            elif source.format == "tokens":
                yield _tokens(value, vocab_size, place, keep_going=keep_going)
            else:
                yield normalise(value, place, answered=answered)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", next_step="check data.sources in the recipe"
        ) from error


def _array(path: Path, keep_going: bool) -> Iterator[tuple[str, Any]]:
    """The elements of a JSON array, one at a time; the file is never whole in memory."""
    import ijson

    count = 0
    with path.open("rb") as file:
        try:
            for value in ijson.items(file, "item"):
                yield f"{path.name}[{count}]", value
                count += 1
        except (ijson.JSONError, UnicodeDecodeError) as error:
            place = f"{path}, near byte {file.tell():,}"
            if not keep_going:
                raise DataError(
                    f"{place}: {str(error).splitlines()[0]}; {count:,} whole conversations come before it",
                    cause="the file was cut off, or is no JSON array",
                    next_step="get the whole file, or keep what is whole with --keep-going",
                ) from error
            yield place, Dropped(reason="the file ends early or is broken from here on", place=place)


def _lines(path: Path, keep_going: bool) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path.name}:{number}"
            try:
                yield place, json.loads(line.decode())
            except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors too
                yield place, _broken(f"{path}, line {number}", str(error), place, keep_going)


def _tokens(value: Any, vocab_size: int, place: str, *, keep_going: bool) -> TokenSample | Dropped:
    try:
        return parse(value, vocab_size, default_id=place)
    except ValueError as error:
        return _broken(place, str(error), place, keep_going)


def _broken(where: str, what: str, place: str, keep_going: bool) -> Dropped:
    if not keep_going:
        raise DataError(f"{where}: {what}", next_step="correct or remove that line, or drop it with --keep-going")
    return Dropped(reason="a broken line", place=place)


def normalise(value: Any, place: str, *, answered: bool = True) -> Conversation | Dropped:
    """Brings ShareGPT's `conversations` and OpenAI's `messages` to one form, or says why it cannot be used."""
    listed = value.get("conversations", value.get("messages")) if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        return Dropped(reason="no turns", place=place)
    turns: list[Turn] = []
    for item in listed:
        found = _turn(item)
        if isinstance(found, str):
            return Dropped(reason=found, place=place)
        turns.append(found)
    if reason := _misordered(turns, answered=answered):
        return Dropped(reason=reason, place=place)
    while answered and turns[-1].role != "assistant":  # a last question without its answer
        turns.pop()
    return Conversation(turns=tuple(turns), place=place)


def _turn(item: Any) -> Turn | str:
    if not isinstance(item, dict):
        return "a turn that is no object"
    name = str(item.get("from", item.get("role", "")))
    content = item.get("value", item.get("content"))
    if name not in ROLES:
        return f"unknown role: {name[:20]}"
    if not isinstance(content, str):
        return "a turn that is no text"
    if not content.strip():
        return "an empty turn"
    if any("\ud800" <= character <= "\udfff" for character in content):
        return "half a character (a lone surrogate) in a turn"
    return Turn(role=ROLES[name], content=content)


def _misordered(turns: list[Turn], *, answered: bool) -> str:
    spoken = turns[1:] if turns[0].role == "system" else turns
    if not spoken:
        return "no turns"
    if spoken[0].role == "assistant":
        return "begins with the assistant"
    if answered and not any(turn.role == "assistant" for turn in spoken):
        return "no assistant turn"
    expected: Role = "user"
    for turn in spoken:
        if turn.role != expected:
            return "roles do not alternate"
        expected = "assistant" if expected == "user" else "user"
    return ""
