"""The command: its outputs, its exit codes, the allowances, the matrix and the proposals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftmill.contract import app, commands, findings, matrix
from draftmill.contract.audit import Audit
from draftmill.contract.findings import Report
from draftmill.contract.propose import compared
from draftmill.errors import AuditError, DraftmillError

Audited = Callable[..., Audit]
Wheel = Callable[..., Path]
PROVIDER = "def f(a, b): ...\ndef g(): ...\n"
USED = "from provider import f, g\nf(1)\ng()\n"
FITS = "from provider import g\ng()\n"


@pytest.fixture
def run(audited: Audited, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command on a pair; the folders of the pair are those that the last audit wrote."""

    def invoke(consumer: str, *options: str, provider: str = PROVIDER) -> Result:
        made = audited(provider, consumer)
        trees = [str(tree.root / tree.label) for tree in (made.consumer, made.provider)]
        words = ["--consumer", trees[0], "--provider", trees[1], "--cache", str(tmp_path / "cache"), *options]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return invoke


def test_exit_codes(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run(FITS).exit_code == 0
    assert run(USED).exit_code == 1
    assert run("x = 1\n").exit_code == 2
    gone = CliRunner().invoke(app, ["--consumer", str(tmp_path / "gone"), "--provider", str(tmp_path)])
    assert isinstance(gone.exception, AuditError) and gone.exception.exit_code == 2
    assert isinstance(gone.exception, DraftmillError)


def test_the_table_shows_both_lines_and_what_does_not_fit(run: Callable[..., Result]) -> None:
    text = run(USED).stdout
    assert "broken: 1" in text and "missing a required argument: 'b'" in text
    assert "consumer/__init__.py:2" in text and "f(1)" in text
    assert "provider/__init__.py:1" in text and "def f(a, b): ..." in text
    assert "4 uses: 1 broken, 0 unresolved, 3 compatible" in text
    assert "g()" not in text
    assert "compatible: 3" in run(USED, "--all").stdout


def test_json_is_what_the_published_schema_says(run: Callable[..., Result], tmp_path: Path) -> None:
    run(USED, "--json", str(tmp_path / "out" / "report.json"))
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert Report.model_validate(data).exit_code == 1
    (broken,) = [finding for finding in data["findings"] if finding["verdict"] == "broken"]
    assert broken["kind"] == "missing argument" and broken["use"] == "f(1)" and broken["path"] == []
    assert broken["consumer"] == {"file": "consumer/__init__.py", "line": 2}
    assert broken["provider"] == {"file": "provider/__init__.py", "line": 1}
    assert broken["signature"] == "provider.f(a, b)"
    published = Path(findings.__file__).with_name("report.schema.json").read_text()
    assert published == CliRunner().invoke(app, ["--schema"]).stdout


def test_markdown_and_explain(run: Callable[..., Result], tmp_path: Path) -> None:
    told = run(USED, "--markdown", str(tmp_path / "report.md"), "--explain", "f(1)")
    text = (tmp_path / "report.md").read_text()
    assert "#### broken: 1" in text and "# provider/__init__.py:1\ndef f(a, b): ..." in text
    assert "broken missing argument" in told.stdout and "signature: provider.f(a, b)" in told.stdout
    assert told.exit_code == 1
    assert isinstance(run(USED, "--explain", "nowhere").exception, AuditError)


def test_an_allowance_needs_a_reason_and_is_reported_once_it_is_not_needed(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "allow.toml"
    entry = '[[allow]]\nfile = "consumer/__init__.py"\nuse = "f(1)"\nreason = "{}"\n'
    file.write_text(entry.format("never reached"))
    assert run(USED, "--allow", str(file)).exit_code == 0
    unused = run(FITS, "--allow", str(file))
    assert unused.exit_code == 1 and "no longer broken" in unused.stdout
    file.write_text(entry.format(" "))
    assert isinstance(run(USED, "--allow", str(file)).exception, AuditError)
    file.write_text("[[allow]]\nwrong = 1\n")
    assert isinstance(run(USED, "--allow", str(file)).exception, AuditError)


def test_a_second_audit_of_the_same_sources_is_read_from_the_cache(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(USED)
    monkeypatch.setattr("draftmill.contract.cached.audit", None)
    assert run(USED).stdout == first.stdout
    assert run(USED + "g(1)\n").exception is not None


PROPOSALS = {
    "renamed": ("def f(a: int, b: str): ...", "def f(a: int, text: str): ...", "b was renamed text"),
    "removed": ("def f(a: int, b: str): ...", "def f(a: int): ...", "b was removed"),
    "made required": ("def f(a=1, b='', c=0): ...", "def f(c: int, a=1, b=''): ...", "c: int was made required"),
    "new": ("def f(a, b): ...", "def f(a, b, *, c: int): ...", "c: int is new, and required"),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_proposals_say_what_became_of_a_parameter(audited: Audited, name: str) -> None:
    before, now, words = PROPOSALS[name]
    consumer = "from provider import f\nf(a=1, b='')\n"
    report = compared(audited(now + "\n", consumer), audited(before + "\n", consumer))
    (broken,) = [finding for finding in report.findings if finding.verdict == "broken"]
    assert words in broken.proposal


def test_proposals_for_a_method_and_for_an_import(audited: Audited) -> None:
    consumer = "from provider.a import A, f\nA().old(1)\n"
    before = {"a.py": "class A:\n    def old(self, x: int) -> int: ...\ndef f(): ...\n"}
    now = {"a.py": "class A:\n    def new(self, x: int) -> int: ...\n", "b.py": "def f(): ...\n"}
    report = compared(audited(now, consumer), audited(before, consumer))
    told = [finding.proposal for finding in report.findings if finding.verdict == "broken"]
    assert "now provider.b defines a f" in told[0] and "renamed new (same signature" in told[1]


def test_a_default_that_changed_under_a_call_is_told(audited: Audited) -> None:
    consumer = "from provider import f\nf(1)\nf(1, b=2)\n"
    report = compared(audited("def f(a, b=True): ...\n", consumer), audited("def f(a, b=None): ...\n", consumer))
    (changed,) = [finding for finding in report.findings if finding.kind == "changed default"]
    assert changed.consumer.line == 2 and "b was None, is True" in changed.message


def test_the_matrix_says_which_release_first_broke_each_use(
    served: tuple[Path, list[str]], wheel: Wheel, tmp_path: Path, audited: Audited
) -> None:
    releases = {"1.0": "def f(a): ...\n", "1.1": "def f(a, b=1): ...\n", "1.2": "def f(a, b): ...\n", "2.0": "\n"}
    for version, text in releases.items():
        wheel(served[0], {"thing/__init__.py": text}, name=f"thing-{version}-py3-none-any.whl")
    consumer = audited("", "from thing import f\nf(1)\n").consumer
    cache = tmp_path / "cache"
    assert matrix.chosen("thing", "1.0..1.2") == ["1.0", "1.1", "1.2"]
    made = matrix.build(consumer, "thing", matrix.chosen("thing", "1.0..2.0"), cache)
    assert [made.broken(version) for version in made.versions] == [0, 0, 1, 1]
    assert {row.use: row.first_broken for row in made.rows} == {"f(1)": "1.2", "from thing import f": "2.0"}
    (call,) = [row for row in made.rows if row.how == "call"]
    assert call.states == ["compatible", "compatible", "broken", ""]
    assert "b was made required (its default was 1)" in call.proposal
    image = tmp_path / "drift.png"
    matrix.draw(made, image)
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 5_000


def test_the_matrix_command(served: tuple[Path, list[str]], wheel: Wheel, tmp_path: Path, audited: Audited) -> None:
    wheel(served[0], {"thing/__init__.py": "def f(a, b): ...\n"})
    tree = audited("", "from thing import f\nf(1)\n").consumer
    words = ["matrix", "--consumer", str(tree.root / "consumer"), "--provider", "thing", "--cache", str(tmp_path / "c")]
    done = CliRunner().invoke(commands.app, [*words, "--versions", "1.0", "--json", str(tmp_path / "m.json")])
    assert done.exit_code == 0 and "f(1)" in done.stdout
    assert matrix.Matrix.model_validate_json((tmp_path / "m.json").read_text()).broken("1.0") == 1
    assert isinstance(CliRunner().invoke(commands.app, [*words, "--versions", "7..9"]).exception, AuditError)
    assert isinstance(CliRunner().invoke(commands.app, [*words, "--versions", "x..y"]).exception, AuditError)
