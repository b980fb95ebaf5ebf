"""The verdict on an attribute that is read, on a call, and on a method that is called by its name."""

import ast
from typing import TYPE_CHECKING

from draftmill.contract import binding, calls, overrides, remote, shapes, signatures
from draftmill.contract.calls import Use
from draftmill.contract.evidence import Evidence, finding
from draftmill.contract.findings import Finding
from draftmill.contract.values import (
    Cls,
    Contract,
    Either,
    Ext,
    Fn,
    Found,
    Obj,
    Returns,
    Super,
    Unknown,
    Value,
    options,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types

ORDER = {"broken": 0, "unresolved": 1, "compatible": 2}


def attribute(types: "Types", use: Use) -> list[Finding]:
    looked, _ = looked_up(types, use)
    return [looked] if looked is not None else []


def looked_up(types: "Types", use: Use) -> tuple[Finding | None, list[Value]]:
    """The finding on an attribute, with the values it may have; no finding where it is the consumer's own."""
    assert use.base is not None
    here = [option for option in options(use.base) if calls.relevant(types, option)]
    found = [(option, types.find(option, use.name)) for option in here]
    if all(one.ours for _, one in found):
        return None, [one.value for _, one in found if one.value is not None]
    gone = [(option, one) for option, one in found if one.value is None]
    there = [one for _, one in found if one.value is not None]
    every = isinstance(use.base, Either) and use.base.every
    if gone and not there and not every and _elsewhere(types, use.base):
        return finding(use, "compatible", message=f"not on {_names(gone)}, but it may be of neither package"), []
    if gone and (every or not there):
        names = _names(gone)
        count = f" ({len(gone)} of the {len(here)} it may be)" if len(here) > 1 else ""
        message = f"{names} {'has' if len(gone) == 1 else 'have'} no attribute '{use.name}'{count}"
        path = gone[0][1].path
        values = [one.value for one in there if one.value is not None]
        return finding(
            use, "broken", "missing attribute", message, evidence=Evidence(site=gone[0][1].site, path=path)
        ), values
    first = next((one for one in there if not one.opaque), there[0])
    values = [one.value for one in there if one.value is not None]
    if first.opaque:
        return finding(
            use, "unresolved", message=first.opaque, evidence=Evidence(site=first.site, path=first.path)
        ), values
    note = f"not on {_names(gone)}" if gone else ""
    return finding(use, "compatible", message=note, evidence=Evidence(site=first.site, path=first.path)), values


def _names(found: list[tuple[Value, Found]]) -> str:
    return ", ".join(_name(option).rpartition(".")[2] for option, _ in found)


def _elsewhere(types: "Types", base: Value) -> bool:
    """Whether a value may also be something of neither package, so that a use need not be one of the provider."""
    return any(
        isinstance(option, Ext) or (isinstance(option, Obj) and not calls.relevant(types, option))
        for option in options(base)
    )


def _name(value: Value) -> str:
    if isinstance(value, Obj | Cls | Super):
        return value.info.name
    return getattr(getattr(value, "module", None), "name", "it")


def call(types: "Types", use: Use) -> list[Finding]:
    assert isinstance(use.node, ast.Call)
    if use.name:
        looked, callees = looked_up(types, use)
        if looked is None:
            return []
        if looked.verdict != "compatible":
            return [looked]
    else:
        looked, callees = finding(use, "compatible"), list(options(use.base)) if use.base else []
    callees = [inner for callee in callees for inner in options(callee)]
    answers = (judged_call(types, use, callee, looked) for callee in callees)
    judged = [answer for answer in answers if answer is not None]
    if not judged:
        return [looked] if use.name and looked.provider is not None else []
    every = isinstance(use.base, Either) and use.base.every
    judged.sort(key=lambda one: ORDER[one.verdict], reverse=not every)
    found = [judged[0]]
    if judged[0].verdict == "broken" and not every and use.base is not None and _elsewhere(types, use.base):
        found = [finding(use, "compatible", message=f"it may be of neither package ({judged[0].message})")]
    for callee in callees:
        if isinstance(callee, Fn) and (name := remote.method_named(callee, use.node)) is not None:
            found += _remote(types, use, callee, name)
    return found


def judged_call(types: "Types", use: Use, callee: Value, looked: Finding) -> Finding | None:
    assert isinstance(use.node, ast.Call)
    if isinstance(callee, Returns):
        return None
    if (plain := shapes.plain(callee)) and looked.provider is not None:
        message = f"{plain} is not callable"
        return finding(
            use, "broken", "missing target", message, evidence=Evidence(site=str(looked.provider), path=looked.path)
        )
    if not isinstance(callee, Fn | Cls | Obj | Super | Unknown):
        return None
    if isinstance(callee, Unknown):
        return (
            finding(use, "unresolved", message=callee.reason, evidence=Evidence(path=tuple(looked.path)))
            if callee.provider
            else None
        )
    contract = signatures.of(types, callee)
    if contract.func is not None and not contract.func.module.provider:
        return None
    if isinstance(callee, Cls) and not callee.info.module.provider and contract.func is None:
        return None
    given = binding.arguments(types, use.node, use.scope)
    wrong = binding.misfits(types, contract, given)
    path = [*looked.path, *contract.path, *overrides.namesakes(types, callee)]
    told = Evidence(contract.site, contract.text, path)
    if wrong:
        sure = [misfit for misfit in wrong if not misfit.unsure]
        instead = overrides.taken_below(types, callee, given) if sure else ""
        message = "; ".join(dict.fromkeys(misfit.message for misfit in sure or wrong[:1]))
        if sure and not instead:
            return finding(use, "broken", sure[0].kind, message, evidence=told)
        return finding(use, "unresolved", message="; ".join(filter(None, (message, instead))), evidence=told)
    reply = shapes.misread(callee, use.node) if isinstance(callee, Fn) else ""
    if isinstance(callee, Fn) and not reply:
        reply = shapes.unusable(types, use.node, use.scope, callee)
    if reply:
        return finding(use, "broken", "return shape", reply, evidence=told)
    note = contract.note if contract.note and _lands_in_extra(contract, given) else ""
    if given.partial:
        note = "; ".join(part for part in (note, "only the arguments that the source shows were bound") if part)
    return finding(use, "compatible", message=note, evidence=told)


def _lands_in_extra(contract: Contract, given: binding.Arguments) -> bool:
    return contract.signature is not None and bool(set(given.keywords) - set(contract.signature.parameters))


def _remote(types: "Types", use: Use, callee: Fn, name: str) -> list[Finding]:
    """The method that a call by name runs, with the arguments that it is handed."""
    assert isinstance(use.node, ast.Call)
    again = Use("remote call", use.node, use.scope, f'{ast.unparse(use.node.func)}("{name}")', use.base, name)
    found = remote.targets(types, callee, name)
    if not found:
        message = f"no worker of the provider, and no class mixed into one, has a method '{name}'"
        return [finding(again, "broken", "missing target", message)]
    ours = [target for target in found if not target.func.module.provider]
    judged = [_run(types, again, target) for target in (ours or found)]
    fits = [one for one in judged if one.verdict == "compatible"]
    return fits[:1] or judged[:1]


def _run(types: "Types", use: Use, target: Fn) -> Finding:
    assert isinstance(use.node, ast.Call)
    contract = signatures.function(target)
    given = binding.by_name(use.node)
    wrong = binding.misfits(types, contract, given) if given is not None else []
    told = Evidence(contract.site, contract.text, [f"run by name on {contract.name} ({contract.site})"])
    if wrong:
        return finding(use, "broken", wrong[0].kind, "; ".join(w.message for w in wrong), evidence=told)
    return finding(use, "compatible", evidence=told)
