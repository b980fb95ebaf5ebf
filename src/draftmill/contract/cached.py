"""A pair's report, made once: it is kept under the hashes of both trees and of the audit's own source."""

import hashlib
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from draftmill.contract.audit import audit
from draftmill.contract.findings import Report
from draftmill.contract.propose import compared
from draftmill.contract.sources import Tree


def judged(trees: tuple[Tree, Tree], declared: Tree | None, cache: Path) -> Report:
    """The report on a pair, from the cache where both trees, and this audit's own source, are the same as then."""
    kept = judged_before(trees, declared, cache)
    if kept is not None:
        return kept
    now = audit(*trees)
    report = compared(now, audit(trees[0], declared)) if declared else now.report
    path = _path(trees, declared, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(report.model_dump_json(), encoding="utf-8")
    temporary.replace(path)
    return report


def judged_before(trees: tuple[Tree, Tree], declared: Tree | None, cache: Path) -> Report | None:
    """The kept report; None where there is none, or it was cut off."""
    path = _path(trees, declared, cache)
    try:
        return Report.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _path(trees: tuple[Tree, Tree], declared: Tree | None, cache: Path) -> Path:
    parts = [*(tree.digest for tree in trees), *(tree.label for tree in trees)]
    parts += [declared.digest if declared else "", sys.version, _own()]
    return cache / "reports" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"


def _own() -> str:
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
