"""Whether a machine is fit for a run: every reading of `node` judged by the tables of `checks`. It changes nothing."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftmill.doctor import checks
from draftmill.doctor.rows import GB, Profile, Row
from draftmill.errors import NodeError
from draftmill.node import Node, Unread, node

COLOURS = {"ok": "green", "warn": "yellow", "critical": "red", "unknown": "magenta"}
PROFILES = {
    one.name: one
    for one in (
        Profile(
            name="blackwell-8",
            gpus=8,
            exactly=True,
            card="RTX PRO 6000",
            capability=(12, 0),
            memory=500 * GB,
            disk=1000 * GB,
        ),
        Profile(name="any-gpu", gpus=1, memory=30 * GB, disk=50 * GB),
        Profile(name="cpu", gpus=0, memory=12 * GB, disk=5 * GB),
    )
}


def judge(machine: Node, profile: Profile) -> list[Row]:
    """All rows of a machine, in the order of the tables."""
    tables = checks.HOST + (checks.GPUS if profile.gpus else ())
    rows = [check.row(machine, profile) for check in tables if check.when(machine, profile)]
    if profile.gpus and not isinstance(machine.gpus, Unread):
        for gpu in machine.gpus:
            rows += [check.row(gpu, profile, f"GPU {gpu.index}") for check in checks.CARD if check.when(gpu, profile)]
    return rows


def profile_of(name: str) -> Profile:
    """What a machine is to be.

    Raises:
        NodeError: there is no profile of that name.
    """
    if name not in PROFILES:
        raise NodeError(f"there is no profile {name}", next_step=f"name one of {', '.join(PROFILES)}")
    return PROFILES[name]


def exit_code(rows: list[Row]) -> int:
    """0: usable; 1: something critical; 2: no verdict, since something could not be read."""
    verdicts = {one.verdict for one in rows}
    return 1 if "critical" in verdicts else 2 if "unknown" in verdicts else 0


def as_json(profile: Profile, rows: list[Row]) -> str:
    """The rows as a JSON object: `profile`, `exit_code`, `rows`."""
    given = {"profile": profile.name, "exit_code": exit_code(rows), "rows": [dataclasses.asdict(one) for one in rows]}
    return json.dumps(given, indent=2, ensure_ascii=False)


def doctor(
    profile: Annotated[str, typer.Option(help=f"What the machine is to be: {', '.join(PROFILES)}.")] = "any-gpu",
    output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    runs: Annotated[Path, typer.Option(help="Where the runs will go.")] = Path("runs"),
    every: Annotated[bool, typer.Option("--all", help="Show what is as it should be, too.")] = False,
) -> None:
    """`draftmill doctor`: ends with 0 (usable), 1 (not) or 2 (no verdict: something could not be read)."""
    wanted = profile_of(profile)
    machine = node(runs)
    rows = judge(machine, wanted)
    if output:
        typer.echo(as_json(wanted, rows))
    else:
        if isinstance(machine.gpus, Unread):
            typer.echo(f"no GPU was found: {machine.gpus.reason}")
        show(rows, every=every)
        good = sum(one.verdict == "ok" for one in rows)
        verdict = ("usable", "not usable", "no verdict, since something could not be read")[exit_code(rows)]
        typer.echo(f"{profile}: {verdict}; {good} of {len(rows)} checks are ok")
    raise typer.Exit(exit_code(rows))


def show(rows: list[Row], *, every: bool) -> None:
    """Prints a table of what is not as it should be, or of all."""
    table = Table("what", "found", "wanted", "verdict", "what to do")
    for one in rows:
        if every or one.verdict != "ok":
            colour = COLOURS[one.verdict]
            table.add_row(one.what, one.found, one.wanted, f"[{colour}]{one.verdict}[/]", one.do)
    if table.rows:
        Console().print(table)
