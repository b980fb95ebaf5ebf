"""The audit on the installed stack: the gate for the patched speculators, and its reading held against Python's own."""

import importlib
import importlib.util
import inspect
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

from draftmill.contract import binding, signatures
from draftmill.contract.audit import Audit, audit
from draftmill.contract.findings import allow, allowances
from draftmill.contract.propose import callee_contract
from draftmill.contract.sources import Tree, open_tree

ALLOWED = Path(__file__).parents[2] / "patches" / "speculators" / "audit-allow.toml"
UNRESOLVED = 0.05


def installed(name: str) -> Tree:
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations
    return open_tree(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def result() -> Audit:
    return audit(installed("speculators"), installed("vllm"))


def test_nothing_that_the_patched_speculators_asks_of_vllm_is_broken(result: Audit) -> None:
    report = allow(result.report, allowances(ALLOWED) if ALLOWED.exists() else [])
    broken = [f"{f.consumer}: {f.use}: {f.message}" for f in report.findings if f.verdict == "broken"]
    assert broken == []
    assert report.unused_allowances == []
    assert report.count("compatible") > 60
    assert report.count("unresolved") <= UNRESOLVED * len(report.findings)


def contracts(result: Audit) -> dict[str, signatures.Contract]:
    found = {}
    for use, finding in result.judged:
        if use.how == "call" and finding.verdict == "compatible":
            contract = callee_contract(result.types, use)
            if contract is not None and contract.signature is not None and contract.name.startswith("vllm."):
                found[contract.name] = contract
    return found


def imported(name: str) -> Any:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def shape(parameters: list[Parameter]) -> list[tuple[str, str, bool]]:
    return [(p.name, p.kind.name, p.default is not Parameter.empty) for p in parameters]


def test_signatures_as_read_are_those_of_the_imported_targets(result: Audit) -> None:
    """For every target that speculators calls: the same names, kinds and required ones as Python finds on the real
    object."""
    targets = contracts(result)
    assert len(targets) >= 15, sorted(targets)
    different = {}
    for name, contract in targets.items():
        assert contract.signature is not None
        real = list(inspect.signature(imported(name)).parameters.values())
        if contract.func is not None and contract.func.owner is not None and real and real[0].name in ("self", "cls"):
            real = real[1:]
        if shape(list(contract.signature.parameters.values())) != shape(real):
            different[name] = (contract.text, str(inspect.signature(imported(name))))
    assert different == {}


def test_calls_that_fit_as_read_fit_the_imported_targets(result: Audit) -> None:
    count = 0
    for use, finding in result.judged:
        if use.how != "call" or finding.verdict != "compatible":
            continue
        contract = callee_contract(result.types, use)
        if contract is None or contract.signature is None or not contract.name.startswith("vllm."):
            continue
        given = binding.arguments(result.types, use.node, use.scope)
        real = inspect.signature(imported(contract.name))
        me = [object()] if next(iter(real.parameters), "") in ("self", "cls") else []
        (real.bind_partial if given.partial else real.bind)(*me, *given.positional, **given.keywords)
        count += 1
    assert count >= 15
