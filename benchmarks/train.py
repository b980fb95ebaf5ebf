"""The trainer's rate and memory against those of speculators 0.3.0's, on the same samples in one run.

    python benchmarks/train.py --prepared train.jsonl --out /tmp/bench

Each way runs in a process of its own: draftmill's `train`, from its store; its step alone, on packs that are on the
device already; and the trainer of speculators 0.3.0, which needs a GPU, with its own loader, from files of its own
format. The draft is one layer for the shape of Llama-3.1-8B, with 32,000 draft tokens, packs of 8,192 and three TTT
steps; states are random, token ids, lengths and masks are those of prepared conversations. Prints a table, and writes
it to table.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftmill.recipe import Recipe

WAYS = ("ours", "resident", "speculators")
WARM = 6  # steps that compile and warm up, and are left out of the rate
VOCABULARY = 49152  # SmolLM2's, whose tokenizer the prepared conversations have
SHAPES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
}
RECIPE = """
[run]
name = "bench"
folder = "{out}"
[target]
path = "{out}/target"
[data]
sources = [{{ format = "tokens", path = "unused" }}]
held_out = 0.0
[train]
steps = {steps}
pack_tokens = {pack}
draft_vocab_size = {vocabulary}
checkpoint_steps = 100000
[evaluate]
prompts = [{{ name = "unused", format = "messages", path = "unused" }}]
"""


def make(at: argparse.Namespace) -> None:
    """The target's folder (its configuration, embedding and head), the store, and speculators' files."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from draftmill.layers import LayerContract
    from draftmill.store import Manifest, Sample, StoreWriter
    from draftmill.target import identify
    from draftmill.tokens import read_samples

    torch.manual_seed(0)
    target, files = at.out / "target", at.out / "files"
    target.mkdir(parents=True, exist_ok=True)
    files.mkdir(exist_ok=True)
    config = LlamaConfig(
        **SHAPES[at.shape], num_hidden_layers=32, vocab_size=VOCABULARY, max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"], eos_token_id=2,
    )  # fmt: skip
    config.save_pretrained(target)
    width = config.hidden_size
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({name: torch.randn(VOCABULARY, width).bfloat16() * 0.02 for name in names}, target / "model.safetensors")
    prepared = list(itertools.islice(read_samples(at.prepared), at.samples))
    layers = LayerContract.of([2, 16, 29], 32)
    manifest = Manifest(
        target=identify(target),
        tokenizer_digest="none",
        layers=layers,
        computed_in="bfloat16",
        dataset_digest="random",
        lengths=tuple(len(sample.input_ids) for sample in prepared),
        shard_samples=64,
        stack={},
        recipe={},
    )
    writer = StoreWriter(recipe(at, 1).folder.store_train, manifest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in range(manifest.shards):
        samples = []
        for index in manifest.samples_of(number):
            ids, mask = torch.tensor(prepared[index].input_ids), torch.tensor(prepared[index].loss_mask)
            states = torch.randn(4, len(ids), width, dtype=torch.bfloat16, device=device).cpu()
            *hidden, last = states
            sample = Sample(
                input_ids=ids,
                loss_mask=mask.bool(),
                hidden_states=dict(zip(layers.ids, hidden, strict=True)),
                last_hidden_state=last,
            )
            samples.append(sample)
            theirs = {"input_ids": ids, "loss_mask": mask, "hidden_states": [*hidden, last]}
            torch.save({k: [*map(torch.clone, v)] if isinstance(v, list) else v for k, v in theirs.items()},
                       files / f"data_{index}.pt")  # fmt: skip
        writer.write(number, samples)
    writer.close()


def recipe(at: argparse.Namespace, steps: int) -> Recipe:
    from draftmill.recipe import Recipe

    return Recipe.parse(
        RECIPE.format(out=at.out, steps=steps, pack=at.pack, vocabulary=at.vocabulary), name="benchmark"
    )


def ours(at: argparse.Namespace) -> dict[str, Any]:
    """One epoch of `draftmill.train`, as its metrics tell it."""
    from library import opened

    from draftmill.train import order, train

    samples, _, _ = opened(recipe(at, 1))
    steps = len(order.packs(order.shuffled(samples.usable, seed=0, epoch=0), samples.rows, at.pack))
    whole = recipe(at, steps)
    train(whole)
    lines = [json.loads(line) for line in whole.folder.metrics_jsonl.read_text(encoding="utf-8").splitlines()]
    rated = lines[WARM:]
    return {
        "tokens": sum(line["tokens"] for line in rated),
        "supervised": sum(line["supervised"] for line in rated),
        "seconds": rated[-1]["seconds"] - lines[WARM - 1]["seconds"],
        "slowest": max(line["tokens"] / line["tokens_per_second"] for line in rated),
        "first": lines[WARM - 1]["seconds"],
        "loss": lines[-1]["loss"],
    }


def resident(at: argparse.Namespace) -> dict[str, Any]:
    """The step alone: the epoch's packs are on the device before the first."""
    import contextlib

    import torch
    from library import opened

    from draftmill.train import draft, loop, order
    from draftmill.train.feed import batches

    of = recipe(at, 10_000)
    samples, config, chosen = opened(of)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = loop.Run(
        recipe=of, model=draft.build(of, config, samples.contract, chosen), train=samples, held_out=None, head=None,
        identity={}, device=device,
    )  # fmt: skip
    packs = order.stream(samples.usable, samples.rows, budget=at.pack, seed=0, start=order.Position())
    with contextlib.closing(batches(packs, samples, steps=3, room=at.pack, device=device)) as feed:
        first = [next(feed) for _ in range(at.resident)]
    held = itertools.cycle(first)
    begun = time.monotonic()
    for _ in range(WARM):
        loop.step(state, held)
    start = time.monotonic()
    lines = [loop.step(state, held) for _ in range(2 * at.resident)]
    found = {
        "tokens": sum(line["tokens"] for line in lines),
        "supervised": sum(line["supervised"] for line in lines),
        "seconds": time.monotonic() - start,
        "slowest": max(line["tokens"] / line["tokens_per_second"] for line in lines),
        "first": start - begun,
    }
    if at.profile:
        with torch.profiler.profile() as profile:
            loop.step(state, held)
        of_kernels = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
        (at.out / "profile.txt").write_text(of_kernels, encoding="utf-8")
    return found


def speculators(at: argparse.Namespace) -> dict[str, Any]:
    """One epoch of speculators 0.3.0's trainer, with the loader that its own script makes."""
    from library import begin, opened

    from draftmill.train import draft

    of = recipe(at, 1)
    samples, config, chosen = opened(of)
    settings = draft.draft_config(of, config, samples.contract, at.vocabulary)
    files = [at.out / "files" / f"data_{index}.pt" for index in samples.usable]
    training, taken = begin(settings, chosen, files, pack=at.pack, saved=at.out / "saved")
    begun = time.monotonic()
    training.train_epoch(0)
    rated = taken[WARM:]
    return {
        "tokens": sum(tokens for _, tokens, _ in rated),
        "supervised": sum(supervised for _, _, supervised in rated),
        "seconds": taken[-1][0] - taken[WARM - 1][0],
        "slowest": max(b[0] - a[0] for a, b in itertools.pairwise(taken[WARM - 1 :])),
        "first": taken[WARM - 1][0] - begun,
    }


def run(way: str, at: argparse.Namespace) -> None:
    """One way in this process; its result goes to a file."""
    import torch

    found = globals()[way](at)
    found["peak"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    (at.out / f"{way}.json").write_text(json.dumps(found), encoding="utf-8")


def table(out: Path) -> str:
    rows = [
        "| way | tokens/s | supervised tokens/s | slowest step, s | first steps, s | peak, GB |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        if (out / f"{way}.json").exists():
            f = json.loads((out / f"{way}.json").read_text(encoding="utf-8"))
            rates = f"{f['tokens'] / f['seconds']:,.0f} | {f['supervised'] / f['seconds']:,.0f}"
            rows.append(f"| {way} | {rates} | {f['slowest']:.2f} | {f['first']:.0f} | {f['peak'] / 1e9:.1f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for everything")
    parser.add_argument("--prepared", type=Path, required=True, help="a run's prepared/train.jsonl")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--pack", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32000, help="of the draft")
    parser.add_argument("--resident", type=int, default=8, help="packs on the device at once, for the step alone")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--speculators", type=Path, help="a folder with the package to measure; 0.3.0, made here")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # this process is one way
    at = parser.parse_args()
    if at.only:
        run(at.only, at)
        return
    from library import environment

    if not (at.out / "target").exists():
        make(at)
    for way in at.ways.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
        there = environment(at.speculators, at.out) if way == "speculators" else None
        done = subprocess.run(command, env=there, check=False)
        if done.returncode:
            sys.stdout.write(f"{way} failed\n")
    (at.out / "table.md").write_text(table(at.out), encoding="utf-8")
    sys.stdout.write(table(at.out))


if __name__ == "__main__":
    main()
