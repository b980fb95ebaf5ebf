"""The worker that vLLM starts for an extraction: vLLM's own, which also keeps what its model computes.

vLLM imports this module by name (`worker_cls`), in the process that computes; nothing else does.
"""

from typing import Any

import torch
from vllm.platforms import current_platform

from draftmill.extract import locate
from draftmill.extract.engine import SETTING
from draftmill.extract.keep import Keeper, Taps
from draftmill.store import state_names

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class ExtractionWorker(Worker):  # type: ignore[misc]
    """One rank of a tensor-parallel group. Every rank has all states; the first keeps them."""

    keeper: Keeper | None = None
    keeping = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; then taps the layers, before anything is compiled."""
        super().load_model(*args, **kwargs)
        if self.rank:
            return
        config = self.vllm_config
        ids = config.additional_config[SETTING]
        count, width = config.model_config.get_total_num_hidden_layers(), config.model_config.get_hidden_size()
        budget = config.scheduler_config.max_num_batched_tokens
        layers = locate.decoder_layers(self.model_runner.get_model(), count)
        buffer = torch.empty(budget, width, dtype=config.model_config.dtype, device=self.model_runner.device)
        taps = Taps(layers, ids, buffer)
        self.keeper = Keeper(taps, state_names(ids), budget, width)

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's; then hands the step's rows on."""
        output = super().execute_model(scheduler_output)
        state = self.model_runner.execute_model_state
        if self.keeper is not None and self.keeping and state is not None:
            batch = self.model_runner.input_batch
            computed, scheduled = batch.num_computed_tokens_cpu, scheduler_output.num_scheduled_tokens
            requests = [(name, int(computed[i]), scheduled[name]) for i, name in enumerate(batch.req_ids)]
            self.keeper.step(state.hidden_states, requests)
        return output

    def keep(self, stores: list[str]) -> None:
        """Begins to keep states, for these stores; of none, the steps are plain prefill."""
        self.keeping = bool(stores)
        if self.keeper is not None and stores:
            self.keeper.stores(stores)

    def open_shard(self, *shard: Any) -> None:
        if self.keeper is not None:
            self.keeper.open(*shard)

    def finished(self, wait: bool = False) -> Any:
        """What `Keeper.finished` says; with `wait`, when all is on the disk. None of the other ranks."""
        if self.keeper is None:
            return None
        if wait:
            self.keeper.drain()
        return self.keeper.finished()
