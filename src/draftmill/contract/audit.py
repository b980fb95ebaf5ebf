"""Judging: each use of the provider put to what the provider's source defines."""

import ast
import gc
from collections.abc import Callable
from dataclasses import dataclass

from draftmill.contract import calls, guards, overrides, verdicts
from draftmill.contract.calls import Use
from draftmill.contract.evidence import Evidence, finding
from draftmill.contract.findings import Finding, Report
from draftmill.contract.modules import Module, World
from draftmill.contract.names import Meaning
from draftmill.contract.reach import unreached
from draftmill.contract.sources import Tree
from draftmill.contract.types import Types
from draftmill.contract.values import Cls

EXPECTED = {
    "import": {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"},
    "attribute": {"AttributeError"},
    "call": {"TypeError", "AttributeError"},
}


@dataclass(frozen=True, eq=False)
class Audit:
    """One pair, judged: each finding with the use that it is about, and what the sources say."""

    consumer: Tree
    provider: Tree
    types: Types
    judged: tuple[tuple[Use, Finding], ...]
    unreadable: tuple[str, ...]

    @property
    def report(self) -> Report:
        return Report(
            consumer=self.consumer.label,
            provider=self.provider.label,
            findings=[finding for _, finding in self.judged],
            unreadable=list(self.unreadable),
        )


def audit(consumer: Tree, provider: Tree) -> Audit:
    """Every use that `consumer` makes of `provider`, judged. Nothing of either is imported or run."""
    collecting = gc.isenabled()
    gc.disable()  # millions of syntax nodes that stay: looking through them for garbage doubles the time
    try:
        types = Types(World(consumer, provider))
        modules = calls.consumer_modules(types)
        calls.prepare(types, modules)
        calls.settle(types)
        judged = [pair for module in modules for pair in _module(types, module)]
    finally:
        gc.freeze()  # and they are still looked through once, when the collector comes back, unless it is told not to
        if collecting:
            gc.enable()
    judged.sort(key=lambda pair: _order(pair[1]))
    errors = tuple(module.error for module in types.world.known if module.error)
    return Audit(consumer, provider, types, tuple(judged), errors)


def _module(types: Types, module: Module) -> list[tuple[Use, Finding]]:
    try:
        return [(use, one) for use in calls.uses(types, module) for one in judge(types, use)]
    except RecursionError:
        module.error = f"{module.place} is nested too deeply to be read"
        return []


def _order(found: Finding) -> tuple[str, int, str, str]:
    return (found.consumer.file, found.consumer.line, found.how, found.use)


def judge(types: Types, use: Use) -> list[Finding]:
    """The findings on one use; a call that runs a method by its name has one of its own."""
    found = JUDGES[use.how](types, use)
    return [_excused(types, use, finding) for finding in found]


def _excused(types: Types, use: Use, finding: Finding) -> Finding:
    """A break that the consumer's own code expects: a handler, or a test that fails with this provider."""
    if finding.verdict != "broken":
        return finding
    reason = unreached(types, use.node, use.scope)
    handler = guards.handled(use.node, EXPECTED.get(use.how, set()))
    if handler is not None:
        reason = f"the consumer expects that, and handles it at line {handler.lineno}"
    if not reason:
        return finding
    return finding.model_copy(
        update={"verdict": "compatible", "message": f"{reason} ({finding.kind}: {finding.message})"}
    )


def _import(types: Types, use: Use) -> list[Finding]:
    if isinstance(use.node, ast.alias):
        return [_imported_name(types, use, use.node.name)]
    parts = use.name.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        module = types.world.module(name)
        if module is None:
            return [finding(use, "broken", "missing target", f"No module named '{name}'")]
    assert module is not None
    return [finding(use, "compatible", evidence=Evidence(site=module.place))]


def _imported_name(types: Types, use: Use, name: str) -> Finding:
    module = types.world.module(use.name)
    if name == "*" and module is not None:
        return finding(use, "compatible", evidence=Evidence(site=module.place))
    meanings = types.names.member(use.name, name)
    if module is None and meanings[0].missing:
        return finding(use, "broken", "missing target", f"No module named '{use.name}'")
    if meanings[0].missing:
        assert module is not None
        message = f"cannot import name '{name}' from '{use.name}'"
        return finding(use, "broken", "missing target", message, evidence=Evidence(site=module.place))
    return _reached(use, meanings[0], name)


def _reached(use: Use, meaning: Meaning, name: str) -> Finding:
    path = tuple(f"re-exported by {place}" for place in meaning.via[:-1])
    if meaning.dark:
        return finding(use, "unresolved", message=meaning.dark, evidence=Evidence(path=path))
    if meaning.module is not None:
        return finding(use, "compatible", evidence=Evidence(site=meaning.module.place, path=path))
    if meaning.binding is None or meaning.scope is None:
        return finding(
            use, "compatible", message=f"it is {meaning.outside}, of neither package", evidence=Evidence(path=path)
        )
    site = f"{meaning.scope.module.place}:{getattr(meaning.binding.node, 'lineno', 1)}"
    return finding(
        use, "compatible", evidence=Evidence(site=site, path=path, signature=f"{meaning.scope.module.name}.{name}")
    )


def _class_name(types: Types, use: Use) -> list[Finding]:
    top = use.name.partition(".")[0]
    if isinstance(use.base, Cls):
        return [finding(use, "compatible", evidence=Evidence(site=use.base.info.site, signature=use.base.info.name))]
    if types.world.owns(top) or types.world.ours(top):
        return [finding(use, "broken", "missing target", f"there is no class {use.name}")]
    return [finding(use, "unresolved", message=f"{use.name} is in neither package")]


JUDGES: dict[str, Callable[[Types, Use], list[Finding]]] = {
    "import": _import,
    "attribute": verdicts.attribute,
    "call": verdicts.call,
    "class name": _class_name,
    "subclass": overrides.subclass,
    "override": overrides.override,
    "setting": overrides.setting,
}
