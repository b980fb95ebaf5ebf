"""The audit on the installed stack: the gate for the patched speculators, and its reading held against Python's own."""

import importlib
import importlib.util
import inspect
from inspect import Parameter
from typing import Any

import pytest

from draftmill import patches
from draftmill.contract import binding, signatures
from draftmill.contract.audit import Audit, audit
from draftmill.contract.propose import callee_contract
from draftmill.contract.sources import Tree, open_tree

UNRESOLVED = 0.05


def installed(name: str) -> Tree:
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations
    return open_tree(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def result() -> Audit:
    return audit(installed("speculators"), installed("vllm"))


def test_nothing_that_the_patched_speculators_asks_of_vllm_is_broken(result: Audit) -> None:
    report = result.report
    broken = [f"{f.consumer}: {f.use}: {f.message}" for f in report.findings if f.verdict == "broken"]
    assert broken == []
    assert report.count("compatible") > 60
    assert report.count("unresolved") <= UNRESOLVED * len(report.findings)


WORKER = "speculators/data_generation/custom_worker.py"
GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"
# What running the pristine 0.3.0 found one crash after the other, and where the patches' reasons are.
DRIFT = {
    "D1": ("missing argument", f"{GENERATOR}:194", "is_encoder_decoder"),
    "D2": ("unknown argument", f"{GENERATOR}:136", "kv_cache_specs"),
    "D3": ("unknown argument", f"{GENERATOR}:234", "eos_token_id"),
    "D4": ("missing argument", f"{GENERATOR}:148", "block_size"),
    "D5": ("missing attribute", f"{WORKER}:30", "get_input_embeddings"),
    "D6": ("return shape", f"{GENERATOR}:267", "unique_reply_rank"),
    "D10": ("override mismatch", f"{WORKER}:17", "extra_layer_kwargs"),
    "six nested targets": ("missing attribute", f"{WORKER}:107", "have no attribute 'model'"),
}


@pytest.fixture(scope="module")
def pristine() -> Audit:
    return audit(open_tree(str(patches.pristine())), installed("vllm"))


@pytest.mark.parametrize("name", DRIFT)
def test_the_pristine_release_breaks_where_it_crashes(pristine: Audit, name: str) -> None:
    kind, place, words = DRIFT[name]
    found = [f for f in pristine.report.findings if str(f.consumer) == place and f.verdict == "broken"]
    assert [f.kind for f in found] == [kind]
    assert words in found[0].message


def test_the_pristine_release_breaks_nowhere_else(pristine: Audit) -> None:
    broken = {str(f.consumer) for f in pristine.report.findings if f.verdict == "broken"}
    assert broken == {place for _, place, _ in DRIFT.values()}


def test_what_looks_changed_and_is_not(pristine: Audit) -> None:
    """OK1: three definitions have this name, and only the executor's is the contract."""
    uses = [f for f in pristine.report.findings if f.use.startswith("self.executor.initialize_from_config")]
    assert [(f.verdict, str(f.provider)) for f in uses] == [("compatible", "vllm/v1/executor/abstract.py:112")]
    path = "\n".join(uses[0].path)
    assert "MultiprocExecutor (vllm/v1/executor/multiproc_executor.py:95) inherits it" in path
    for other in ("vllm/v1/worker/worker_base.py:316", "vllm/v1/worker/gpu_worker.py:464"):
        assert any(step.startswith("not ") and other in step for step in uses[0].path), other


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
