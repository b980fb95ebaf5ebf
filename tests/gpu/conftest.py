"""Tests of a GPU: they fail where there is none, and end with a table of what ran on which."""

import importlib.metadata
from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import Any

import pytest

STACK = ("torch", "vllm", "transformers", "speculators")


def pytest_sessionstart() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.exit(
            f"tests/gpu needs a GPU, and torch {torch.__version__} sees none here: no driver, no GPU attached to this "
            "container, or torch's CPU build, as .venv has it",
            returncode=1,
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    import torch

    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in STACK)
    terminalreporter.section("what ran")
    terminalreporter.write_line(
        f"{datetime.now(UTC):%Y-%m-%d}, {torch.cuda.device_count()} x {name} (sm_{major}{minor}), {versions}"
    )
    for line in table(terminalreporter.stats):
        terminalreporter.write_line(line)


def table(stats: dict[str, list[Any]]) -> list[str]:
    """A line a test function, in Markdown: how many of its cases passed, failed and were skipped, and their seconds."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for outcome, told in (("passed", "passed"), ("failed", "failed"), ("error", "failed"), ("skipped", "skipped")):
        for report in stats.get(outcome, []):
            test = report.nodeid.partition("[")[0]
            found[test][told] += 1
            seconds[test] += report.duration
    rows = ["| test | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for test, counts in sorted(found.items()):
        cells = (*(counts[told] for told in ("passed", "failed", "skipped")), f"{seconds[test]:.0f}")
        rows.append(f"| {test} | {' | '.join(map(str, cells))} |")
    return rows
