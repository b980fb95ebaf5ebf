"""vLLM, driven by the patched speculators: started, asked for hidden states, and for plain prefill to compare with."""

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftmill import compute
from draftmill.errors import StackError
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Sample
from draftmill.tokens import TokenSample

CALL_TOKENS = 65_536  # what one call of the engine may hold in host memory
PREFILL_SECONDS = 10  # how long plain prefill is measured, about
PREFILL_PROBE_TOKENS = 1_024  # what tells how many tokens that is


class Engine:
    """The target under vLLM, which gives the states that a layer contract names."""

    def __init__(self, recipe: Recipe, contract: LayerContract, limit: int, log: Path) -> None:
        """Starts vLLM.

        Args:
            limit: tokens that a sample may have.
            log: where the engine's output goes, which is read for what it died of.

        Raises:
            StackError: vLLM or speculators is missing or unpatched, or the engine does not start.
        """
        self._recipe = recipe
        self._log = log
        compute.set_up_vllm(recipe.extract.tensor_parallel)
        generator = _generator()
        with self._errors():
            self._generator = generator(
                str(recipe.target_folder),
                layer_ids=list(contract.ids),
                max_model_len=limit,
                gpu_memory_utilization=recipe.extract.gpu_memory_utilization,
                tensor_parallel_size=recipe.extract.tensor_parallel,
                max_num_batched_tokens=recipe.extract.max_num_batched_tokens,
                max_num_seqs=recipe.extract.max_num_seqs,
                dtype=compute.target_dtype(recipe),
                trust_remote_code=recipe.target.trust_remote_code,
            )

    def shutdown(self) -> None:
        """Ends the workers."""
        self._generator.executor.shutdown()

    def states(self, samples: Sequence[TokenSample]) -> list[Sample]:
        """The samples with the target's states, in their order.

        Raises:
            StackError: the engine fails.
        """
        with self._errors():
            return [sample for call in calls(samples) for sample in self._call(call)]

    def plain_prefill(self, samples: Sequence[TokenSample]) -> tuple[int, float]:
        """Tokens and seconds of prefill alone, on the first samples, with nothing captured.

        Raises:
            StackError: the engine fails.
        """
        executor = self._generator.executor
        with self._errors():
            executor.collective_rpc(capture_layers, args=((),))
            try:
                probe = next(calls(samples, PREFILL_PROBE_TOKENS))
                self._prefill(probe[:1])  # what a first step alone pays is not counted
                tokens, seconds = self._prefill(probe)
                return self._prefill(next(calls(samples, int(tokens / seconds * PREFILL_SECONDS))))
            finally:
                executor.collective_rpc(capture_layers, args=(tuple(self._generator.layer_ids),))

    def _prefill(self, samples: Sequence[TokenSample]) -> tuple[int, float]:
        start = time.monotonic()
        for _ in self._generator._steps(set(self._generator._submit([sample.input_ids for sample in samples]))):
            pass
        return sum(len(sample.input_ids) for sample in samples), time.monotonic() - start

    def _call(self, samples: Sequence[TokenSample]) -> list[Sample]:
        import torch

        found = self._generator.generate([sample.input_ids for sample in samples])
        return [
            Sample(
                input_ids=states["input_ids"],
                loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
                hidden_states={
                    layer: rows.to(torch.bfloat16)
                    for layer, rows in zip(self._generator.layer_ids, states["hidden_states"], strict=True)
                },
                last_hidden_state=states["last_hidden_state"].to(torch.bfloat16),
            )
            for sample, states in zip(samples, found, strict=True)
        ]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the engine raises into a StackError.

        It has no class of its own for that: what fails in a worker reaches us as a bare Exception or RuntimeError.
        """
        try:
            yield
        except Exception as error:
            raise StackError(
                f"vLLM failed on {self._recipe.target_folder}: {compute.last_error(self._log) or error}",
                cause="too little memory, a model that this vLLM does not support, or damaged weights",
                next_step=f"read the end of {self._log}; what was extracted is kept, and the same command goes on "
                "from there",
            ) from error


def _generator() -> Any:
    try:
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator as Generator
    except ImportError as error:
        raise StackError(f"the stack is not installed: {error}", next_step="run ./just setup") from error
    if "trust_remote_code" not in inspect.signature(Generator).parameters:
        raise StackError(
            "speculators is installed without draftmill's patches, or with earlier ones",
            cause="another installation replaced it",
            next_step="run ./just setup, or `draftmill patches build` and install that wheel",
        )
    logging.getLogger("speculators").setLevel(logging.WARNING)
    return Generator


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


def capture_layers(worker: Any, ids: tuple[int, ...]) -> None:
    """In a worker: asks the model for the inputs of these layers; of none, and it returns what plain prefill does."""
    worker.model_runner.model.set_aux_hidden_state_layers(ids)
