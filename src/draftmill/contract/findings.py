"""Findings as values, the report that holds them, and the list of findings that are known and justified."""

import json
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill.errors import AuditError

Verdict = Literal["compatible", "broken", "unresolved"]
Kind = Literal[
    "",
    "missing target",
    "missing argument",
    "unknown argument",
    "too many positionals",
    "override mismatch",
    "missing attribute",
    "return shape",
    "changed default",
]
VERDICTS: tuple[Verdict, ...] = ("broken", "unresolved", "compatible")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Place(_Strict):
    """A line of a source file; the file is relative to the tree that holds the package."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Finding(_Strict):
    """The verdict on one use of the provider.

    `how` is the sort of use (import, attribute, call, remote call, class name, subclass, override, replacement,
    setting), `use` its source text, `signature` what the provider defines, `path` how that was reached, `message`
    what does not fit (Python's own words where it is a call), why it is unresolved, or what is worth knowing though
    it fits.
    """

    verdict: Verdict
    kind: Kind = ""
    how: str
    use: str
    consumer: Place
    provider: Place | None = None
    signature: str = ""
    path: list[str] = []
    message: str = ""
    proposal: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.consumer.file, self.how, self.use, self.kind)


class Report(_Strict):
    """All findings on one pair, in the order of the consumer's files and lines. `unused_allowances` were allowed, not
    found."""

    schema_version: Literal[1] = 1
    consumer: str
    provider: str
    findings: list[Finding]
    unused_allowances: list[str] = []
    unreadable: list[str] = []

    def count(self, verdict: Verdict) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0: nothing broken; 1: something is, or an allowance is no longer needed; 2: no verdict could be reached."""
        if self.count("broken") or self.unused_allowances:
            return 1
        return 0 if self.count("compatible") else 2


class Allowance(_Strict):
    """A broken finding that is known: `file` and `use` as the report shows them, and the reason why it may stay."""

    file: str
    use: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return self.file == finding.consumer.file and self.use == finding.use


def allowances(path: Path) -> list[Allowance]:
    """Reads `[[allow]]` tables with `file`, `use` and `reason` from a TOML file.

    Raises:
        AuditError: the file is missing or malformed, or an entry has no reason.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("allow", [])
        found = [Allowance.model_validate(table) for table in tables]
    except OSError as error:
        raise AuditError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError, AttributeError) as error:
        raise AuditError(
            f"{path} is no list of allowances: {error}", next_step="each [[allow]] has file, use and reason"
        ) from error
    for entry in found:
        if not entry.reason.strip():
            raise AuditError(f"{path}: {entry.use} has no reason", next_step="say why it may stay")
    return found


def allow(report: Report, entries: list[Allowance]) -> Report:
    """The report with the allowed findings made compatible, the reason in their message, and what was not found."""
    used: set[int] = set()
    found: list[Finding] = []
    for finding in report.findings:
        entry = next((e for e in entries if finding.verdict == "broken" and e.covers(finding)), None)
        if entry is None:
            found.append(finding)
            continue
        used.add(id(entry))
        message = f"allowed: {entry.reason} ({finding.kind}: {finding.message})"
        found.append(finding.model_copy(update={"verdict": "compatible", "message": message}))
    unused = [f"{e.file}: {e.use}: allowed ({e.reason}), but no longer broken" for e in entries if id(e) not in used]
    return report.model_copy(update={"findings": found, "unused_allowances": unused})


def schema() -> str:
    """The published schema of the JSON report."""
    return json.dumps(Report.model_json_schema(), indent=2, sort_keys=True) + "\n"
