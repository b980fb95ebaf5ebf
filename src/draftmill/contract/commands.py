"""`draftmill audit`: one pair judged, or one consumer against every release of its provider."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftmill.contract import matrix, output
from draftmill.contract.cached import judged
from draftmill.contract.findings import allow, allowances, schema
from draftmill.contract.sources import CACHE, open_tree
from draftmill.errors import AuditError

app = typer.Typer(
    help="Check every call that one package makes into another, from their sources alone. SPEC is a folder, a wheel, "
    "an sdist or name==version. Exit codes: 0 nothing broken, 1 broken, 2 no verdict.",
    no_args_is_help=True,
)

Consumer = Annotated[str, typer.Option(help="SPEC of the package that calls.")]
Provider = Annotated[str, typer.Option(help="SPEC of the package that is called.")]
Cache = Annotated[Path, typer.Option(help="Where sources and reports are kept, by hash.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    consumer: Consumer = "",
    provider: Provider = "",
    declared: Annotated[
        str,
        typer.Option(
            help="SPEC of the provider that the consumer was written for: adds proposals and changed defaults."
        ),
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the report here as Markdown.")] = None,
    explain: Annotated[str, typer.Option(help="Say all about the uses whose text holds this.")] = "",
    allow_: Annotated[
        Path | None,
        typer.Option("--allow", help="Findings that are known: TOML tables `allow`, each with file, use and reason."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what is compatible too.")] = False,
    show_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON report's schema, and end.")] = False,
    cache: Cache = CACHE,
) -> None:
    """Judges one pair."""
    if context.invoked_subcommand is not None:
        return
    if show_schema:
        typer.echo(schema(), nl=False)
        return
    if not consumer or not provider:
        raise AuditError("--consumer and --provider are both needed", next_step="see `draftmill audit --help`")
    trees = (open_tree(consumer, cache), open_tree(provider, cache))
    report = judged(trees, open_tree(declared, cache) if declared else None, cache)
    if allow_ is not None:
        report = allow(report, allowances(allow_))
    console = Console()
    if explain:
        if not output.explain(console, report, trees, explain):
            raise AuditError(f"no use holds {explain!r}", next_step="`--all` lists every use")
    else:
        output.print_table(console, report, trees, everything=everything)
    if json:
        output.write_json(report, json)
    if markdown:
        output.write_markdown(report, trees, markdown)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@app.command("matrix")
def matrix_(
    consumer: Consumer,
    provider: Annotated[str, typer.Option(help="The provider's name on the package index.")],
    versions: Annotated[str, typer.Option(help="FIRST..LAST, both included, or a list with commas.")],
    image: Annotated[Path | None, typer.Option(help="Draw the heat map here (PNG, SVG or PDF).")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the matrix here as JSON.")] = None,
    cache: Cache = CACHE,
) -> None:
    """One consumer against every release of its provider: how many uses break, and which release first broke each."""
    made = matrix.build(open_tree(consumer, cache), provider, matrix.chosen(provider, versions), cache)
    matrix.print_matrix(Console(), made)
    if json:
        json.write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if image:
        matrix.draw(made, image)
