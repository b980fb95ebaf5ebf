"""Conversations to token ids and loss masks: the first stage."""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftmill import target
from draftmill.errors import DataError, TargetError
from draftmill.files import write_whole
from draftmill.prepare import gguf
from draftmill.prepare.answers import regenerate
from draftmill.prepare.conversations import Conversation, Dropped, read
from draftmill.prepare.masks import METHODS, Encoder, TemplateError
from draftmill.recipe import Recipe, Source, resolve
from draftmill.tokens import TokenSample

EXAMPLES = 3  # places named for each reason to drop something


@dataclass
class _Counts:
    """What was read, and what became of it."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        found = self.places.setdefault(reason, [])
        if len(found) < EXAMPLES:
            found.append(place)


def prepare(recipe: Recipe, *, keep_going: bool = False) -> None:
    """Writes the run's training and held-out samples, and the counts of what was dropped and why.

    Args:
        keep_going: keep what is whole of a damaged source, and count the rest.

    Raises:
        DataError: a source is missing, damaged, or gives no sample at all.
        TargetError: the target lacks weights, a tokenizer or a chat template.
        StackError: the answers are to be regenerated, and vLLM does not start.
    """
    console = Console(soft_wrap=True)
    source = resolve(recipe.target.path)
    if source.suffix == ".gguf":
        gguf.convert(source, recipe.folder.target, console)
    target.identify(recipe.target_folder)
    config = target.read_config(recipe.target_folder)
    encoder = _encoder(recipe)
    inputs = _inputs(recipe, keep_going)
    folder = recipe.folder.prepared
    if _already(folder, inputs):
        console.print(f"{folder} is prepared already", markup=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    counts = _Counts()
    start = time.monotonic()
    collected = list(_collect(recipe, encoder, config["vocab_size"], counts, keep_going))
    samples, rate = _samples(recipe, encoder, collected, counts)
    if not samples:
        rows = ", ".join(f"{reason}: {count}" for reason, count in counts.dropped.most_common())
        raise DataError(
            f"none of {counts.read} conversations can be used ({rows})", next_step="check data in the recipe"
        )
    train, held_out = _split(samples, recipe)
    summary = {
        **_write(folder, train, held_out),
        "inputs": inputs,
        "read": counts.read,
        "kept": len(samples),
        "dropped": dict(counts.dropped.most_common()),
        "places": counts.places,
        "mask_method": METHODS[encoder.method],
        "tokenizer_digest": target.tokenizer_digest(recipe.target_folder),
        "chat_template_digest": hashlib.sha256(str(encoder.tokenizer.chat_template).encode()).hexdigest(),
        "regenerated": recipe.data.regenerate.model_dump(mode="json"),
        "generated_tokens_per_second": rate,
        "seconds": time.monotonic() - start,
    }
    write_whole(folder / "prepared.json", (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())
    _print(summary, console)


def _encoder(recipe: Recipe) -> Encoder:
    from transformers import AutoTokenizer

    folder = recipe.target_folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=recipe.target.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # by which of its files is missing
        raise TargetError(
            f"the tokenizer in {folder} cannot be loaded: {error}",
            next_step="put the tokenizer's files beside the weights",
        ) from error
    templated = any(source.format != "tokens" for source in recipe.data.sources) or recipe.data.regenerate.enabled
    if templated and not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer in {folder} has no chat template",
            cause="it is a base model, or chat_template.jinja was not copied",
            next_step='add the template, or give samples that are tokenised already (format = "tokens")',
        )
    return Encoder.of(tokenizer)


def _inputs(recipe: Recipe, keep_going: bool) -> str:
    """The digest of everything that the samples are made from."""
    parts: list[Any] = [recipe.data.model_dump(mode="json"), recipe.run.seed, keep_going]
    parts.append([_file_digest(source) for source in recipe.data.sources])
    parts += [target.fingerprint(recipe.target_folder), target.tokenizer_digest(recipe.target_folder)]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _file_digest(source: Source) -> str:
    path = resolve(source.path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", next_step="check data.sources in the recipe"
        ) from error


def _already(folder: Path, inputs: str) -> bool:
    path = folder / "prepared.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text(encoding="utf-8"))
    return bool(summary.get("inputs") == inputs) and all(
        (folder / name).exists() and summary["files"][name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in summary["files"]
    )


def _collect(
    recipe: Recipe, encoder: Encoder, vocab_size: int, counts: _Counts, keep_going: bool
) -> Iterator[Conversation | TokenSample]:
    """Reads the sources until each has given what its limit asks for, less duplicates and what is too long."""
    wanted = recipe.data.regenerate
    seen: set[str] = set()
    for source in recipe.data.sources:
        kept = 0
        for found in read(source, vocab_size, answered=not wanted.enabled, keep_going=keep_going):
            counts.read += 1
            if isinstance(found, Conversation) and wanted.enabled:
                found = found.without_answers(wanted.turns)
            if reason := _refused(found, recipe, encoder, seen):
                counts.drop(reason, found.place if not isinstance(found, TokenSample) else found.id)
                continue
            assert not isinstance(found, Dropped)
            seen.add(_digest(found))
            yield found
            kept += 1
            if kept == source.limit:
                break


def _digest(found: Conversation | TokenSample) -> str:
    if isinstance(found, Conversation):
        return found.digest
    return hashlib.sha256(json.dumps([found.input_ids, found.loss_mask]).encode()).hexdigest()


def _refused(found: Conversation | TokenSample | Dropped, recipe: Recipe, encoder: Encoder, seen: set[str]) -> str:
    """Why this cannot be used; empty where it can."""
    if isinstance(found, Dropped):
        return found.reason
    if _digest(found) in seen:
        return "a duplicate"
    if isinstance(found, TokenSample) or not recipe.data.regenerate.enabled:
        return ""
    try:
        prompt = encoder.prompt(found.messages()[: 2 if found.turns[0].role == "system" else 1])
    except TemplateError as error:
        return str(error)
    room = recipe.data.max_length - recipe.data.regenerate.max_new_tokens
    return "" if len(prompt) <= room else "no room for an answer within max_length"


def _samples(
    recipe: Recipe, encoder: Encoder, collected: list[Conversation | TokenSample], counts: _Counts
) -> tuple[dict[str, TokenSample], float]:
    """The samples by the digest that decides their split, and the rate of generation."""
    conversations = [c for c in collected if isinstance(c, Conversation)]
    answers: dict[str, TokenSample] = {}
    rate = 0.0
    if recipe.data.regenerate.enabled and conversations:
        file = recipe.folder.prepared / "regenerated.jsonl"
        answers, rate = regenerate(recipe, encoder, conversations, file)
    found: dict[str, TokenSample] = {}
    for item in collected:
        digest, place = _digest(item), item.place if isinstance(item, Conversation) else item.id
        try:
            sample = (
                item if isinstance(item, TokenSample) else answers.get(digest) or _encode(item, digest, encoder, recipe)
            )
        except TemplateError as error:
            counts.drop(str(error), place)
            continue
        fitted = _fit(sample, recipe)
        if isinstance(fitted, str):
            counts.drop(fitted, place)
        else:
            found[digest] = fitted
    return found, rate


def _encode(conversation: Conversation, digest: str, encoder: Encoder, recipe: Recipe) -> TokenSample:
    if recipe.data.regenerate.enabled:
        raise TemplateError("the target gave no answer")
    ids, mask = encoder.encode(conversation)
    return TokenSample(id=digest, input_ids=ids, loss_mask=mask)


def _fit(sample: TokenSample, recipe: Recipe) -> TokenSample | str:
    """The sample within the length limit, or why it is dropped."""
    limit = recipe.data.max_length
    ids, mask = sample.input_ids, sample.loss_mask
    if len(ids) > limit:
        if recipe.data.overlong == "drop":
            return "longer than max_length"
        ids, mask = ids[:limit], mask[:limit]
    if not any(mask):
        return "nothing to learn from: the mask is empty"
    return TokenSample(id=sample.id, input_ids=ids, loss_mask=mask)


def _split(samples: dict[str, TokenSample], recipe: Recipe) -> tuple[list[TokenSample], list[TokenSample]]:
    """Training and held-out samples. A sample's side depends on its conversation and the seed: more data moves none."""
    sides: tuple[list[TokenSample], list[TokenSample]] = ([], [])
    for digest, sample in samples.items():
        drawn = random.Random(f"{recipe.run.seed}:{digest}").random()
        sides[drawn < recipe.data.held_out].append(sample)
    for side in sides:
        random.Random(recipe.run.seed).shuffle(side)
    if not sides[0]:
        sides[0].append(sides[1].pop())
    return sides


