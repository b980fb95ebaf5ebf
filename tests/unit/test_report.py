"""The report, from files written by hand: whole, partial and damaged runs."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftmill.errors import StoreError
from draftmill.recipe import Evaluate, Prompts, Recipe
from draftmill.report import Report, figures, report, size, sources, thousands, toml
from draftmill.report.machine import cpu_model, patch_digest

LAYERS = {"ids": [2, 15, 27], "num_layers": 30, "meaning": "input of decoder layer k"}


def prompt_set(name: str, length: float, **changes: Any) -> dict[str, Any]:
    rate = length - 1
    return {
        "name": name,
        "prompts": 40,
        "prompt_tokens": 900,
        "tokens": 2000,
        "drafts": 1000,
        "accepted": 900,
        "acceptance_length": length,
        "interval": {"level": 0.95, "low": length - 0.1, "high": length + 0.2, "resamples": 9, "seed": 0},
        "acceptance_per_position": [rate * 0.6, rate * 0.4],
        "equal": 40,
        "first_difference": None,
        "seconds": 1.0,
        "tokens_per_second": 2000.0,
        "plain_seconds": 1.0,
        "plain_tokens_per_second": 1500.0,
        **changes,
    }


def evaluation(*sets: dict[str, Any]) -> dict[str, Any]:
    return {
        "fingerprint": "f",
        "definition": "1 + accepted / drafts",
        "engine": "reference",
        "engine_version": "torch 2",
        "dtype": "float32",
        "device": "cpu",
        "draft_tokens": 2,
        "max_new_tokens": 50,
        "batch": 8,
        "draft": "d",
        "draft_digest": "d1" * 32,
        "target": "t",
        "target_digest": "7a" * 32,
        "layers": {**LAYERS, "last_hidden_state": "after the final norm"},
        "sets": list(sets),
    }


PREPARED = {
    "samples": {"train": 380, "held_out": 20},
    "tokens": {"train": 81234, "held_out": 4012},
    "supervised_tokens": {"train": 60211, "held_out": 3100},
    "read": 653,
    "kept": 400,
    "dropped": {"begins_with_assistant": 240, "empty_turn": 13, "unknown_role": 0},
    "mask_method": "the template's own marks",
    "regenerated": {"enabled": True, "max_new_tokens": 192, "temperature": 0.0, "turns": 1, "batch": 128},
    "more": "that the report does not show",
}
EXTRACTION = {
    "tokens": 85246,
    "seconds": 71.3,
    "tokens_per_second": 1200.0,
    "bytes": 3 * 2**30,
    "plain_prefill_tokens_per_second": 1250.0,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    text = f"""
        [run]
        name = "trial"
        folder = "{tmp_path}"
        [target]
        path = "a <target>"
        [[data.sources]]
        format = "tokens"
        path = "t.jsonl"
        [[evaluate.prompts]]
        name = "humaneval"
        format = "humaneval"
        path = "h.jsonl"
    """
    made = Recipe.parse(text, name="recipe")
    made.folder.root.mkdir()
    return made


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def whole(recipe: Recipe) -> Recipe:
    """A run in which every stage has written its file."""
    f = recipe.folder
    write(f.prepared / "prepared.json", PREPARED)
    write(f.extraction_json, EXTRACTION)
    write(f.store_train / "manifest.json", {"layers": LAYERS, "computed_in": "float32", "dataset_digest": "da" * 32})
    write(f.draft / "config.json", {"draft_vocab_size": 8, "eagle_aux_hidden_state_layer_ids": [2, 15, 27]})
    write(f.evaluation_json, evaluation(prompt_set("humaneval", 2.25), prompt_set("mt_bench", 1.75)))
    rows: list[dict[str, Any]] = [{"step": s, "loss": 9.0 - s / 20, "accuracy": [0.5, 0.25]} for s in range(1, 101)]
    rows[-1] |= {"val_loss": 4.5, "val_accuracy": [0.456, 0.2], "val_acceptance_length": 1.66}
    f.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe


class Reader(html.parser.HTMLParser):
    """Text of a page, tags that do not close, and addresses that it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.open, self.fetched = "", [], []  # type: ignore[var-annotated]
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "svg" not in self.open:
            self.text += " " + data


def reported(recipe: Recipe) -> tuple[Reader, Report]:
    report(recipe)
    page = Reader(recipe.folder.report_html.read_text(encoding="utf-8"))
    assert page.open == []
    return page, Report.model_validate_json(recipe.folder.report_json.read_bytes())


