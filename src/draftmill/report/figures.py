"""The report's figures, as SVG text to be put into the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftmill.report.sources import Point, SetResult

INK, SOFT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLOURS = ("#1f6f8b", "#d1793b", "#6a4c93", "#3f8f5b", "#b5495b", "#8d7b42")
TITLES = {"humaneval": "HumanEval", "mt_bench": "MT-Bench"}
SMOOTHING = 40  # a curve of many steps is drawn as about this many means


@contextmanager
def _figure(width: float, height: float, axes: int = 1) -> Iterator[tuple[Any, Any, list[str]]]:
    """A figure in the page's style; the list receives the SVG when it is drawn."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9,
        "font.family": "DejaVu Sans",
        "axes.edgecolor": SOFT,
        "axes.labelcolor": SOFT,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "draftmill",  # the same figures give the same bytes
    }
    out: list[str] = []
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(1, axes), out
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    head, end, rest = svg[svg.index("<svg") :].partition(">")
    # The page sets the width; the view box keeps the proportions.
    out.append(re.sub(r' (width|height)="[^"]*"', "", head) + end + rest)


def title(name: str) -> str:
    """A prompt set's name for reading."""
    return TITLES.get(name, name.replace("_", " "))


def acceptance(sets: Sequence[SetResult], draft_tokens: int) -> str:
    """Acceptance length a set, with its interval, between no draft (1) and a draft that is always right."""
    with _figure(7.2, 0.9 + 0.55 * len(sets)) as (_, axes, out):
        for row, s in enumerate(sets):
            colour = COLOURS[row % len(COLOURS)]
            axes.barh(row, s.acceptance_length - 1, left=1, height=0.5, color=colour)
            bounds = [[s.acceptance_length - s.interval.low], [s.interval.high - s.acceptance_length]]
            axes.errorbar(s.acceptance_length, row, xerr=bounds, color=INK, capsize=4, lw=1.4)
            axes.annotate(
                f"{s.acceptance_length:.2f}",
                (s.interval.high, row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                weight="bold",
            )
        axes.set_yticks(range(len(sets)), [title(s.name) for s in sets])
        axes.set_ylim(len(sets) - 0.5, -0.5)
        axes.set_xlim(1, draft_tokens + 1.02)
        axes.set_xticks(range(1, draft_tokens + 2))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"tokens a verification step (1: no draft; {draft_tokens + 1}: every drafted token accepted)")
    return out[0]


def per_position(sets: Sequence[SetResult]) -> str:
    """The share of steps that accepted each drafted position, sets side by side."""
    positions = len(sets[0].acceptance_per_position)
    width = 0.8 / len(sets)
    with _figure(7.2, 2.6) as (_, axes, out):
        for index, s in enumerate(sets):
            places = [p - 0.4 + width * (index + 0.5) for p in range(positions)]
            bars = axes.bar(
                places,
                s.acceptance_per_position,
                width * 0.92,
                color=COLOURS[index % len(COLOURS)],
                label=title(s.name),
            )
            axes.bar_label(bars, [f"{v:.0%}" for v in s.acceptance_per_position], padding=2, color=SOFT, fontsize=8)
        axes.set_xticks(range(positions), [f"draft token {p + 1}" for p in range(positions)])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        axes.set_ylabel("steps that accepted it")
        axes.legend(loc="upper right", ncols=len(sets))
    return out[0]


def curves(points: Sequence[Point]) -> str:
    """Loss and accuracy a position over the steps: training as a smoothed line, held-out as dots."""
    train = [p for p in points if p.loss is not None]
    held_out = [p for p in points if p.val_loss is not None]
    with _figure(9.0, 3.2, axes=2) as (_, axes, out):
        left, right = axes
        if train:
            left.plot([p.step for p in train], [p.loss for p in train], color=COLOURS[0], alpha=0.2, lw=0.8)
        left.plot(*smoothed(train, lambda p: p.loss), color=COLOURS[0], lw=1.8, label="training")
        if held_out:
            steps = [p.step for p in held_out]
            left.plot(steps, [p.val_loss for p in held_out], "o-", color=COLOURS[1], ms=4, lw=1.2, label="held out")
        left.set_title("Loss")
        left.legend()
        positions = max((len(p.accuracy) for p in points), default=0)
        for k in range(positions):
            colour = COLOURS[k % len(COLOURS)]
            right.plot(
                *smoothed(train, lambda p, k=k: p.accuracy[k]), color=colour, lw=1.8, label=f"draft token {k + 1}"
            )
            seen = [p for p in held_out if len(p.val_accuracy) > k]
            right.plot([p.step for p in seen], [p.val_accuracy[k] for p in seen], "o", color=colour, ms=4)
        right.set_title("Accuracy (lines: training, dots: held out)")
        right.set_ylim(0, 1)
        right.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        if positions:
            right.legend()
        for each in axes:
            each.set_xlabel("step")
    return out[0]


def smoothed(points: Sequence[Point], value: Any) -> tuple[list[float], list[float]]:
    """Means of equal groups of steps: (middle step, mean) as two lists."""
    size = max(1, len(points) // SMOOTHING)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    steps = [sum(p.step for p in g) / len(g) for g in groups]
    return steps, [sum(value(p) for p in g) / len(g) for g in groups]
