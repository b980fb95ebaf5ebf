"""vLLM, asked for the prefill of samples. Its workers keep the states (`draftmill.extract.worker`); none comes here."""

import bisect
import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill import compute, errors
from draftmill.errors import DraftmillError, StackError
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.tokens import TokenSample

WORKER = "draftmill.extract.worker.ExtractionWorker"
SETTING = "draftmill_layers"  # in vLLM's additional_config, where the worker reads the layer ids
AHEAD = 2  # requests that the engine has, in multiples of those that it runs at a time: it must never lack one
POLL_SECONDS = 0.1  # how often the workers are asked what is finished
PREFILL_SECONDS = 10  # how long plain prefill is measured, about
PREFILL_PROBE_TOKENS = 1_024  # what tells how many tokens that is


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard to extract: its store's number, its own, and its samples with their indices in the store."""

    store: int
    number: int
    samples: Sequence[tuple[int, TokenSample]]

    @property
    def tokens(self) -> int:
        return sum(len(sample.input_ids) for _, sample in self.samples)


class Engine:
    """The target under vLLM, which writes the states that a layer contract names."""

    def __init__(self, recipe: Recipe, contract: LayerContract, limit: int, log: Path, *, eager: bool = True) -> None:
        """Starts vLLM.

        Args:
            limit: tokens that a sample may have.
            log: where the engine's output goes, which is read for what it died of.
            eager: without compiling the model, which takes a minute and made prefill 1 % faster.

        Raises:
            StackError: vLLM is missing, or does not start.
            TargetError: the target's decoder layers are not found.
        """
        self._recipe = recipe
        self._log = log
        self._settings = recipe.extract
        self._running = min(self._settings.max_num_seqs, self._settings.max_num_batched_tokens)
        compute.set_up_vllm(self._settings.tensor_parallel)
        # One process where one device computes: the worker's errors are ours then, and nothing is sent.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # The token that is sampled after a prompt of full length is one more than the target has; it is never computed.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        try:
            from vllm import EngineArgs, LLMEngine
        except ImportError as error:
            raise StackError(f"the stack is not installed: {error}", next_step="run ./just setup") from error
        with self._errors():
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(recipe.target_folder),
                    skip_tokenizer_init=True,
                    worker_cls=WORKER,
                    additional_config={SETTING: list(contract.ids)},
                    max_model_len=limit + 1,
                    gpu_memory_utilization=self._settings.gpu_memory_utilization,
                    tensor_parallel_size=self._settings.tensor_parallel,
                    max_num_batched_tokens=self._settings.max_num_batched_tokens,
                    max_num_seqs=self._running,
                    dtype=compute.target_dtype(recipe),
                    trust_remote_code=recipe.target.trust_remote_code,
                    enable_prefix_caching=False,  # every token has to be computed
                    enforce_eager=eager,
                    disable_log_stats=True,
                )
            )

    def shutdown(self) -> None:
        """Ends the workers, and this process's part in their group: another target may need another."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def extract(self, stores: Sequence[Path], jobs: Iterable[Job]) -> Iterator[tuple[int, list[Job]]]:
        """Extracts shards into stores that have their manifests, in the order of the jobs.

        Yields:
            Tokens that were computed, and the shards that are on the disk, since the last time.

        Raises:
            DiskError: a shard cannot be written. Those that are there are whole.
            StackError: the engine fails.
        """
        with self._errors():
            self._rpc("keep", [str(path) for path in stores])
            begun: dict[tuple[int, int], Job] = {}
            asked, tokens = time.monotonic(), 0
            for computed in self._prefill(self._begin(jobs, begun)):
                tokens += computed
                if time.monotonic() - asked >= POLL_SECONDS:
                    yield tokens, self._finished(begun)
                    asked, tokens = time.monotonic(), 0
            yield tokens, self._finished(begun, wait=True)

    def plain_prefill(self, samples: Sequence[TokenSample]) -> tuple[int, float]:
        """Tokens and seconds of prefill alone, on the first samples, with nothing kept.

        Raises:
            StackError: the engine fails.
        """
        with self._errors():
            self._rpc("keep", [])
            probe = first(samples, PREFILL_PROBE_TOKENS)
            self._timed(probe[:1])  # what a first step alone pays is not counted
            tokens, seconds = self._timed(probe)
            return self._timed(first(samples, int(tokens / seconds * PREFILL_SECONDS)))

    def _timed(self, samples: Sequence[TokenSample]) -> tuple[int, float]:
        start = time.monotonic()
        tokens = sum(self._prefill((str(number), sample.input_ids) for number, sample in enumerate(samples)))
        return tokens, time.monotonic() - start

    def _prefill(self, prompts: Iterable[tuple[str, list[int]]]) -> Iterator[int]:
        """Runs named prompts, the engine full of them; after each step, yields the tokens of those that ended."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        waiting, running = iter(prompts), dict[str, int]()
        while True:
            for name, ids in itertools.islice(waiting, AHEAD * self._running - len(running)):
                self._engine.add_request(name, {"prompt_token_ids": ids}, params)
                running[name] = len(ids)
            if not running:
                return
            yield sum(running.pop(output.request_id) for output in self._engine.step() if output.finished)

    def _begin(self, jobs: Iterable[Job], begun: dict[tuple[int, int], Job]) -> Iterator[tuple[str, list[int]]]:
        """Opens shard after shard, and gives their samples as prompts, by the names that the worker knows them by."""
        for job in jobs:
            begun[job.store, job.number] = job
            samples = [sample for _, sample in job.samples]
            ids, masks = [s.input_ids for s in samples], [s.loss_mask for s in samples]
            self._rpc("open_shard", job.store, job.number, ids, masks)
            yield from ((f"{job.store}:{index}", sample.input_ids) for index, sample in job.samples)

    def _finished(self, begun: dict[tuple[int, int], Job], *, wait: bool = False) -> list[Job]:
        [(done, trouble)] = [answer for answer in self._rpc("finished", wait) if answer is not None]
        if trouble is not None:
            kind, what, cause, next_step = trouble
            raise getattr(errors, kind)(what, cause=cause, next_step=next_step)
        return [begun.pop(key) for key in done]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._engine.collective_rpc(method, args=args))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the engine raises into a StackError.

        It has no class of its own for that: what fails in a worker reaches us as a bare Exception or RuntimeError.
        """
        try:
            yield
        except DraftmillError:
            raise
        except Exception as error:
            raise StackError(
                f"vLLM failed on {self._recipe.target_folder}: {compute.last_error(self._log) or error}",
                cause="too little memory, a model that this vLLM does not support, or damaged weights",
                next_step=f"read the end of {self._log}; what was extracted is kept, and the same command goes on "
                "from there",
            ) from error


def first(samples: Sequence[TokenSample], tokens: int) -> list[TokenSample]:
    """The first samples of at most so many tokens together, and at least one."""
    sums = list(itertools.accumulate(len(sample.input_ids) for sample in samples))
    return list(samples[: max(1, bisect.bisect_right(sums, tokens))])