def test_a_whole_run(whole: Recipe) -> None:
    page, found = reported(whole)
    assert found.acceptance_length == {"humaneval": 2.25, "mt_bench": 1.75}
    assert (found.missing, found.digests["draft"], found.digests["dataset"]) == ([], "d1" * 32, "da" * 32)
    assert found.training is not None
    assert (found.training.steps, found.training.held_out_loss, found.training.accuracy) == (100, 4.5, [0.456, 0.2])
    for words in (
        "HumanEval 2.25",
        "interval 2.15 to 2.45",
        "MT-Bench 1.75",
        "80 / 80",
        "653 conversations read, 400 kept, 253 dropped:",
        "begins with assistant 240",
        "The target wrote the answers anew, greedily, up to 192 tokens each.",
        "96 % of plain prefill",
        "3.0 GiB written",
        "Held-out accuracy by draft token: 45.6 %, 20.0 %.",
        "held-out conversations that makes an acceptance length of 1.66",
        "hidden states at 2 , 15 and 27 : the inputs of these decoder layers",
        "The same ids are in: store, draft, evaluation.",
        "draftmill run --recipe recipe.toml",
        'path = "a <target>"',
    ):
        assert words in page.text.replace("\u2009", " "), words
    assert "unknown role" not in page.text
    assert "Not there yet" not in page.text


def test_the_page_fetches_nothing_and_names_no_host(whole: Recipe) -> None:
    import platform

    page, _ = reported(whole)
    raw = whole.folder.report_html.read_text(encoding="utf-8")
    assert page.fetched == []
    assert "@import" not in raw and "<script" not in raw and "url(http" not in raw
    assert platform.node() not in page.text.split()
    assert raw.count("<svg") == 3


@pytest.mark.parametrize(
    ("gone", "stage"),
    [
        ("prepared/prepared.json", "prepare"),
        ("extraction.json", "extract"),
        ("draft/config.json", "train"),
        ("evaluation.json", "evaluate"),
    ],
)
def test_a_stage_that_has_not_run_is_said(whole: Recipe, gone: str, stage: str) -> None:
    (whole.folder.root / gone).unlink()
    page, found = reported(whole)
    assert found.missing == [stage]
    assert f"Still to run: draftmill {stage} ." in page.text


def test_a_run_of_nothing_is_a_page_too(recipe: Recipe) -> None:
    page, found = reported(recipe)
    assert found.missing == ["prepare", "extract", "train", "evaluate"]
    assert page.text.count("Not there yet") == 5
    assert found.acceptance_length == {}


def test_the_figures_are_those_of_the_best_validation(whole: Recipe) -> None:
    lengths = {20: 1.4, 40: 1.9, 60: 1.9, 80: 1.7}
    rows = [{"step": s, "loss": 2.0} for s in range(1, 81)]
    for step, length in lengths.items():
        rows[step - 1] |= {"val_loss": step / 10, "val_accuracy": [0.5], "val_acceptance_length": length}  # type: ignore[dict-item]
    whole.folder.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, found = reported(whole)
    assert found.training is not None
    trained = found.training
    assert (trained.best_step, trained.held_out_loss, trained.held_out_acceptance_length) == (40, 4.0, 1.9)
    assert "held-out loss 4.000 after step 40, the best, whose weights the draft has" in page.text


def of_held_out(whole: Recipe, length: float, **prompts: Any) -> Recipe:
    """The run again, with its held-out prompts evaluated too."""
    path = whole.folder.prepared / "held_out.jsonl"
    given = Prompts(name="own", format="tokens", path=str(path), **prompts)
    made = whole.model_copy(update={"evaluate": Evaluate(prompts=[*whole.evaluate.prompts, given])})
    rates = [{"concurrency": 4, "tokens_per_second": 90.0, "plain_tokens_per_second": 60.0}]
    write(
        whole.folder.evaluation_json, evaluation(prompt_set("humaneval", 2.25), prompt_set("own", length, rates=rates))
    )
    return made


def test_rates_are_shown_by_requests_at_a_time(whole: Recipe) -> None:
    page, _ = reported(of_held_out(whole, 1.66))
    assert "requests at a time tokens/s with draft without ratio own 4 90 60 1.50" in page.text


@pytest.mark.parametrize(
    ("length", "regenerated", "limit", "reasons"),
    [
        (1.66, {}, None, []),
        (1.70, {}, None, []),  # 2.4 % below
        (1.50, {"enabled": False}, None, ["the data's own"]),
        (1.50, {"temperature": 0.7, "max_new_tokens": 50}, None, ["at temperature 0.7"]),
        (1.50, {}, None, ["end after 192 tokens, the decoded ones after 50"]),
        (1.80, {"max_new_tokens": 50}, 10, ["only the first 10"]),
        (1.50, {"max_new_tokens": 50}, None, ["nothing in this run's settings explains it"]),
    ],
)
def test_trainings_own_figure_is_held_against_decoding(
    whole: Recipe, length: float, regenerated: dict[str, Any], limit: int | None, reasons: list[str]
) -> None:
    write(
        whole.folder.prepared / "prepared.json",
        {**PREPARED, "regenerated": {**PREPARED["regenerated"], **regenerated}},  # type: ignore[dict-item]
    )
    page, found = reported(of_held_out(whole, length, limit=limit))
    assert found.estimate is not None
    assert (found.estimate.prompt_set, found.estimate.trained, found.estimate.decoded) == ("own", 1.66, length)
    assert found.estimate.difference == pytest.approx(1.66 / length - 1)
    assert len(found.estimate.reasons) == len(reasons)
    for told, expected in zip(found.estimate.reasons, reasons, strict=True):
        assert expected in told
        assert told in page.text


