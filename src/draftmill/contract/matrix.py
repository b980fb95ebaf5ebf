"""One consumer against every release of a provider: how many uses break, which release first broke each, and a heat
map."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from draftmill.contract import index
from draftmill.contract.cached import judged, judged_before
from draftmill.contract.findings import Report
from draftmill.contract.sources import Tree, open_tree
from draftmill.errors import AuditError

Pair = tuple[tuple[Tree, Tree], Tree | None]  # consumer and provider, and the provider to compare with
STATES = ("compatible", "unresolved", "broken")


class Row(BaseModel):
    """One use; `states` holds its verdict in each version, in the matrix's order, "" where it does not arise."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    file: str
    line: int
    how: str
    use: str
    states: list[str]
    first_broken: str
    message: str
    proposal: str


class Matrix(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    consumer: str
    provider: str
    versions: list[str]
    rows: list[Row]

    def broken(self, version: str) -> int:
        at = self.versions.index(version)
        return sum(row.states[at] == "broken" for row in self.rows)


def chosen(provider: str, text: str) -> list[str]:
    """The releases that `text` (FIRST..LAST, or a list with commas) names.

    Raises:
        AuditError: it is neither, or names no release.
    """
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [str(Version(part.strip())) for part in text.split(",") if part.strip()]
        low, high = Version(first), Version(last)
    except InvalidVersion as error:
        raise AuditError(f"--versions {text}: {error}", next_step="as in: 0.11.0..0.17.0, or 0.11.0,0.17.0") from error
    found = [str(version) for version in index.versions(provider) if low <= version <= high]
    if not found:
        raise AuditError(f"the package index has no release of {provider} from {first} to {last}")
    return found


def build(consumer: Tree, provider: str, versions: list[str], cache: Path) -> Matrix:
    """Judges `consumer` against each version, the sources of each fetched if they are not there.

    Where a use breaks that bound in the version before, the two are compared, for the proposal.
    """
    trees = [open_tree(f"{provider}=={version}", cache) for version in versions]
    reports = _judge([((consumer, tree), None) for tree in trees], cache)
    first = {row.first_broken for row in _rows(reports, versions)}
    steps = [at for at, version in enumerate(versions) if at and version in first]
    told = _judge([((consumer, trees[at]), trees[at - 1]) for at in steps], cache)
    for at, report in zip(steps, told, strict=True):
        reports[at] = report
    return Matrix(consumer=consumer.label, provider=provider, versions=versions, rows=_rows(reports, versions))


def _judge(pairs: list[Pair], cache: Path) -> list[Report]:
    """Each pair in a process of its own, so that its memory is given back; as many at once as there are processors."""
    kept = [judged_before(trees, declared, cache) for trees, declared in pairs]
    missing = [pair for pair, report in zip(pairs, kept, strict=True) if report is None]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        fresh = iter(list(pool.map(judged, *zip(*missing, strict=True), [cache] * len(missing))) if missing else [])
    return [next(fresh) if report is None else report for report in kept]


def _rows(reports: list[Report], versions: list[str]) -> list[Row]:
    uses: dict[tuple[str, int, str, str], list[str]] = {}
    said: dict[tuple[str, int, str, str], tuple[str, str, str]] = {}
    for at, report in enumerate(reports):
        for finding in report.findings:
            if finding.how == "default":
                continue
            how = "setting" if finding.how == "replacement" else finding.how
            key = (finding.consumer.file, finding.consumer.line, how, finding.use)
            states = uses.setdefault(key, [""] * len(reports))
            if not states[at] or STATES.index(finding.verdict) > STATES.index(states[at]):
                states[at] = finding.verdict
            if finding.verdict == "broken" and key not in said:
                said[key] = (versions[at], finding.message, finding.proposal)
    return [
        Row(
            file=key[0],
            line=key[1],
            how=key[2],
            use=key[3],
            states=states,
            first_broken=said.get(key, ("", "", ""))[0],
            message=said.get(key, ("", "", ""))[1],
            proposal=said.get(key, ("", "", ""))[2],
        )
        for key, states in sorted(uses.items())
    ]


def print_matrix(console: Console, made: Matrix) -> None:
    counts = Table(title=f"{made.consumer} against {made.provider}", title_justify="left")
    for column in ("version", "broken", "unresolved", "first broken here"):
        counts.add_column(column, overflow="fold")
    for at, version in enumerate(made.versions):
        new = [f"{Path(r.file).name}:{r.line} {r.use}" for r in made.rows if r.first_broken == version]
        unresolved = sum(row.states[at] == "unresolved" for row in made.rows)
        counts.add_row(version, str(made.broken(version)), str(unresolved), "\n".join(new))
    console.print(counts)
    for row in made.rows:
        if row.first_broken and row.proposal:
            console.print(f"{row.file}:{row.line}: {row.first_broken}: {row.proposal}", markup=False)


def draw(made: Matrix, path: Path) -> None:
    """A heat map, uses by versions: green compatible, yellow unresolved, red broken, white where the use does not
    arise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = [row for row in made.rows if any(state in ("broken", "unresolved") for state in row.states)] or made.rows
    values = [[(("", *STATES).index(state)) for state in row.states] for row in rows]
    figure, axes = pyplot.subplots(
        figsize=(3 + 0.32 * len(made.versions) + 4, 1.6 + 0.24 * len(rows)), layout="constrained"
    )
    colours = ("white", "#4c9f70", "#f2c14e", "#c8553d")
    axes.imshow(values, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto")
    axes.set_xticks(range(len(made.versions)), made.versions, rotation=90, fontsize=7)
    labels = [f"{Path(row.file).name}:{row.line} {row.use[:48]}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=6, family="monospace")
    hidden = len(made.rows) - len(rows)
    note = f" ({hidden} uses that fit every version are left out)" if hidden else ""
    axes.set_title(f"{made.consumer} against {made.provider}{note}", fontsize=9, loc="left")
    handles = [Patch(color=colour, label=state) for state, colour in zip(STATES, colours[1:], strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
