"""Run with one or the other speculators on the path: what does its generator give where it is known to go wrong?

    python faults_probe.py TARGET OUT.pt

Writes a dictionary of results by scenario; a scenario that raised has the error's text instead.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

LAYERS = [3, 1, 2]
MAX_MODEL_LEN = 600


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 900, (count, length), generator=generator).tolist()  # type: ignore[no-any-return]


SCENARIOS: dict[str, Callable[[], list[list[int]]]] = {
    "one": lambda: prompts(1, 12, 1),
    "budget edge": lambda: prompts(18, 500, 2),
    "order": lambda: [prompts(1, n, n)[0] for n in (300, 2, 40, 1, 100, 7, 80, 3, 9, 500, 11, 60)],
    "more than 32": lambda: prompts(40, 8, 3),
    "full length": lambda: prompts(1, MAX_MODEL_LEN, 4),
    "too long": lambda: prompts(1, MAX_MODEL_LEN + 1, 5),
    "a shared prefix": lambda: [[*p, q] for p in prompts(1, 64, 6) for q in range(5, 10)],
    "one again": lambda: prompts(1, 12, 1),
}


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    target, out = sys.argv[1:3]
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    engine = VllmHiddenStatesGenerator(target, layer_ids=LAYERS, max_model_len=MAX_MODEL_LEN)
    results: dict[str, Any] = {}
    for name, make in SCENARIOS.items():
        try:
            results[name] = engine.generate(make())
        except Exception as error:  # the scenario's result is that it failed
            results[name] = f"{type(error).__name__}: {error}"
    one_reply = engine.executor.collective_rpc("get_kv_cache_spec", unique_reply_rank=0)
    results["the one reply"] = isinstance(one_reply, dict)
    torch.save(results, out)
    os._exit(0)  # a generator with starved requests hangs in its own shutdown


if __name__ == "__main__":
    main()
