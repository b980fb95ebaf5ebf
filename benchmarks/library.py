"""speculators 0.3.0's trainer, started as its own script starts it: what draftmill's is measured against."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftmill.recipe import Recipe
    from draftmill.train.data import Samples
    from draftmill.train.vocabulary import Vocabulary

_NOISE = 0.05  # the script's defaults, these four
_WORKERS = 12
_PREFETCH = 4
_RATE = 1e-4
_TO_RUN = 10  # the first of patches/speculators/series make it run; those after them make it right


def environment(package: Path | None, out: Path) -> dict[str, str]:
    """What a process needs to import the package from the folder `package`.

    Without one, 0.3.0 is made in `out`, with those patches without which it does not run on this stack.
    """
    from draftmill import patches

    made = out / "speculators"
    if package is None and not made.exists():
        patches.tree(patches.FOLDER, patches.pristine(), made, patches.read_series()[:_TO_RUN])
    return {**os.environ, "PYTHONPATH": f"{package or made / 'src'}:{os.environ.get('PYTHONPATH', '')}"}


def opened(recipe: Recipe) -> tuple[Samples, Any, Vocabulary]:
    """A run's training samples, its target's configuration, and the vocabulary of a draft for it."""
    from draftmill.target import identify
    from draftmill.train import data, draft, vocabulary

    samples = data.open_train(recipe, identify(recipe.target_folder))
    config = draft.target_config(recipe)
    wanted = recipe.train.draft_vocab_size
    return samples, config, vocabulary.choose(samples.counts, wanted, draft.end_tokens(recipe, config))


def begin(
    config: Any,
    vocabulary: Vocabulary,
    files: Sequence[Path],
    *,
    pack: int,
    saved: Path,
    steps: int | None = None,
    rate: float = _RATE,
) -> tuple[Any, list[tuple[float, int, int]]]:
    """The trainer, and a list that fills as it trains: of each step its end, its tokens and those supervised.

    Args:
        config: the draft's `Eagle3SpeculatorConfig`.
        files: samples in 0.3.0's form, one a file.
        steps: where `train_epoch`, called for one epoch after another, comes to an end; None for one epoch.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train import trainer as library
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from torch.utils.data import DataLoader

    config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    t2d, d2t = vocabulary.mappings()
    model = Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t).to(torch.bfloat16)
    dataset = Eagle3SampleFileDataset(
        max_len=pack,
        file_list=[str(file) for file in files],
        transform=AddUniformNoise(std=_NOISE, tensors=("hidden_states",)),
        hidden_states_dtype=torch.bfloat16,
    )
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=pack, lengths=dataset.approx_lengths, num_replicas=1, rank=0
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=_WORKERS,
        prefetch_factor=_PREFETCH,
        pin_memory=True,
        persistent_workers=True,
        collate_fn=create_collate_fn(pack),
    )
    taken: list[tuple[float, int, int]] = []

    class Counted:
        batch_sampler = sampler

        def __len__(self) -> int:
            return len(loader)

        def __iter__(self) -> Iterator[Any]:
            for batch in loader:
                if len(taken) == steps:
                    return
                yield batch
                torch.cuda.synchronize()
                taken.append((time.monotonic(), int(batch["lengths"].sum()), int(batch["loss_mask"].sum())))

    options = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, "use_off_policy_tokens": False}
    settings = library.TrainerConfig(
        lr=rate,
        num_epochs=1,
        save_path=str(saved),
        train_call_kwargs=options,
        val_call_kwargs=options,
        scheduler_total_steps=steps,
        scheduler_warmup_steps=steps // 100 if steps else None,
    )
    return library.Trainer(model, settings, Counted()), taken
