"""Conversations to token ids and loss masks: the first stage."""

import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftmill import target
from draftmill.errors import DataError, TargetError
from draftmill.files import disk_errors, sha256, write_whole
from draftmill.prepare import gguf
from draftmill.prepare.answers import regenerate
from draftmill.prepare.collect import Collector, Counts
from draftmill.prepare.conversations import Conversation
from draftmill.prepare.masks import METHODS, Encoder
from draftmill.recipe import Recipe, Source, resolve
from draftmill.tokens import TokenSample


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
    recipe = _within(recipe, config, console)
    encoder = _encoder(recipe)
    inputs = _inputs(recipe, keep_going)
    folder = recipe.folder.prepared
    if _already(folder, inputs):
        console.print(f"{folder} is prepared already", markup=False)
        return
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    counts = Counts()
    collector = Collector(recipe=recipe, encoder=encoder, vocab_size=config["vocab_size"], counts=counts)
    samples, rate = _answered(recipe, collector, collector.collect(keep_going=keep_going))
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


def _within(recipe: Recipe, config: dict[str, Any], console: Console) -> Recipe:
    """The recipe with a length limit that the target can take."""
    limit = target.length_limit(config, recipe.data.max_length)
    if limit == recipe.data.max_length:
        return recipe
    console.print(f"data.max_length is {recipe.data.max_length}, the target takes {limit} tokens: {limit} it is")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": limit})})


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
        return sha256(path)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", next_step="check data.sources in the recipe"
        ) from error


def _already(folder: Path, inputs: str) -> bool:
    path = folder / "prepared.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in summary["files"]}
        return bool(summary["inputs"] == inputs and summary["files"] == files)
    except (OSError, ValueError, KeyError, TypeError):  # damaged, by whichever way: it is made again
        return False


def _answered(
    recipe: Recipe, collector: Collector, collected: dict[str, Conversation | TokenSample]
) -> tuple[dict[str, TokenSample], float]:
    """The samples by the digest that decides their split, and the rate of generation."""
    conversations = [item for item in collected.values() if isinstance(item, Conversation)]
    answers: dict[str, TokenSample] = {}
    rate = 0.0
    if conversations:
        file = recipe.folder.prepared / "regenerated.jsonl"
        answers, rate = regenerate(recipe, collector.encoder, conversations, file)
    samples: dict[str, TokenSample] = {}
    for digest, item in collected.items():
        if isinstance(item, TokenSample):
            samples[digest] = item
            continue
        answer = answers.get(digest)
        fitted = collector.fit(answer) if answer else "the target gave no answer"
        if isinstance(fitted, str):
            collector.counts.drop(fitted, item.place)
        else:
            samples[digest] = fitted
    return samples, rate


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
