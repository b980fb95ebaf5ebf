"""A report as a table for people, as JSON, and as Markdown for a pull request."""

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftmill.contract.findings import VERDICTS, Finding, Report
from draftmill.contract.sources import Tree

STYLES = {"broken": "bold red", "unresolved": "yellow", "compatible": "green"}
FENCE = "```"


def line_of(trees: tuple[Tree, ...], file: str, line: int) -> str:
    """The text of one source line, from the tree that has the file; empty where none has."""
    for tree in trees:
        path = tree.root / file
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            return lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return ""


def print_table(console: Console, report: Report, trees: tuple[Tree, Tree], *, everything: bool = False) -> None:
    """Broken first, then unresolved, each with the two source lines under it; the compatible ones only with
    `everything`."""
    for verdict in reversed(VERDICTS):  # what is broken stands last, where a terminal and a build's log end
        found = [finding for finding in report.findings if finding.verdict == verdict]
        if not found or (verdict == "compatible" and not everything):
            continue
        title = f"{verdict}: {len(found)}"
        table = Table(title=title, title_style=STYLES[verdict], title_justify="left", expand=True, show_lines=True)
        for column in ("consumer, and provider", "what"):
            table.add_column(column, ratio=1, overflow="fold")
        for finding in found:
            table.add_row(*_row(finding, trees))
        console.print(table)
    changed = [finding for finding in report.findings if finding.kind == "changed default"]
    for finding in changed if not everything else ():
        console.print(f"{finding.consumer}: {finding.use}: {finding.message}", markup=False, style="yellow")
    for text in (*report.unused_allowances, *report.unreadable):
        console.print(text, markup=False, style="red")
    console.print(summary(report), markup=False)


def _row(finding: Finding, trees: tuple[Tree, Tree]) -> tuple[str, str]:
    here = line_of(trees[:1], finding.consumer.file, finding.consumer.line)
    place = finding.provider
    there = line_of(trees[::-1], place.file, place.line) if place else ""
    places = [f"{finding.consumer}", f"  {here}", *([f"{place}", f"  {there}"] if place else [])]
    was, dash, replaced = finding.proposal.partition(" — ")
    parts = [finding.message, f"{was.partition(':')[0]}: {replaced}" if dash else was]
    what = [f"[bold]{escape(finding.kind or finding.how)}[/]", *map(escape, [finding.use, *filter(None, parts)])]
    return escape("\n".join(places)), "\n".join(what)


def summary(report: Report) -> str:
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in VERDICTS)
    return f"{report.consumer} against {report.provider}: {len(report.findings)} uses: {counts}"


def explain(console: Console, report: Report, trees: tuple[Tree, Tree], text: str) -> int:
    """All that is known of the uses whose text holds `text`; returns how many there are."""
    found = [finding for finding in report.findings if text in finding.use]
    for finding in found:
        console.print(f"{finding.consumer}: {finding.use}", markup=False, style="bold")
        console.print(f"  {line_of(trees[:1], finding.consumer.file, finding.consumer.line)}", markup=False)
        console.print(f"  {finding.verdict} {finding.kind}".rstrip(), markup=False, style=STYLES[finding.verdict])
        for label, value in (("because", finding.message), ("signature", finding.signature), ("was", finding.proposal)):
            if value:
                console.print(f"  {label}: {value}", markup=False)
        if finding.provider:
            source = line_of(trees[::-1], finding.provider.file, finding.provider.line)
            console.print(f"  provider: {finding.provider}: {source}", markup=False)
        for step in finding.path:
            console.print(f"    {step}", markup=False)
    return len(found)


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_markdown(report: Report, trees: tuple[Tree, Tree], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(report, trees), encoding="utf-8")


def markdown(report: Report, trees: tuple[Tree, Tree]) -> str:
    rows = [f"### Contract audit: `{report.consumer}` against `{report.provider}`", "", summary(report) + "."]
    for verdict in VERDICTS:
        found = [finding for finding in report.findings if finding.verdict == verdict]
        if not found:
            continue
        if verdict == "compatible":
            rows += ["", f"<details><summary>compatible: {len(found)}</summary>", ""]
            rows += [f"- `{f.consumer}` `{f.use}` → `{f.provider or '—'}` {f.message}".rstrip() for f in found]
            rows += ["", "</details>"]
            continue
        rows += ["", f"#### {verdict}: {len(found)}"]
        for finding in found:
            rows += _block(finding, trees)
    rows += [f"- {text}" for text in (*report.unused_allowances, *report.unreadable)]
    return "\n".join(rows) + "\n"


def _block(finding: Finding, trees: tuple[Tree, Tree]) -> list[str]:
    place = finding.provider
    rows = ["", f"**{finding.kind or finding.how}**: `{finding.use}`: {finding.message}", "", FENCE + "python"]
    rows += [f"# {finding.consumer}", line_of(trees[:1], finding.consumer.file, finding.consumer.line)]
    if place:
        rows += [f"# {place}", line_of(trees[::-1], place.file, place.line)]
    rows.append(FENCE)
    rows += [f"- {step}" for step in finding.path]
    return rows + ([f"- {finding.proposal}"] if finding.proposal else [])
