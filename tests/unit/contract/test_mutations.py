"""Recall: changes of a provider, each of which breaks the consumer, and each of which must be found at its line."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from draftmill.contract.audit import Audit

HERE = Path(__file__).parent
PROVIDER = {path.name.removesuffix(".txt"): path.read_text() for path in sorted((HERE / "mutated").glob("*.py.txt"))}
CONSUMER = (HERE / "mutated" / "consumer.txt").read_text()
NEEDED = 0.95
CHANGES = tomllib.loads((HERE / "mutated" / "changes.toml").read_text())["change"]


def broken_lines(result: Audit) -> set[int]:
    return {finding.consumer.line for finding in result.report.findings if finding.verdict == "broken"}


def lines_of(mark: str) -> set[int]:
    return {n for n, line in enumerate(CONSUMER.splitlines(), 1) if line.rstrip().endswith(f"# {mark}")}


Audited = Callable[..., Audit]


def test_the_unchanged_provider_breaks_nothing_and_leaves_nothing_open(audited: Audited) -> None:
    report = audited(PROVIDER, CONSUMER).report
    assert [finding for finding in report.findings if finding.verdict != "compatible"] == []
    assert report.count("compatible") > 60


def changed(change: dict[str, str]) -> dict[str, str]:
    provider = dict(PROVIDER)
    if "old" not in change:
        provider["moved.py"] = provider.pop(change["file"])
        return provider
    text = provider[change["file"]]
    assert len(re.findall(re.escape(change["old"]), text)) == 1, change["name"]
    return {**provider, change["file"]: text.replace(change["old"], change["new"])}


def test_recall_on_planted_changes(audited: Audited) -> None:
    assert len(CHANGES) >= 40
    missed = []
    for change in CHANGES:
        assert lines_of(change["mark"]), f"no line of the consumer is marked {change['mark']}"
        if not broken_lines(audited(changed(change), CONSUMER)) & lines_of(change["mark"]):
            missed.append(change["name"])
    recall = 1 - len(missed) / len(CHANGES)
    print(f"recall on {len(CHANGES)} planted changes: {recall:.1%}, missed: {missed}")
    assert recall >= NEEDED, missed


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("core.py", "def plan(config, groups, memory)", "def plan(config, groups, memory, block=16)"),
        ("core.py", "def warm(model, steps=1)", "def warm(model, steps=2)"),
        (
            "core.py",
            "def add(self, request: Request, priority=0)",
            "def add(self, request: Request, priority=0, *, tag=None)",
        ),
        ("core.py", "    ABORTED = 2\n", "    ABORTED = 3\n    LOST = 4\n"),
        ("options.py", "    seed: int = 0\n", "    seed: int = 0\n    extra: int = 0\n"),
        ("core.py", "def tune(model, **options)", "def tune(model, level=0, **options)"),
    ],
)
def test_harmless_changes_break_nothing(audited: Audited, file: str, old: str, new: str) -> None:
    assert old in PROVIDER[file]
    assert broken_lines(audited({**PROVIDER, file: PROVIDER[file].replace(old, new)}, CONSUMER)) == set()