def _write(folder: Path, train: list[TokenSample], held_out: list[TokenSample]) -> dict[str, Any]:
    sides = {"train": train, "held_out": held_out}
    files = {}
    for name, samples in sides.items():
        data = "".join(sample.line() for sample in samples).encode()
        write_whole(folder / f"{name}.jsonl", data)
        files[f"{name}.jsonl"] = hashlib.sha256(data).hexdigest()
    return {
        "samples": {name: len(samples) for name, samples in sides.items()},
        "tokens": {name: sum(len(s.input_ids) for s in samples) for name, samples in sides.items()},
        "supervised_tokens": {name: sum(sum(s.loss_mask) for s in samples) for name, samples in sides.items()},
        "files": files,
        "dataset_digest": hashlib.sha256("".join(files.values()).encode()).hexdigest(),
    }


def _print(summary: dict[str, Any], console: Console) -> None:
    table = Table("", "conversations", "tokens", "supervised")
    for side in ("train", "held_out"):
        row = (summary[key][side] for key in ("samples", "tokens", "supervised_tokens"))
        table.add_row(side.replace("_", " "), *(f"{number:,}" for number in row))
    for reason, count in summary["dropped"].items():
        table.add_row(f"dropped: {reason}", f"{count:,}", "", "", style="dim")
    console.print(table)
