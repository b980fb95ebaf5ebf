"""Hidden states as draftmill extracts them, and as Hugging Face's model computes them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.extract.engine import Engine, Job
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.store import Manifest, Sample, StoreWriter
from draftmill.target import TargetIdentity, identify, read_config
from draftmill.tokens import TokenSample

SHARD = 7  # samples of a shard, so that there are several, and they end anywhere
Prompt = list[int]
States = dict[int | str, Tensor]  # by layer id, and "last"
RECIPE = """
[run]
name = "run"
folder = "{folder}"
[target]
path = "{target}"
dtype = "{dtype}"
[data]
sources = [{{ format = "tokens", path = "unused" }}]
[extract]
{settings}
[evaluate]
prompts = [{{ name = "unused", format = "messages", path = "unused" }}]
"""


def prompts(lengths: Sequence[int], seed: int, vocabulary: int) -> list[Prompt]:
    chosen = random.Random(seed)
    return [[chosen.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def write_store(path: Path, target: Path, samples: Sequence[Sample], layers: LayerContract) -> None:
    """A store of made-up samples, in shards of eight."""
    manifest = Manifest(
        target=identify(target), tokenizer_digest="none", layers=layers, computed_in="float32",
        dataset_digest="synthetic", lengths=tuple(len(s.input_ids) for s in samples), shard_samples=8, stack={},
        recipe={},
    )  # fmt: skip
    writer = StoreWriter(path, manifest)
    for number in range(manifest.shards):
        writer.write(number, [samples[i] for i in manifest.samples_of(number)])
    writer.close()


class Extraction:
    """An engine that extracts prompts, each call into a store of its own."""

    def __init__(self, target: Path, work: Path, ids: Sequence[int], dtype: str, limit: int, **settings: Any) -> None:
        lines = "\n".join(f"{name} = {value}" for name, value in settings.items())
        text = RECIPE.format(folder=work, target=target, dtype=dtype, settings=lines)
        self.work, self.ids, self.calls = work, ids, 0
        config = read_config(target)
        self.contract = LayerContract.of(list(ids), config["num_hidden_layers"])
        self.identity = TargetIdentity(
            fingerprint="", hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"], vocab_size=1
        )
        self.engine = Engine(Recipe.parse(text, name="a test"), self.contract, limit, work / "log")

    def __call__(self, prompts: Sequence[Prompt]) -> list[Sample]:
        self.calls += 1
        manifest = Manifest(
            target=self.identity, tokenizer_digest="", layers=self.contract, computed_in="", dataset_digest="",
            lengths=tuple(map(len, prompts)), shard_samples=SHARD, stack={}, recipe={},
        )  # fmt: skip
        writer = StoreWriter(self.work / f"store-{self.calls}", manifest)
        samples = [TokenSample(id=str(i), input_ids=list(p), loss_mask=[1] * len(p)) for i, p in enumerate(prompts)]
        jobs = [
            Job(store=0, number=n, samples=[(i, samples[i]) for i in manifest.samples_of(n)])
            for n in range(manifest.shards)
        ]
        done = [job for _, jobs in self.engine.extract([writer.store.path], jobs) for job in jobs]
        assert sorted(job.number for job in done) == list(range(manifest.shards))
        assert writer.store.verify() == []
        found = [writer.store[i] for i in range(len(prompts))]
        assert [sample.input_ids.tolist() for sample in found] == [list(p) for p in prompts]
        return found

    def states(self, prompts: Sequence[Prompt]) -> list[States]:
        """The same by layer."""
        return [{**dict(s.hidden_states), "last": s.last_hidden_state} for s in self(prompts)]


class Reference:
    """Hugging Face's model, whose states are read by hooks, before a layer and after the norm; each prompt once."""

    def __init__(self, folder: Path, dtype: str, ids: Sequence[int], device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.device = device
        self._seen: States = {}
        self._kept: dict[tuple[int, ...], States] = {}
        for k in ids:
            self.model.model.layers[k].register_forward_pre_hook(self._note(k), with_kwargs=True)
        self.model.model.norm.register_forward_hook(lambda module, args, output: self._seen.update(last=output))

    def _note(self, k: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def batch(self, of: Sequence[Prompt]) -> list[States]:
        """The states of prompts that are computed together, padded to one length."""
        longest = max(map(len, of))
        ids = torch.tensor([[*p, *[0] * (longest - len(p))] for p in of], device=self.device)
        mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in of], device=self.device)
        with torch.no_grad():
            self.model.model(ids, attention_mask=mask if len(of) > 1 else None, use_cache=False)
        return [{k: rows[i, : len(p)].cpu() for k, rows in self._seen.items()} for i, p in enumerate(of)]

    def alone(self, prompt: Prompt) -> States:
        if tuple(prompt) not in self._kept:
            [states] = self.batch([prompt])
            self._kept[tuple(prompt)] = {k: rows.clone() for k, rows in states.items()}
        return self._kept[tuple(prompt)]


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def cosine(found: Tensor, expected: Tensor) -> float:
    """The median token's."""
    return float(torch.cosine_similarity(found.double(), expected.double(), dim=-1).median())


def typical(found: Tensor, expected: Tensor) -> float:
    """The relative difference of the median token: one token's huge values hide what a layer does to the others."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