def test_without_held_out_prompts_there_is_nothing_to_hold_against(whole: Recipe) -> None:
    page, found = reported(whole)
    assert found.estimate is None
    assert "own figure" not in page.text


def test_an_output_that_differs_is_in_view(whole: Recipe) -> None:
    difference = {"prompt": "81", "position": 4, "expected": 5, "found": 6, "top2_gap": 2e-6}
    bad = prompt_set("humaneval", 2.25, equal=39, first_difference=difference)
    write(whole.folder.evaluation_json, evaluation(bad))
    page, _ = reported(whole)
    assert "39 of 40" in page.text
    assert "prompt 81, at token 4, where the target\u2019s two best logits are 2e-06 apart" in page.text


def test_stages_of_different_layers_are_in_view(whole: Recipe) -> None:
    write(whole.folder.draft / "config.json", {"draft_vocab_size": 8, "eagle_aux_hidden_state_layer_ids": [2, 15, 28]})
    page, _ = reported(whole)
    assert "The stages disagree: store [2, 15, 27], draft [2, 15, 28]" in page.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("extraction.json", '{"tokens": 1}'),
        ("extraction.json", "{"),
        ("evaluation.json", '{"sets": []}'),
        ("prepared/prepared.json", "[]"),
        ("metrics.jsonl", '{"step": 1, "loss": 2}\nno json\n'),
        ("metrics.jsonl", '{"loss": 2.0}\n'),
        ("metrics.jsonl", "[1]\n"),
    ],
)
def test_a_damaged_file_is_named(whole: Recipe, file: str, content: str) -> None:
    path = whole.folder.root / file
    path.write_text(content)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        report(whole)
    assert not whole.folder.report_html.exists()


def test_no_such_run(whole: Recipe) -> None:
    other = whole.model_copy(update={"run": whole.run.model_copy(update={"name": "other"})})
    with pytest.raises(StoreError, match="there is no run"):
        report(other)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"step": 3, "loss": 1.5, "accuracy": [0.5]}', {"step": 3, "loss": 1.5, "accuracy": [0.5]}),
        ('{"step": 3, "loss": 2.0, "val_loss": 1.5, "val_accuracy": [0.5]}', {"val_loss": 1.5, "val_accuracy": [0.5]}),
        ('{"step": 3, "loss": 2.0, "grad_norm": 1.0}', {"val_loss": None, "accuracy": []}),
    ],
)
def test_metrics_lines(tmp_path: Path, line: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + '\n{"step": 4, "lo')
    (point,) = sources.metrics(path)
    assert {key: getattr(point, key) for key in expected} == expected
    assert sources.metrics(tmp_path / "none") == []


def test_the_recipe_in_the_report_is_the_recipe(whole: Recipe) -> None:
    for one in (whole, Recipe.load(None), Recipe.load(None, {"extract.layers": "[1, 2, 3]"})):
        assert Recipe.parse(toml.dumps(one), name="again") == one


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12345, "12,345"), (71.3, "71.3"), (1200.4, "1,200"), (5.0, "5")]
)
def test_numbers_for_reading(value: float, text: str) -> None:
    assert thousands(value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")])
def test_bytes_for_reading(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("version", "digest"), [("0.3.0+draftmill.0123456789ab", "0123456789ab"), ("0.3.0", None), (None, None)]
)
def test_the_patch_digest_is_in_the_version(version: str | None, digest: str | None) -> None:
    assert patch_digest(version) == digest


def test_the_cpu_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n")
    assert cpu_model(info) == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "none") != ""


def test_curves_are_smoothed_by_means_of_equal_groups() -> None:
    points = [sources.Point(step=s, loss=float(s % 2)) for s in range(1, 401)]
    steps, values = figures.smoothed(points, lambda p: p.loss)
    assert len(steps) == figures.SMOOTHING
    assert set(values) == {0.5}
    few = points[:3]
    assert figures.smoothed(few, lambda p: p.loss) == ([1, 2, 3], [1, 0, 1])


def test_figures_are_the_same_bytes_for_the_same_numbers(whole: Recipe) -> None:
    found = sources.Evaluation.load(whole.folder.evaluation_json)
    assert found is not None
    first, second = (figures.acceptance(found.sets, 2) for _ in range(2))
    assert first == second
    head = first[: first.index(">")]
    assert "viewBox" in head and "width" not in head and "height" not in head
