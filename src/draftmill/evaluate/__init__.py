"""The acceptance length of a draft, by greedy speculative decoding on prompt sets, and that it changes no output.

Two engines: `reference` runs anywhere and is the yardstick, `vllm` is where the draft will be served. Writes
`evaluation.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from draftmill.compute import has_cuda, target_dtype
from draftmill.errors import RecipeError, TargetError
from draftmill.evaluate import prompts as prompt_files
from draftmill.evaluate import results, vllm_engine
from draftmill.evaluate.draft import Draft, DraftConfig
from draftmill.evaluate.prompts import Prompt
from draftmill.evaluate.reference import ReferenceEngine
from draftmill.evaluate.results import Decoded, Difference, Evaluation, Rate, SetResult
from draftmill.evaluate.target import Target
from draftmill.files import sha256, write_whole
from draftmill.target import identify

if TYPE_CHECKING:
    from draftmill.recipe import Recipe

MIN_NEW_TOKENS = 2


class Engine(Protocol):
    """What decodes greedily, with a draft and without. Implemented by `ReferenceEngine` and `VllmEngine`."""

    name: Literal["reference", "vllm"]

    @property
    def version(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    def decode(self, prompts: Sequence[Sequence[int]], tick: Callable[[int], None], *, drafting: bool) -> Decoded: ...
    def rates(self, prompts: Sequence[Sequence[int]], *, drafting: bool) -> list[float]: ...
    def gap(self, token_ids: Sequence[int]) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that an evaluation reads, before anything heavy is loaded."""

    draft: DraftConfig
    draft_digest: str
    target_digest: str
    sets: dict[str, list[Prompt]]
    stop: tuple[int, ...]
    engine: Literal["reference", "vllm"]

    def fingerprint(self, recipe: Recipe) -> str:
        settings = recipe.evaluate.model_dump(exclude={"prompts", "engine"})
        token_ids = {name: [(p.id, p.token_ids) for p in prompts] for name, prompts in self.sets.items()}
        parts = [self.draft_digest, self.target_digest, self.engine, self.stop, recipe.run.seed, settings, token_ids]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def evaluate(recipe: Recipe) -> None:
    """Evaluates the run's draft on the recipe's prompt sets and writes `evaluation.json`; keeps one of the same inputs.

    Raises:
        DataError: a prompt set cannot be read, or a prompt is too long.
        LayerError, TargetError, TrainingError: the draft is missing, incomplete, or not one for this target.
        StackError: the engine asked for does not run here.
    """
    inputs = read(recipe)
    path = recipe.folder.evaluation_json
    fingerprint = inputs.fingerprint(recipe)
    kept = Evaluation.read(path)
    if kept is not None and kept.fingerprint == fingerprint:
        _say(kept, "already evaluated, with the same draft, target, prompts and settings")
        return
    engine = _engine(recipe, inputs)
    try:
        sets = measure(engine, inputs.sets, concurrency=recipe.evaluate.concurrency, seed=recipe.run.seed)
        evaluation = Evaluation(
            fingerprint=fingerprint,
            engine=engine.name,
            engine_version=engine.version,
            dtype=engine.dtype,
            device=engine.device,
            draft_tokens=recipe.evaluate.draft_tokens,
            max_new_tokens=recipe.evaluate.max_new_tokens,
            batch=recipe.evaluate.batch,
            draft=str(recipe.folder.draft),
            draft_digest=inputs.draft_digest,
            target=str(recipe.target_folder),
            target_digest=inputs.target_digest,
            layers=inputs.draft.layers,
            sets=sets,
        )
    finally:
        engine.close()
    write_whole(path, (evaluation.model_dump_json(indent=2) + "\n").encode())
    _say(evaluation, f"wrote {path}")


