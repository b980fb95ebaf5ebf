"""What draftmill's training is worth in serving, against speculators 0.3.0 with its API mended and nothing else.

    python benchmarks/quality.py --recipe run.toml --out /tmp/quality

On a finished run (`prepare`, `extract`, `train`) the same samples are captured as 0.3.0's generator does, each layer's
output and the last state before the final norm, and its trainer makes a draft from them: as many steps, of as many
positions, with as many draft tokens. Then `draftmill evaluate` decodes with both. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from draftmill.recipe import Recipe
    from draftmill.tokens import TokenSample

_BATCH = 16


def capture(recipe: Recipe, folder: Path) -> None:
    """Writes data_<number>.pt for each prepared sample, in 0.3.0's form, by Hugging Face's model with hooks."""
    import torch
    from transformers import AutoModelForCausalLM

    from draftmill.layers import default_ids
    from draftmill.tokens import read_samples

    folder.mkdir(parents=True)
    model: Any = AutoModelForCausalLM.from_pretrained(recipe.target_folder, dtype=torch.bfloat16).cuda().eval()
    layers = model.model.layers
    ids = (*default_ids(len(layers)), len(layers) - 1)  # 0.3.0's too, but it takes what these layers give
    found: dict[int, torch.Tensor] = {}
    for number in ids:

        def keep(_module: object, _inputs: object, output: Any, number: int = number) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        layers[number].register_forward_hook(keep)
    samples = list(enumerate(read_samples(recipe.folder.prepared / "train.jsonl")))
    samples.sort(key=lambda numbered: len(numbered[1].input_ids))
    for batch in itertools.batched(samples, _BATCH):
        with torch.inference_mode():
            model.model(padded([sample for _, sample in batch]))
        for row, (number, sample) in enumerate(batch):
            length = len(sample.input_ids)
            states = [found[layer][row, :length].cpu().clone() for layer in ids]
            whole = {
                "input_ids": torch.tensor(sample.input_ids),
                "loss_mask": torch.tensor(sample.loss_mask),
                "hidden_states": states,
            }
            torch.save(whole, folder / f"data_{number}.pt")


def padded(samples: list[TokenSample]) -> torch.Tensor:
    """Token ids [B, T], padded on the right, where no real token looks."""
    import torch

    width = max(len(sample.input_ids) for sample in samples)
    return torch.tensor([sample.input_ids + [0] * (width - len(sample.input_ids)) for sample in samples]).cuda()


def train(recipe: Recipe, files: Path, out: Path, rate: float) -> None:
    """Trains 0.3.0's draft and leaves it in `out` as its own checkpoint has it."""
    import torch
    from library import begin, opened

    from draftmill.layers import LayerContract
    from draftmill.train import draft

    _, config, chosen = opened(recipe)
    layers = LayerContract.of(None, config.get_text_config().num_hidden_layers)
    settings = draft.draft_config(recipe, config, layers, len(chosen.ids))
    settings.transformer_layer_config.rope_theta = 10000.0  # 0.3.0 leaves the target's out
    torch.manual_seed(recipe.run.seed)
    paths = sorted(files.glob("data_*.pt"))
    training, taken = begin(
        settings, chosen, paths, pack=recipe.train.pack_tokens, saved=out / "saved", steps=recipe.train.steps, rate=rate
    )
    for epoch in itertools.count():
        training.train_epoch(epoch)
        if len(taken) == recipe.train.steps:
            break
    training.model.save_pretrained(out / "draft")
    written = out / "draft" / "config.json"
    saved = json.loads(written.read_text(encoding="utf-8"))
    saved["transformer_layer_config"]["tie_word_embeddings"] = False  # left out, vLLM takes the head for the embedding
    written.write_text(json.dumps(saved), encoding="utf-8")
    told = {"steps": len(taken), "epochs": epoch + 1, "tokens": sum(tokens for _, tokens, _ in taken)}
    (out / "theirs.json").write_text(json.dumps(told), encoding="utf-8")


def rows(results: dict[str, Path]) -> Iterator[str]:
    """The table: a line a draft, with the acceptance length of each prompt set."""
    found = {name: json.loads(path.read_text(encoding="utf-8"))["sets"] for name, path in results.items()}
    names = [s["name"] for s in next(iter(found.values()))]
    yield f"| draft | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for name, sets in found.items():
        yield f"| {name} | {' | '.join(f'{s["acceptance_length"]:.3f}' for s in sets)} |"


def part(at: argparse.Namespace, name: str) -> None:
    """One part in a process of its own, which imports 0.3.0's package."""
    from library import environment

    library = environment(at.speculators, at.out)
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], env=library, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, required=True, help="of the finished run")
    parser.add_argument("--out", type=Path, required=True, help="a folder for everything that is not the run's")
    parser.add_argument("--speculators", type=Path, help="a folder with the package to measure; 0.3.0, made here")
    parser.add_argument("--rates", default="1e-4", help="learning rates of 0.3.0's trainer; 1e-4 is its default")
    parser.add_argument("--only", help="capture, or a learning rate: that part, and no table")
    at = parser.parse_args()
    from draftmill.recipe import Recipe

    recipe = Recipe.load(at.recipe)
    if at.only == "capture":
        capture(recipe, at.out / "files")
        return
    if at.only:
        (at.out / at.only).mkdir(exist_ok=True)
        train(recipe, at.out / "files", at.out / at.only, float(at.only))
        return
    if not (at.out / "files").exists():
        part(at, "capture")
    results = {"draftmill": recipe.folder.evaluation_json}
    for rate in at.rates.split(","):
        theirs = at.out / rate
        if not (theirs / "theirs.json").exists():
            part(at, rate)
        if not (theirs / "target").exists():
            (theirs / "target").symlink_to(recipe.target_folder.resolve())
        results[f"speculators 0.3.0, {rate}"] = theirs / "evaluation.json"
    for name, path in results.items():
        of_theirs = (f'run.folder="{path.parent.parent}"', f'run.name="{path.parent.name}"', "evaluate.concurrency=[]")
        where = [word for setting in of_theirs for word in ("--set", setting)]
        command = [sys.executable, "-m", "draftmill", "evaluate", "--recipe", str(at.recipe)]
        subprocess.run([*command, *(where if name != "draftmill" else [])], check=True)
    text = "\n".join(rows(results)) + "\n"
    (at.out / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
