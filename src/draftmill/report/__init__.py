"""One page and one JSON file on a run: what came of it, from what, and how to have it again."""

from __future__ import annotations

import hashlib
import sys
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from draftmill.errors import StoreError
from draftmill.files import write_whole
from draftmill.recipe import resolve
from draftmill.report import figures, sources, toml
from draftmill.report.machine import Machine, now, patch_digest, versions

if TYPE_CHECKING:
    from draftmill.recipe import Prompts, Recipe

COMMAND = "draftmill run --recipe recipe.toml"
TOLERANCE = 0.03


class Training(BaseModel):
    """The end of the curves, and the best validation, whose weights the draft has.

    `accuracy` a position: of that validation, else of the last step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    steps: int
    loss: float | None
    best_step: int | None
    held_out_loss: float | None
    held_out_acceptance_length: float | None
    accuracy: list[float]
    held_out: bool


class Estimate(BaseModel):
    """The acceptance length that training measured on the held-out answers, beside the one of decoding their prompts.

    `reasons` say why the two differ, where they do by more than `TOLERANCE` of the decoded one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_set: str
    trained: float
    decoded: float
    difference: float
    reasons: list[str]


class Report(BaseModel):
    """`report.json`. What a stage that has not run would give is None, and `missing` names that stage."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    written: str
    acceptance_length: dict[str, float]
    missing: list[str]
    data: sources.Prepared | None
    extraction: sources.Extraction | None
    training: Training | None
    evaluation: sources.Evaluation | None
    estimate: Estimate | None
    layers: dict[str, list[int]]
    versions: dict[str, str]
    patches: str | None
    digests: dict[str, str]
    machine: Machine
    recipe: dict[str, Any]
    command: str = COMMAND


def report(recipe: Recipe) -> None:
    """Writes `report.html` and `report.json` from what the run's folder holds.

    Raises:
        StoreError: there is no such run, or a stage's file cannot be read.
    """
    folder = recipe.folder
    if not folder.root.is_dir():
        raise StoreError(
            f"there is no run in {folder.root}", next_step="run draftmill run, or check [run] in the recipe"
        )
    points = sources.metrics(folder.metrics_jsonl)
    found = gather(recipe, points)
    write_whole(folder.report_json, (found.model_dump_json(indent=2) + "\n").encode())
    write_whole(folder.report_html, page(recipe, found, points).encode())
    sys.stdout.write(f"wrote {folder.report_html} and {folder.report_json.name}\n")


def gather(recipe: Recipe, points: list[sources.Point]) -> Report:
    """Reads what the stages wrote."""
    folder = recipe.folder
    data = sources.Prepared.load(folder.prepared / "prepared.json")
    extraction = sources.Extraction.load(folder.extraction_json)
    evaluation = sources.Evaluation.load(folder.evaluation_json)
    draft = sources.DraftConfig.load(folder.draft / "config.json")
    store = sources.StoreManifest.load(folder.store_train / "manifest.json")
    stages = {"prepare": data, "extract": extraction, "train": draft, "evaluate": evaluation}
    layers = {
        "store": list(store.layers.ids) if store else None,
        "draft": draft.eagle_aux_hidden_state_layer_ids if draft else None,
        "evaluation": list(evaluation.layers.ids) if evaluation else None,
    }
    digests = {
        "target": evaluation.target_digest if evaluation else None,
        "draft": evaluation.draft_digest if evaluation else None,
        "dataset": store.dataset_digest if store else None,
        "recipe": hashlib.sha256(toml.dumps(recipe).encode()).hexdigest(),
    }
    stack = versions()
    trained = training(points)
    return Report(
        run=recipe.run.name,
        written=now(),
        acceptance_length={s.name: s.acceptance_length for s in evaluation.sets} if evaluation else {},
        missing=[name for name, there in stages.items() if there is None],
        data=data,
        extraction=extraction,
        training=trained,
        evaluation=evaluation,
        estimate=estimate(recipe, trained, evaluation, data),
        layers={name: ids for name, ids in layers.items() if ids},
        versions=stack,
        patches=patch_digest(stack.get("speculators")),
        digests={name: value for name, value in digests.items() if value},
        machine=Machine.read(),
        recipe=recipe.model_dump(),
    )


def training(points: list[sources.Point]) -> Training | None:
    """Where the curves end, and the first of the best validations."""
    steps = [p for p in points if p.loss is not None]
    held_out = [p for p in points if p.val_loss is not None]
    if not steps:
        return None
    best = max(held_out, key=lambda p: p.val_acceptance_length or 0.0, default=None)
    return Training(
        steps=steps[-1].step,
        loss=steps[-1].loss,
        best_step=best.step if best else None,
        held_out_loss=best.val_loss if best else None,
        held_out_acceptance_length=best.val_acceptance_length if best else None,
        accuracy=best.val_accuracy if best else steps[-1].accuracy,
        held_out=best is not None,
    )


def estimate(
    recipe: Recipe,
    trained: Training | None,
    evaluation: sources.Evaluation | None,
    data: sources.Prepared | None,
) -> Estimate | None:
    """Where a prompt set is the run's held-out samples: training's acceptance length against the decoded one."""
    held_out = (recipe.folder.prepared / "held_out.jsonl").resolve()
    of_samples = [p for p in recipe.evaluate.prompts if p.format == "tokens" and resolve(p.path).resolve() == held_out]
    if not (trained and trained.held_out_acceptance_length and evaluation and of_samples):
        return None
    prompts = of_samples[0]
    found = next((s.acceptance_length for s in evaluation.sets if s.name == prompts.name), None)
    if found is None:
        return None
    difference = trained.held_out_acceptance_length / found - 1
    return Estimate(
        prompt_set=prompts.name,
        trained=trained.held_out_acceptance_length,
        decoded=found,
        difference=difference,
        reasons=reasons(prompts, evaluation, data) if abs(difference) > TOLERANCE else [],
    )


def reasons(prompts: Prompts, evaluation: sources.Evaluation, data: sources.Prepared | None) -> list[str]:
    """Why training's estimate and decoding can differ in this run, or that nothing in it explains why."""
    answers = data.regenerated if data else None
    found = []
    if answers and not answers.enabled:
        found.append("the held-out answers are the data's own: training follows a text that the target would not write")
    if answers and answers.enabled and answers.temperature > 0:
        found.append(f"the held-out answers were drawn at temperature {answers.temperature:g}; decoding is greedy")
    if answers and answers.enabled and answers.max_new_tokens != evaluation.max_new_tokens:
        found.append(
            f"the held-out answers end after {answers.max_new_tokens} tokens, the decoded ones after "
            f"{evaluation.max_new_tokens}"
        )
    if prompts.limit:
        found.append(f"only the first {prompts.limit} held-out prompts were decoded")
    return found or [
        "nothing in this run's settings explains it: what is served is not what was trained; compare the layers and "
        "digests below, and evaluate with the reference engine"
    ]


def page(recipe: Recipe, found: Report, points: list[sources.Point]) -> str:
    """The HTML page, with its figures and style in it."""
    import jinja2

    text = resources.files("draftmill").joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(n=thousands, size=size, words=words, title=figures.title)
    evaluation = found.evaluation
    return environment.from_string(text).render(
        r=found,
        e=evaluation,
        recipe_toml=toml.dumps(recipe),
        acceptance=figures.acceptance(evaluation.sets, evaluation.draft_tokens) if evaluation else None,
        per_position=figures.per_position(evaluation.sets) if evaluation else None,
        curves=figures.curves(points) if found.training else None,
        one_contract=len({tuple(ids) for ids in found.layers.values()}) <= 1,
    )


def words(name: str) -> str:
    return name.replace("_", " ")


def thousands(value: float) -> str:
    """A count or rate for reading: 12,345; small rates keep a digit."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def size(count: int) -> str:
    """Bytes for reading, in powers of 1024."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