def read(recipe: Recipe) -> Inputs:
    """Reads draft, target configuration and prompts, and refuses what does not fit together."""
    from transformers import AutoConfig, AutoTokenizer

    if recipe.evaluate.max_new_tokens < MIN_NEW_TOKENS:
        raise RecipeError(
            f"[evaluate] max_new_tokens = {recipe.evaluate.max_new_tokens}: the first token comes without a draft",
            next_step=f"set it to {MIN_NEW_TOKENS} or more",
        )
    folder, trust = recipe.target_folder, recipe.target.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"cannot load the target {folder}: {error}",
            cause="the folder is missing, or lacks config.json or a tokenizer",
            next_step="check [target] path; for a GGUF file run draftmill prepare first",
        ) from error
    draft = DraftConfig.read(recipe.folder.draft, config)
    wanted = recipe.evaluate.engine
    engine = wanted if wanted != "auto" else ("vllm" if has_cuda() else "reference")
    limit = config.max_position_embeddings
    if engine == "reference" and getattr(config, "use_sliding_window", True):
        limit = min(limit, getattr(config, "sliding_window", None) or limit)  # its loop attends to everything
    room = limit - recipe.evaluate.max_new_tokens - recipe.evaluate.draft_tokens
    sets = {
        p.name: prompt_files.load(p, tokenizer, room=room, vocab_size=config.vocab_size)
        for p in recipe.evaluate.prompts
    }
    if len(sets) < len(recipe.evaluate.prompts):
        raise RecipeError("two prompt sets have the same name", next_step="give each its own")
    return Inputs(
        draft=draft,
        draft_digest=digest(recipe.folder.draft),
        target_digest=identify(folder).fingerprint,
        sets=sets,
        stop=stop_tokens(folder, tokenizer),
        engine=engine,
    )


