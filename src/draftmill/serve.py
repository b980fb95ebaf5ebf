"""serve: vLLM's OpenAI server on a run's target, with the run's draft where the platform decodes speculatively."""

import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from draftmill import compute, target
from draftmill.errors import TrainingError
from draftmill.recipe import Recipe

SERVER = "vllm.entrypoints.openai.api_server"


def serve(recipe: Recipe, options: Sequence[str] = ()) -> None:
    """Becomes vLLM's server: this process is replaced, so that signals reach it.

    Args:
        options: handed on to `vllm serve`, after ours.

    Raises:
        TargetError: the target's folder lacks its configuration or its weights.
        TrainingError: there is no draft yet, and this platform would use it.
    """
    words = command(recipe, drafting=compute.has_cuda())
    console = Console(stderr=True, soft_wrap=True)
    if not compute.has_cuda():
        console.print("serving without the draft: vLLM decodes speculatively on GPUs alone")
    compute.set_up_vllm(recipe.extract.tensor_parallel)
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *words, *options])


def command(recipe: Recipe, *, drafting: bool) -> list[str]:
    """The words of the server's command line.

    Raises:
        TargetError, TrainingError: as `serve`.
    """
    target.identify(recipe.target_folder)
    words = ["--model", str(recipe.target_folder), "--served-model-name", recipe.run.name]
    words += ["--dtype", compute.target_dtype(recipe), "--tensor-parallel-size", str(recipe.extract.tensor_parallel)]
    words += ["--gpu-memory-utilization", str(recipe.extract.gpu_memory_utilization)]
    words += ["--trust-remote-code"] * recipe.target.trust_remote_code
    if not drafting:
        return [*words, "--enforce-eager"]  # compiling needs a compiler, which a CPU machine may not have
    draft = recipe.folder.draft
    if not (draft / "config.json").exists():
        raise TrainingError(f"there is no draft in {draft}", next_step="run `draftmill train` first")
    speculative = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": recipe.evaluate.draft_tokens,
    }
    return [*words, "--speculative-config", json.dumps(speculative)]
