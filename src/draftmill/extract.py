"""Hidden states of the target, extracted with vLLM and kept in a store.

The patched speculators drives the engine. One call extracts a fixed run of samples, which the lengths alone decide, so
that a store which was written in ten attempts is the same as one written in one.
"""

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftmill import compute, target
from draftmill.errors import DataError, DiskError, Interrupted, StackError
from draftmill.files import write_whole
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Manifest, Sample, StoreWriter
from draftmill.tokens import TokenSample, read_samples

CALL_TOKENS = 65_536  # what one call of the engine may hold in host memory
MARGIN = 1.02  # safetensors' headers and the file system's blocks
PREFILL_SECONDS = 10  # how long plain prefill is measured, about
PREFILL_PROBE_TOKENS = 1_024  # what tells how many tokens that is


@dataclass(frozen=True, kw_only=True)
class Split:
    """One of the two stores of a run, and what is to be done for it."""

    samples: list[TokenSample]
    writer: StoreWriter
    todo: list[int]

    @property
    def tokens(self) -> int:
        return sum(len(self.samples[i].input_ids) for n in self.todo for i in self.writer.store.manifest.samples_of(n))


def extract(recipe: Recipe, *, yes: bool = False) -> None:
    """Writes the stores of the run's training and held-out samples, or what is missing or damaged in them.

    Args:
        yes: go on though the disk looks too small.

    Raises:
        DataError: the samples do not fit the target.
        DiskError: the disk is, or would be, full.
        StoreError: the stores are another run's.
        Interrupted: Ctrl-C or SIGTERM; the shard that was in the making is dropped.
        StackError: the engine does not start or fails, or speculators is not the patched one.
    """
    console = Console(soft_wrap=True)
    config = target.read_config(recipe.target_folder)
    contract = LayerContract.of(recipe.extract.layers, config["num_hidden_layers"])
    folder = recipe.folder
    pairs = [(folder.prepared / f"{path.name}.jsonl", path) for path in (folder.store_train, folder.store_held_out)]
    read = [(_read(source, config, _limit(config, recipe)), source, path) for source, path in pairs]
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
            engine = _start(recipe, contract, _limit(config, recipe))
            stack.callback(engine.executor.shutdown)
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


def _limit(config: dict[str, Any], recipe: Recipe) -> int:
    """The tokens that a sample may have: the target's limit, or the recipe's where that is smaller."""
    limit = config.get("max_position_embeddings", recipe.data.max_length)
    return min(int(limit), recipe.data.max_length)


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
        there = sum(file.stat().st_size for file in path.glob("shard-*"))
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


def _start(recipe: Recipe, contract: LayerContract, limit: int) -> Any:
    """Starts the engine.

    Raises:
        StackError: vLLM or speculators is missing or unpatched, or the engine does not start.
    """
    compute.set_up_vllm(recipe.extract.tensor_parallel)
    # A forked worker holds the pipe whose end tells it that we have died, and the store's lock: it would keep both.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    try:
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator as Generator
    except ImportError as error:
        raise StackError(f"the stack is not installed: {error}", next_step="run ./just setup") from error
    if "max_num_batched_tokens" not in inspect.signature(Generator).parameters:
        raise StackError(
            "speculators is installed without draftmill's patches",
            cause="another installation replaced it",
            next_step="run ./just setup, or `draftmill patches build` and install that wheel",
        )
    logging.getLogger("speculators").setLevel(logging.WARNING)
    with _engine_errors(recipe):
        return Generator(
            str(recipe.target_folder),
            layer_ids=list(contract.ids),
            max_model_len=limit,
            gpu_memory_utilization=recipe.extract.gpu_memory_utilization,
            tensor_parallel_size=recipe.extract.tensor_parallel,
            max_num_batched_tokens=recipe.extract.max_num_batched_tokens,
            max_num_seqs=recipe.extract.max_num_seqs,
            dtype=compute.target_dtype(recipe),
        )


@contextlib.contextmanager
def _engine_errors(recipe: Recipe) -> Iterator[None]:
    """Turns what the engine raises into a StackError.

    It has no class of its own for that: what fails in a worker reaches us as a bare Exception or RuntimeError.
    """
    try:
        yield
    except Exception as error:
        log = _log(recipe)
        raise StackError(
            f"vLLM failed on {recipe.target_folder}: {compute.last_error(log) or error}",
            cause="too little memory, a model that this vLLM does not support, or damaged weights",
            next_step=f"read the end of {log}; what was extracted is kept, and the same command goes on from there",
        ) from error