def stop_tokens(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an output: those of the generation config and the tokenizer's, as vLLM takes them.

    Raises:
        TargetError: there is none.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = folder / "generation_config.json"
    if path.exists():
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(named if isinstance(named, list) else [named] if named is not None else [])
    if not found:
        raise TargetError("the target names no end token", next_step="add eos_token_id to its generation_config.json")
    return tuple(sorted(found))


def digest(folder: Path) -> str:
    """sha256 over a draft's configuration and weights, every byte of them."""
    found = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        found.update(f"{path.name} {sha256(path)}\n".encode())
    return found.hexdigest()


def measure(engine: Engine, sets: dict[str, list[Prompt]], *, concurrency: Sequence[int], seed: int) -> list[SetResult]:
    """Decodes every set with the draft, then without it, so that an engine changes over once, and compares."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    decoded: dict[tuple[str, bool], Decoded] = {}
    rates: dict[tuple[str, bool], list[float]] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for drafting in (True, False):
            for name, prompts in sets.items():
                task = progress.add_task(f"{name}, {'with' if drafting else 'without'} draft", total=len(prompts))
                tick = functools.partial(progress.advance, task)
                token_ids = [p.token_ids for p in prompts]
                decoded[name, drafting] = engine.decode(token_ids, tick, drafting=drafting)
                rates[name, drafting] = engine.rates(token_ids, drafting=drafting)
    paired = {name: _rates(concurrency, rates[name, True], rates[name, False]) for name in sets}
    return [
        compare(engine, name, prompts, decoded[name, True], decoded[name, False], seed=seed, rates=paired[name])
        for name, prompts in sets.items()
    ]


def _rates(concurrency: Sequence[int], drafting: Sequence[float], plain: Sequence[float]) -> list[Rate]:
    return [
        Rate(concurrency=at_once, tokens_per_second=a, plain_tokens_per_second=b)
        for at_once, a, b in zip(concurrency, drafting, plain, strict=False)  # the reference loop measures none
    ]


def compare(
    engine: Engine,
    name: str,
    prompts: Sequence[Prompt],
    found: Decoded,
    expected: Decoded,
    *,
    seed: int,
    rates: Sequence[Rate] = (),
) -> SetResult:
    """One set's figures. `found` was decoded with the draft, `expected` by the target alone."""
    totals = found.totals or results.total(found.counts)
    length = results.acceptance_length(totals)
    differences = [
        _difference(engine, prompts[index], position, expected.outputs[index], found.outputs[index])
        for index, position in results.differing(expected.outputs, found.outputs)
    ]
    return SetResult(
        name=name,
        prompts=len(prompts),
        prompt_tokens=sum(len(p.token_ids) for p in prompts),
        tokens=found.tokens,
        drafts=totals.drafts,
        accepted=sum(totals.accepted),
        acceptance_length=length,
        interval=results.interval(found.counts, centre=length, seed=seed),
        acceptance_per_position=[a / totals.drafts for a in totals.accepted],
        equal=len(prompts) - len(differences),
        first_difference=differences[0] if differences else None,
        largest_gap=max((d.top2_gap for d in differences), default=None),
        seconds=found.seconds,
        tokens_per_second=found.tokens / found.seconds,
        plain_seconds=expected.seconds,
        plain_tokens_per_second=expected.tokens / expected.seconds,
        rates=list(rates),
    )


def _difference(
    engine: Engine, prompt: Prompt, position: int, expected: Sequence[int], found: Sequence[int]
) -> Difference:
    return Difference(
        prompt=prompt.id,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
        top2_gap=engine.gap([*prompt.token_ids, *expected[:position]]),
    )


def _engine(recipe: Recipe, inputs: Inputs) -> Engine:
    e = recipe.evaluate
    if inputs.engine == "reference":
        target = Target(recipe.target_folder, trust_remote_code=recipe.target.trust_remote_code)
        draft = Draft(recipe.folder.draft, inputs.draft, target.model, draft_tokens=e.draft_tokens)
        return ReferenceEngine(target, draft, batch=e.batch, max_new_tokens=e.max_new_tokens, stop=inputs.stop)
    longest = max(len(p.token_ids) for prompts in inputs.sets.values() for p in prompts)
    return vllm_engine.VllmEngine(
        vllm_engine.Settings(
            target=recipe.target_folder,
            draft=recipe.folder.draft,
            dtype=target_dtype(recipe),
            draft_tokens=e.draft_tokens,
            max_new_tokens=e.max_new_tokens,
            stop=inputs.stop,
            batch=e.batch,
            concurrency=tuple(e.concurrency),
            max_model_len=longest + e.max_new_tokens + e.draft_tokens,
            tensor_parallel=recipe.extract.tensor_parallel,
            gpu_memory_utilization=recipe.extract.gpu_memory_utilization,
            trust_remote_code=recipe.target.trust_remote_code,
            seed=recipe.run.seed,
        )
    )


def _say(evaluation: Evaluation, end: str) -> None:
    """Prints what was measured, a line a set."""
    for s in evaluation.sets:
        low, high = s.interval.low, s.interval.high
        equal = "all outputs" if s.equal == s.prompts else f"only {s.equal} of {s.prompts} outputs"
        rates = f"{s.tokens_per_second:.0f} tokens/s with the draft, {s.plain_tokens_per_second:.0f} without"
        sys.stdout.write(
            f"{s.name}: acceptance length {s.acceptance_length:.2f} ({s.interval.level:.0%} interval {low:.2f} to "
            f"{high:.2f}), {s.prompts} prompts, {evaluation.draft_tokens} draft tokens; {equal} equal to the target's "
            f"own; {rates} ({evaluation.engine} engine)\n"
        )
        for r in s.rates:
            sys.stdout.write(
                f"{s.name}: {r.concurrency} at a time, {r.tokens_per_second:.0f} tokens/s with the draft, "
                f"{r.plain_tokens_per_second:.0f} without ({r.tokens_per_second / r.plain_tokens_per_second:.2f})\n"
            )
        if d := s.first_difference:
            sys.stdout.write(
                f"{s.name}: the first difference is in prompt {d.prompt} at token {d.position}: {d.found} for "
                f"{d.expected}, where the target's two best logits are {d.top2_gap:.3g} apart; in all that differ at "
                f"most {s.largest_gap:.3g}\n"
            )
    sys.stdout.write(f"{end}\n")
