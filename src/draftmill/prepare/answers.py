"""Answers by the target itself, through vLLM: the draft has to learn what this target says.

What is answered is kept in a file, a batch at a time, so that a stopped run goes on where it was.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from draftmill import compute, target
from draftmill.errors import StackError
from draftmill.files import disk_errors, write_whole
from draftmill.prepare.conversations import Conversation
from draftmill.prepare.masks import Encoder, TemplateError
from draftmill.recipe import Recipe
from draftmill.tokens import TokenSample, parse


@dataclass
class _Talk:
    """A conversation that is being answered."""

    conversation: Conversation
    messages: list[dict[str, str]]
    waiting: list[dict[str, str]]  # the user's turns still to be answered
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)


def regenerate(
    recipe: Recipe, encoder: Encoder, conversations: Sequence[Conversation], file: Path
) -> tuple[dict[str, TokenSample], float]:
    """Answers every conversation's user turns, greedily or at the recipe's temperature.

    Args:
        file: what is answered already, and where the rest goes.

    Returns:
        The samples by their conversation's digest, and the rate in generated tokens/s (0 where nothing was left to do).

    Raises:
        StackError: vLLM is missing or does not start.
    """
    done = _resume(file, _settings(recipe, encoder))
    todo = [c for c in conversations if c.digest not in done]
    if not todo:
        return done, 0.0
    log = file.with_name("regenerate.log")
    with compute.engine_output_to(log) as user:
        user.print(f"starting vLLM to answer {len(todo)} conversations ({log} has its output)", markup=False)
        engine = _start(recipe, log)
        rate = _answer_all(recipe, engine, encoder, todo, done, file, user)
    return done, rate


def _settings(recipe: Recipe, encoder: Encoder) -> str:
    """A digest of what the answers depend on, besides the conversation."""
    wanted = recipe.data.regenerate.model_dump(exclude={"batch"})
    parts = [
        wanted,
        recipe.data.max_length,
        recipe.run.seed,
        compute.target_dtype(recipe),
        encoder.tokenizer.chat_template,
    ]
    parts.append(target.fingerprint(recipe.target_folder))
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _resume(file: Path, settings: str) -> dict[str, TokenSample]:
    """Reads the answers of an earlier run with the same settings; a last line that was cut off is taken away."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if not lines or lines[0].decode(errors="replace").strip() != settings:
        write_whole(file, f"{settings}\n".encode())
        return {}
    done = {}
    whole = lines[0]
    for line in lines[1:]:
        try:
            sample = parse(json.loads(line), None, "")
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        done[sample.id] = sample
        whole += line
    write_whole(file, whole)
    return done


def _start(recipe: Recipe, log: Path) -> Any:
    compute.set_up_vllm()
    try:
        from vllm import LLM
    except ImportError as error:
        raise StackError(f"vLLM is not installed: {error}", next_step="run ./just setup") from error
    try:
        return LLM(
            model=str(recipe.target_folder),
            dtype=compute.target_dtype(recipe),
            max_model_len=recipe.data.max_length,
            max_num_seqs=recipe.data.regenerate.batch,
            gpu_memory_utilization=recipe.extract.gpu_memory_utilization,
            tensor_parallel_size=recipe.extract.tensor_parallel,
            trust_remote_code=recipe.target.trust_remote_code,
            enforce_eager=not compute.has_cuda(),  # compiling needs a compiler, which a CPU machine may not have
            seed=recipe.run.seed,
        )
    except Exception as error:  # what fails in the engine's process reaches us as a bare Exception
        raise StackError(
            f"vLLM does not start on {recipe.target_folder}: {compute.last_error(log) or error}",
            cause="too little memory, a model that this vLLM does not support, or damaged weights",
            next_step=f"read the end of {log}",
        ) from error


def _answer_all(
    recipe: Recipe,
    engine: Any,
    encoder: Encoder,
    todo: Sequence[Conversation],
    done: dict[str, TokenSample],
    file: Path,
    console: Console,
) -> float:
    batch = recipe.data.regenerate.batch
    generated, start = 0, time.monotonic()
    with compute.progress(console) as bar, disk_errors(file), file.open("a", encoding="utf-8") as output:
        task = bar.add_task("answer", total=len(todo), rate="")
        for first in range(0, len(todo), batch):
            for sample in _answer(recipe, engine, encoder, todo[first : first + batch]):
                output.write(sample.line())
                done[sample.id] = sample
                generated += sum(sample.loss_mask)
            output.flush()
            os.fsync(output.fileno())
            rate = generated / (time.monotonic() - start)
            bar.update(task, completed=min(first + batch, len(todo)), rate=f"{rate:,.0f} tokens/s")
    return generated / (time.monotonic() - start)


def _answer(recipe: Recipe, engine: Any, encoder: Encoder, conversations: Sequence[Conversation]) -> list[TokenSample]:
    """Answers one batch, a turn at a time for all of it."""
    from vllm import SamplingParams

    wanted = recipe.data.regenerate
    talks = [_begin(c) for c in conversations]
    for _ in range(wanted.turns):
        prompts = [(talk, prompt) for talk in talks if (prompt := _next_prompt(talk, encoder, recipe))]
        if not prompts:
            break
        params = [
            SamplingParams(
                temperature=wanted.temperature,
                max_tokens=min(wanted.max_new_tokens, recipe.data.max_length - len(prompt)),
                seed=recipe.run.seed if wanted.temperature else None,
            )
            for _, prompt in prompts
        ]
        inputs = [{"prompt_token_ids": prompt} for _, prompt in prompts]
        for (talk, prompt), output in zip(prompts, engine.generate(inputs, params, use_tqdm=False), strict=True):
            answer = list(output.outputs[0].token_ids)
            _add(talk, prompt, answer, encoder)
    return [
        TokenSample(id=talk.conversation.digest, input_ids=talk.input_ids, loss_mask=talk.loss_mask)
        for talk in talks
        if any(talk.loss_mask)
    ]


def _begin(conversation: Conversation) -> _Talk:
    messages = conversation.messages()
    system = [m for m in messages if m["role"] == "system"]
    return _Talk(conversation=conversation, messages=system, waiting=[m for m in messages if m["role"] == "user"])


def _next_prompt(talk: _Talk, encoder: Encoder, recipe: Recipe) -> list[int]:
    """The ids of the next question; empty where there is none, or no room for an answer."""
    if not talk.waiting:
        return []
    talk.messages.append(talk.waiting.pop(0))
    try:
        prompt = encoder.prompt(talk.messages)
    except TemplateError:
        prompt = []
    # The template may have changed an earlier answer; then what was said so far is the sample.
    known = talk.input_ids
    fits = len(prompt) < recipe.data.max_length and prompt[: len(known)] == known
    if not fits:
        talk.waiting.clear()
    return prompt if fits else []


def _add(talk: _Talk, prompt: list[int], answer: list[int], encoder: Encoder) -> None:
    """Adds an answer as it was generated: an end marker only where the target ended by itself."""
    talk.loss_mask += [0] * (len(prompt) - len(talk.loss_mask)) + [1] * len(answer)
    talk.input_ids = prompt + answer
    text = encoder.tokenizer.decode(answer, skip_special_tokens=True)
    talk.messages.append({"role": "assistant", "content": text})