def _run(recipe: Recipe, engine: Any, splits: Sequence[Split], console: Console) -> None:
    """Extracts every shard that is to be done, and writes the rates."""
    with _engine_errors(recipe):
        prefill_tokens, prefill_seconds = _plain_prefill(engine, splits[0].samples)
    prefill = prefill_tokens / prefill_seconds
    total = sum(split.tokens for split in splits)
    done, seconds, written = 0, 0.0, 0
    with compute.progress(console) as bar:
        task = bar.add_task("extract", total=total, rate="")
        for split in splits:
            for number in split.todo:
                indices = split.writer.store.manifest.samples_of(number)
                start = time.monotonic()
                with _engine_errors(recipe):
                    results = [s for call in calls([split.samples[i] for i in indices]) for s in _call(engine, call)]
                split.writer.write(number, results)
                seconds += time.monotonic() - start
                done += sum(len(sample.input_ids) for sample in results)
                written += split.writer.store.shard(number).stat().st_size
                bar.update(task, completed=done, rate=f"{done / seconds:,.0f} tokens/s")
    rates = {
        "tokens": done,
        "seconds": seconds,
        "tokens_per_second": done / seconds,
        "bytes": written,
        "plain_prefill_tokens_per_second": prefill,
        "plain_prefill_tokens": prefill_tokens,
        "computed_in": compute.target_dtype(recipe),
    }
    write_whole(recipe.folder.extraction_json, (json.dumps(rates, indent=1) + "\n").encode())
    console.print(
        f"{done:,} tokens at {done / seconds:,.0f} tokens/s, {done / seconds / prefill:.2f} of plain prefill; "
        f"{written / 1e9:.2f} GB written"
    )


def calls(samples: Sequence[TokenSample], limit: int = CALL_TOKENS) -> Iterator[list[TokenSample]]:
    """Cuts a shard's samples, in their order, into runs of at most `limit` tokens (or one sample)."""
    run: list[TokenSample] = []
    tokens = 0
    for sample in samples:
        if run and tokens + len(sample.input_ids) > limit:
            yield run
            run, tokens = [], 0
        run.append(sample)
        tokens += len(sample.input_ids)
    if run:
        yield run


def _call(engine: Any, samples: Sequence[TokenSample]) -> list[Sample]:
    import torch

    found = engine.generate([sample.input_ids for sample in samples])
    return [
        Sample(
            input_ids=states["input_ids"],
            loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
            hidden_states={
                layer: rows.to(torch.bfloat16)
                for layer, rows in zip(engine.layer_ids, states["hidden_states"], strict=True)
            },
            last_hidden_state=states["last_hidden_state"].to(torch.bfloat16),
        )
        for sample, states in zip(samples, found, strict=True)
    ]


def _plain_prefill(engine: Any, samples: Sequence[TokenSample]) -> tuple[int, float]:
    """Tokens and seconds of prefill alone, by the same engine on the first samples, with nothing captured."""
    engine.executor.collective_rpc(capture_layers, args=((),))
    try:
        probe = next(calls(samples, PREFILL_PROBE_TOKENS))
        _prefill(engine, probe[:1])  # what a first step alone pays is not counted
        tokens, seconds = _prefill(engine, probe)
        return _prefill(engine, next(calls(samples, int(tokens / seconds * PREFILL_SECONDS))))
    finally:
        engine.executor.collective_rpc(capture_layers, args=(tuple(engine.layer_ids),))


def _prefill(engine: Any, samples: Sequence[TokenSample]) -> tuple[int, float]:
    start = time.monotonic()
    for _ in engine._steps(set(engine._submit([sample.input_ids for sample in samples]))):
        pass
    return sum(len(sample.input_ids) for sample in samples), time.monotonic() - start


def capture_layers(worker: Any, ids: tuple[int, ...]) -> None:
    """In a worker: asks the model for the inputs of these layers; of none, and it returns what plain prefill does."""
    worker.model_runner.model.set_aux_hidden_state_layers(ids)
