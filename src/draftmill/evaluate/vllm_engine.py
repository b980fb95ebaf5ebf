"""vLLM's own speculative decoding, and vLLM without a draft: what the draft is worth where it is served."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftmill.compute import has_cuda, set_up_vllm
from draftmill.errors import StackError
from draftmill.evaluate.results import Counts, Decoded

PREFIX = "vllm:spec_decode_num_"
_FEWEST = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What vLLM is started with. `max_model_len` bounds prompt, new and drafted tokens together."""

    target: Path
    draft: Path
    dtype: str
    draft_tokens: int
    max_new_tokens: int
    stop: tuple[int, ...]
    batch: int
    concurrency: tuple[int, ...]
    max_model_len: int
    tensor_parallel: int
    gpu_memory_utilization: float
    trust_remote_code: bool
    seed: int


class VllmEngine:
    """One vLLM at a time: with the draft or without it. Changing from one to the other starts it anew."""

    name: Literal["reference", "vllm"] = "vllm"

    def __init__(self, settings: Settings) -> None:
        """Raises:
        StackError: this platform has no speculative decoding."""
        if not has_cuda():
            raise StackError(
                "vLLM has no speculative decoding on this platform",
                cause='vLLM runs it on GPUs only ("spec decode is not supported" on the CPU)',
                next_step='set [evaluate] engine = "reference", or "auto" to take what the platform has',
            )
        self.settings = settings
        self.dtype = settings.dtype
        self.llm: Any = None
        self.drafting: bool | None = None

    @property
    def version(self) -> str:
        import vllm

        return f"vllm {vllm.__version__}"

    @property
    def device(self) -> str:
        import torch

        return torch.cuda.get_device_name()

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        tick: Callable[[int], None],
        *,
        drafting: bool,
        at_once: int | None = None,
    ) -> Decoded:
        """Greedy outputs; with a draft, counts a prompt and vLLM's own counters for all of them.

        At most `at_once` requests are in flight; None is the settings' `batch`.

        The engine is stepped by hand, since a request's tokens in one step are its accepted ones and one more: that
        gives counts a prompt, which vLLM's counters do not have. vLLM counts before it cuts an output at its end, so
        those of a prompt can lack what its last step accepted past the end; the counters, `totals`, do not.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._start(drafting).llm_engine
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.settings.max_new_tokens,
            stop_token_ids=list(self.settings.stop),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        before = self._counters()
        steps: list[list[list[int]]] = [[] for _ in prompts]
        waiting = list(enumerate(prompts))[::-1]
        started = time.perf_counter()
        in_flight = 0
        while waiting or in_flight:
            while waiting and in_flight < (at_once or self.settings.batch):
                index, prompt = waiting.pop()
                engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
                in_flight += 1
            for request in engine.step():
                steps[int(request.request_id)].append(list(request.outputs[0].token_ids))
                in_flight -= request.finished
                tick(int(request.finished))
        seconds = time.perf_counter() - started
        outputs = [[token for step in answer for token in step] for answer in steps]
        if not drafting:
            return Decoded(outputs=outputs, seconds=seconds, counts=[])
        totals = Counts(
            drafts=self._counters()[0] - before[0],
            accepted=tuple(b - a for a, b in zip(before[1], self._counters()[1], strict=True)),
        )
        counts = [count(answer, self.settings.draft_tokens) for answer in steps]
        return Decoded(outputs=outputs, seconds=seconds, counts=counts, totals=totals)

    def rates(self, prompts: Sequence[Sequence[int]], *, drafting: bool) -> list[float]:
        """Output tokens a second with each of `concurrency` requests in flight; vLLM may have the prompts in its cache.

        On the first prompts, twice as many as are in flight and eight at least: at one request all of them would take
        many times as long as everything else.
        """
        found = []
        for at_once in self.settings.concurrency:
            decoded = self.decode(_some(prompts, at_once), lambda _: None, drafting=drafting, at_once=at_once)
            found.append(decoded.tokens / decoded.seconds)
        return found

    def gap(self, token_ids: Sequence[int]) -> float:
        """The best logit less the second best, for the token after `token_ids`."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, detokenize=False)
        answer = self._start(False).generate({"prompt_token_ids": list(token_ids)}, params, use_tqdm=False)[0]
        first, second = sorted((p.logprob for p in answer.outputs[0].logprobs[0].values()), reverse=True)[:2]
        return float(first - second)

    def close(self) -> None:
        """Ends vLLM and gives the device's memory back."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm, self.drafting = None, None
            gc.collect()

    def _start(self, drafting: bool) -> Any:
        if self.drafting == drafting:
            return self.llm
        self.close()
        set_up_vllm(self.settings.tensor_parallel)
        from vllm import LLM, SamplingParams

        s = self.settings
        draft = {"method": "eagle3", "model": str(s.draft), "num_speculative_tokens": s.draft_tokens}
        try:
            self.llm = LLM(
                model=str(s.target),
                dtype=s.dtype,
                max_model_len=s.max_model_len,
                max_num_seqs=max((s.batch, *s.concurrency)),
                tensor_parallel_size=s.tensor_parallel,
                gpu_memory_utilization=s.gpu_memory_utilization,
                trust_remote_code=s.trust_remote_code,
                seed=s.seed,
                disable_log_stats=False,
                speculative_config=draft if drafting else None,
            )
            # The first request compiles what is left to compile; it is not part of what is timed.
            self.llm.generate(
                {"prompt_token_ids": [0] * 8}, SamplingParams(max_tokens=8, detokenize=False), use_tqdm=False
            )
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            raise StackError(
                f"vLLM does not start {'with the draft' if drafting else 'the target'}: {error}",
                cause="too little free memory on the device, or a target that vLLM does not serve with eagle3",
                next_step='look at the lines above, or set [evaluate] engine = "reference"',
            ) from error
        self.drafting = drafting
        return self.llm

    def _counters(self) -> tuple[int, list[int]]:
        found = {m.name.removeprefix(PREFIX): m for m in self.llm.get_metrics() if m.name.startswith(PREFIX)}
        if not found:
            return 0, []
        return int(found["drafts"].value), [int(v) for v in found["accepted_tokens_per_pos"].values]


def _some(prompts: Sequence[Sequence[int]], at_once: int) -> list[Sequence[int]]:
    """What a rate is measured on; where there are too few prompts to keep so many in flight, some come again."""
    wanted = max(2 * at_once, _FEWEST)
    return list(itertools.islice(itertools.cycle(prompts), wanted))


def count(steps: Sequence[Sequence[int]], draft_tokens: int) -> Counts:
    """Counts of one answer from the tokens of each of its steps; the first read the prompt and verified nothing."""
    accepted = [len(step) - 1 for step in steps[1:] if step]
    return Counts(drafts=len(accepted), accepted=tuple(sum(a > j for a in accepted) for j in range(draft_tokens)))
