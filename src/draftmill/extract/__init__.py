"""Hidden states of the target, extracted with vLLM and kept in a store.

vLLM is kept full of prompts, across shards, and its worker writes each token's states to their place. A sample's states
are the same in whatever company it was computed, to the last bits that a batch's size changes in any engine.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftmill import compute, target
from draftmill.errors import DataError, DiskError, Interrupted
from draftmill.extract.engine import Engine, Job
from draftmill.extract.rates import Rates
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Manifest, StoreWriter
from draftmill.tokens import TokenSample, read_samples

MARGIN = 1.02  # safetensors' headers and the file system's blocks


@dataclass(frozen=True, kw_only=True)
class Split:
    """One of the two stores of a run, and what is to be done for it."""

    samples: list[TokenSample]
    writer: StoreWriter
    todo: list[int]

    def jobs(self, store: int) -> Iterator[Job]:
        """The shards to extract, of the store of that number."""
        for number in self.todo:
            indices = self.writer.store.manifest.samples_of(number)
            yield Job(store=store, number=number, samples=[(i, self.samples[i]) for i in indices])


def extract(recipe: Recipe, *, yes: bool = False) -> None:
    """Writes the stores of the run's training and held-out samples, or what is missing or damaged in them.

    Args:
        yes: go on though the disk looks too small.

    Raises:
        DataError: the samples do not fit the target.
        DiskError: the disk is, or would be, full.
        StoreError: the stores are another run's.
        Interrupted: Ctrl-C or SIGTERM; the shard that was in the making is dropped.
        StackError: the engine does not start or fails.
    """
    console = Console(soft_wrap=True)
    config = target.read_config(recipe.target_folder)
    contract = LayerContract.of(recipe.extract.layers, config["num_hidden_layers"])
    folder = recipe.folder
    pairs = [(folder.prepared / f"{path.name}.jsonl", path) for path in (folder.store_train, folder.store_held_out)]
    limit = target.length_limit(config, recipe.data.max_length)
    read = [(_read(source, config, limit), source, path) for source, path in pairs]
    if not read[0][0]:
        raise DataError(f"{pairs[0][0]} holds no samples", next_step="give `draftmill prepare` more conversations")
    manifests = [(samples, path, _manifest(recipe, contract, samples, source)) for samples, source, path in read]
    _check_disk(manifests, folder.root, console, yes=yes)
    with contextlib.ExitStack() as stack:
        splits = [_open(samples, path, manifest, console) for samples, path, manifest in manifests]
        for split in splits:
            stack.callback(split.writer.close)
        if not any(split.todo for split in splits):
            console.print(f"the stores in {folder.store_train.parent} are whole", markup=False)
            return
        _log(recipe).unlink(missing_ok=True)  # an earlier run's errors would be taken for this one's
        console = stack.enter_context(compute.engine_output_to(_log(recipe)))
        console.print(f"starting vLLM ({_log(recipe)} has its output)", markup=False)
        try:
            engine = Engine(recipe, contract, limit, _log(recipe))
            stack.callback(engine.shutdown)
            _run(recipe, engine, splits, console)
        except KeyboardInterrupt as error:
            written = len([*folder.store_train.parent.glob("*/shard-*.safetensors")])
            raise Interrupted(
                f"interrupted: {written} of {sum(split.writer.store.manifest.shards for split in splits)} shards are "
                "written, and stay",
                next_step="run the same command again: it goes on with the next",
            ) from error


def _read(path: Path, config: dict[str, Any], limit: int) -> list[TokenSample]:
    samples = list(read_samples(path, config["vocab_size"]))
    for sample in samples:
        if len(sample.input_ids) > limit:
            raise DataError(
                f"{path}: sample {sample.id} has {len(sample.input_ids)} tokens, the limit is {limit}",
                cause="the target's own limit, or data.max_length, is smaller than when that file was written",
                next_step="run `draftmill prepare` again",
            )
    return samples


def _manifest(recipe: Recipe, contract: LayerContract, samples: Sequence[TokenSample], source: Path) -> Manifest:
    return Manifest(
        target=target.identify(recipe.target_folder),
        tokenizer_digest=target.tokenizer_digest(recipe.target_folder),
        layers=contract,
        computed_in=compute.target_dtype(recipe),
        dataset_digest=hashlib.sha256(source.read_bytes()).hexdigest(),
        lengths=tuple(len(sample.input_ids) for sample in samples),
        shard_samples=recipe.extract.shard_samples,
        stack=compute.stack_versions(),
        recipe=recipe.extract.model_dump(mode="json"),
    )


def _check_disk(
    manifests: Sequence[tuple[list[TokenSample], Path, Manifest]], root: Path, console: Console, *, yes: bool
) -> None:
    """Prints what will be written against what is free, and refuses what does not fit."""
    needed = 0
    for _, path, manifest in manifests:
        there = sum(file.stat().st_size for file in path.glob("shard-*.safetensors"))
        needed += max(int(manifest.bytes_of(range(len(manifest.lengths))) * MARGIN) - there, 0)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    tokens = sum(sum(manifest.lengths) for _, _, manifest in manifests)
    console.print(
        f"{tokens:,} tokens: {needed / 1e9:.2f} GB to write, {free / 1e9:.1f} GB free in {root}", markup=False
    )
    if needed > free and not yes:
        raise DiskError(
            f"{needed / 1e9:.2f} GB do not fit into {free / 1e9:.2f} GB",
            cause="hidden states take (layers + 1) * hidden size * 2 bytes a token",
            next_step="choose another folder ([run] folder), fewer samples or layers, or go on with --yes",
        )


def _open(samples: list[TokenSample], path: Path, manifest: Manifest, console: Console) -> Split:
    writer = StoreWriter(path, manifest)
    todo, findings = writer.missing()
    for finding in findings:
        console.print(f"{path.name}: {finding}; it is extracted again", markup=False)
    return Split(samples=samples, writer=writer, todo=todo)


def _log(recipe: Recipe) -> Path:
    return recipe.folder.root / "extract.log"


def _run(recipe: Recipe, engine: Engine, splits: Sequence[Split], console: Console) -> None:
    """Extracts every shard that is to be done; after each, the rates are on the disk too."""
    prefill_tokens, prefill_seconds = engine.plain_prefill(splits[0].samples)
    path = recipe.folder.extraction_json
    rates = Rates(
        plain_prefill_tokens=prefill_tokens,
        plain_prefill_tokens_per_second=prefill_tokens / prefill_seconds,
        computed_in=compute.target_dtype(recipe),
    )
    if any(len(split.todo) < split.writer.store.manifest.shards for split in splits):
        rates = rates.gone_on_from(path)
    jobs = [job for number, split in enumerate(splits) for job in split.jobs(number)]
    files = {(job.store, job.number): splits[job.store].writer.store.shard(job.number) for job in jobs}
    damaged = {key: file.stat().st_ino for key, file in files.items() if file.exists()}
    start = asked = time.monotonic()

    def count(done: Iterable[Job]) -> None:
        nonlocal rates, asked
        for job in done:
            now = time.monotonic()
            size = files.pop((job.store, job.number)).stat().st_size
            rates, asked = rates.and_a_shard(job.tokens, now - asked, size), now
            rates.write(path)

    with compute.progress(console) as bar:
        task = bar.add_task("extract", total=sum(job.tokens for job in jobs), rate="")
        computed = 0
        try:
            for tokens, done in engine.extract([split.writer.store.path for split in splits], jobs):
                count(done)
                computed += tokens
                rate = f"{computed / (time.monotonic() - start):,.0f} tokens/s"
                bar.update(task, completed=computed, rate=rate)
        finally:  # of what stops it in the middle, nothing says which shards were finished last
            there = {key: file.stat().st_ino for key, file in files.items() if file.exists()}
            count([job for job in jobs if (key := (job.store, job.number)) in there and there[key] != damaged.get(key)])
    share = rates.tokens_per_second / rates.plain_prefill_tokens_per_second
    console.print(
        f"{rates.tokens:,} tokens at {rates.tokens_per_second:,.0f} tokens/s, {share:.2f} of plain prefill; "
        f"{rates.bytes / 1e9:.2f} GB written"
    )
