"""Where the provider calls the consumer: subclasses, overridden methods, and methods replaced at run time."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

from draftmill.contract import binding, calls, known, results, signatures
from draftmill.contract.calls import Use
from draftmill.contract.evidence import Evidence, finding
from draftmill.contract.findings import Finding, Place
from draftmill.contract.hierarchy import Member
from draftmill.contract.values import (
    ClassInfo,
    Cls,
    Contract,
    Fn,
    Found,
    FuncInfo,
    FunctionNode,
    Mod,
    Obj,
    Unknown,
    Value,
    options,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types

NAMESAKES = 8  # files with a method of the same name: more, and the list says nothing
SITES = 40  # files in which calls of an overridden method are looked at
VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def namesakes(types: "Types", callee: Value) -> list[str]:
    """Definitions of the same name in the provider that the call does not reach: other classes' methods."""
    if not isinstance(callee, Fn) or callee.func.owner is None or not isinstance(callee.receiver, Obj):
        return []
    name = callee.func.node.name
    if name.startswith("__"):
        return []
    modules = types.world.provider_files_with(f"def {name}(")
    if len(modules) > NAMESAKES:
        return []
    line = types.hierarchy.mro(callee.receiver.info)
    told = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, FunctionNode) and node.name == name and "overload" not in results.decorators(node):
                func = module.function_of(node)
                if func.owner is not None and func.owner not in line:
                    told.append(f"not {func.name}{signatures.read(node, bound=True)} ({func.site}): another class")
    return told


def subclass(types: "Types", use: Use) -> list[Finding]:
    """A class that derives from one of the provider: its bases, and what they leave abstract."""
    assert isinstance(use.base, Cls)
    info = use.base.info
    line = types.hierarchy.mro(info)
    parent = next(a for a in line if isinstance(a, ClassInfo) and a.module.provider)
    gone = [base for base in types.hierarchy.bases(info) if isinstance(base, Unknown) and "there is no" in base.reason]
    if gone:
        return [finding(use, "broken", "missing target", gone[0].reason)]
    path = [f"{a.name} ({a.site})" for a in line if isinstance(a, ClassInfo)]
    told = Evidence(parent.site, parent.name, path)
    left = sorted(_abstract(types, info)) if not _is_abstract(types, info) else []
    if left:
        message = f"Can't instantiate abstract class {info.qualname} without an implementation for {', '.join(left)}"
        return [finding(use, "broken", "override mismatch", message, evidence=told)]
    return [finding(use, "compatible", evidence=told)]


def _abstract(types: "Types", info: ClassInfo) -> Iterator[str]:
    seen: set[str] = set()
    line = types.hierarchy.mro(info)
    if not any(getattr(a, "name", "") in ("abc.ABC", "ABC") for a in line) or any(isinstance(a, Unknown) for a in line):
        return
    for ancestor in line:
        if not isinstance(ancestor, ClassInfo):
            continue
        for name, members in types.hierarchy.members(ancestor).items():
            own = [m for m in members if m.kind != "self"]
            if name not in seen and own:
                seen.add(name)
                if any("abstractmethod" in results.decorators(m.node) for m in own):
                    yield name


def _is_abstract(types: "Types", info: ClassInfo) -> bool:
    """Whether the consumer means the class to stay abstract: it says so itself, or derives others from it."""
    own = [m for members in types.hierarchy.members(info).values() for m in members]
    if any("abstractmethod" in results.decorators(m.node) for m in own):
        return True
    bases = {getattr(base, "name", "") for base in types.hierarchy.bases(info)}
    if bases & {"abc.ABC", "typing.Protocol"}:
        return True
    return any(info in types.hierarchy.mro(other)[1:] for other in _consumer_classes(types) if other is not info)


def _consumer_classes(types: "Types") -> Iterator[ClassInfo]:
    for module in calls.consumer_modules(types):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.bases:
                yield module.class_of(node)


def override(types: "Types", use: Use) -> list[Finding]:
    """A method that the provider's class has too: whether it takes what the provider's own calls pass."""
    assert isinstance(use.base, Cls) and isinstance(use.node, FunctionNode)
    info = use.base.info
    found = _inherited(types, info, use.name)
    if found is None or use.name in ("__init__", "__new__", "__post_init__"):
        return []
    base = results.method(types, found, Obj(info))
    mine = results.method(types, types.hierarchy.members(info)[use.name][-1], Obj(info))
    told = Evidence(found.site, path=[f"it overrides {found.owner.name}.{use.name} ({found.site})"])
    if not isinstance(base, Fn) or not isinstance(mine, Fn):
        return [finding(use, "compatible", evidence=told)]
    wanted, given = signatures.function(base), signatures.function(mine)
    if wanted.signature is None or given.signature is None:
        return [finding(use, "unresolved", message=wanted.opaque or given.opaque, evidence=told)]
    told = replace(told, signature=wanted.text)
    wrong = mismatch(wanted.signature, given.signature)
    if not wrong:
        return [finding(use, "compatible", evidence=told)]
    broken = failing_call(types, use.name, info, given, wanted)
    if broken:
        return [finding(use, "broken", "override mismatch", broken, evidence=told)]
    note = f"no call in the provider fails, though it takes less than what it overrides: {wrong[0]}"
    return [finding(use, "compatible", message=note, evidence=told)]


def _inherited(types: "Types", info: ClassInfo, name: str) -> Member | None:
    for ancestor in types.hierarchy.mro(info)[1:]:
        if isinstance(ancestor, ClassInfo) and ancestor.module.provider:
            members = [m for m in types.hierarchy.members(ancestor).get(name, ()) if isinstance(m.node, FunctionNode)]
            if members:
                return members[-1]
    return None


def taken_below(types: "Types", callee: Value, given: binding.Arguments) -> str:
    """The consumer's override that takes what the provider's own method does not: the object may well be of that
    class."""
    if not (isinstance(callee, Fn) and isinstance(callee.receiver, Obj) and callee.receiver.info.module.provider):
        return ""
    for child in types.hierarchy.ours_below(callee.receiver.info):
        for member in types.hierarchy.members(child).get(callee.func.node.name, ())[-1:]:
            mine = results.method(types, member, Obj(child))
            if isinstance(mine, Fn) and not binding.misfits(types, signatures.function(mine), given):
                return f"the consumer's own {child.name} ({member.site}) takes it"
    return ""


def failing_call(types: "Types", name: str, info: ClassInfo, given: Contract, wanted: Contract) -> str:
    """The provider's call of method `name`, on an object that may be of the consumer's class `info`, that `given`
    cannot take: what it is called on is declared as `info` or as an ancestor of it.

    A call that the overridden method, or another of the provider's overrides, cannot take either is none: it is of
    another branch of the family.
    """
    family = {ancestor for ancestor in types.hierarchy.mro(info) if isinstance(ancestor, ClassInfo)}
    for module in types.world.provider_files_with(f".{name}(")[:SITES]:
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name):
                continue
            scope = module.scope_around(node)
            receivers = options(types.infer(node.func.value, scope))
            if not any(isinstance(r, Obj) and r.info in family for r in receivers):
                continue
            arguments = binding.arguments(types, node, scope)
            wrong = [m for m in binding.misfits(types, given, arguments) if not m.unsure]
            if wrong and not _varies(types, name, receivers, arguments, wanted):
                return f"the provider calls it at {module.place}:{node.lineno}: {wrong[0].message}"
    return ""


def _varies(
    types: "Types", name: str, receivers: Iterable[Value], arguments: binding.Arguments, wanted: Contract
) -> bool:
    below = [c for r in receivers if isinstance(r, Obj) for c in types.hierarchy.below(r.info)]
    members = [(m, c) for c in below for m in types.hierarchy.members(c).get(name, ())[-1:]]
    others = [results.method(types, member, Obj(child)) for member, child in members]
    contracts = [wanted, *(signatures.function(other) for other in others if isinstance(other, Fn))]
    return any(not m.unsure for contract in contracts for m in binding.misfits(types, contract, arguments))


def mismatch(base: Signature, mine: Signature) -> list[str]:
    """What a call that fits `base` may hold and `mine` cannot take, in Python's words."""
    plain = [p for p in base.parameters.values() if p.kind not in VARIABLE]
    needed = [p for p in plain if p.default is Parameter.empty]
    found: list[str] = []
    for chosen, by_name in ((needed, False), (plain, False), (plain, True)):
        given = binding.Arguments()
        for parameter in chosen:
            by_keyword = parameter.kind is Parameter.KEYWORD_ONLY or (
                by_name and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
            )
            if by_keyword:
                given.keywords[parameter.name] = None
            else:
                given.positional.append(None)
        found += [m.message for m in binding.bound(mine, given) if m.message not in found]
    for kind, stars in ((Parameter.VAR_KEYWORD, "**"), (Parameter.VAR_POSITIONAL, "*")):
        taken = [p for p in base.parameters.values() if p.kind is kind]
        if taken and not any(p.kind is kind for p in mine.parameters.values()):
            found.append(f"it does not take {stars}{taken[0].name}")
    return found


def setting(types: "Types", use: Use) -> list[Finding]:
    """An attribute that the consumer sets on an object of the provider; with a function, a method that it replaces."""
    assert isinstance(use.node, ast.Attribute) and use.base is not None
    statement = getattr(use.node, "parent", None)
    value = getattr(statement, "value", None)
    bound = calls.bound_method(types, value, use.scope) if isinstance(value, ast.expr) else None
    here = [option for option in options(use.base) if calls.relevant(types, option)]
    found = [(option, types.find(option, use.name)) for option in here]
    there = [(o, one) for o, one in found if one.value is not None and not one.made and not one.opaque]
    if bound is not None and bound[0].module.provider is False and there:
        return [_replaced(use, bound, there)]
    if there:
        return [finding(use, "compatible", evidence=Evidence(site=there[0][1].site, path=there[0][1].path))]
    if any(isinstance(option, Unknown) for option in here):
        return [finding(use, "unresolved", message=next(o.reason for o in here if isinstance(o, Unknown)))]
    if bound is not None and any(isinstance(option, Mod | Cls) for option in here):
        names = ", ".join(getattr(getattr(o, "info", None) or getattr(o, "module", None), "name", "it") for o in here)
        return [finding(use, "broken", "missing target", f"{names} has no {use.name} to replace")]
    closed = [o for o in here if isinstance(o, Obj) and _closed(types, o.info)]
    if closed and not any(one.opaque for _, one in found):
        message = f'"{closed[0].info.name}" object has no field "{use.name}"'
        return [finding(use, "broken", "missing attribute", message, evidence=Evidence(site=closed[0].info.site))]
    return [finding(use, "compatible", message="an attribute of the consumer's own")]


def _closed(types: "Types", info: ClassInfo) -> bool:
    return types.hierarchy.derives(info, (*known.MODELS[:2], "msgspec.Struct"))


def _replaced(
    use: Use,
    bound: tuple[FuncInfo, ast.expr | None],
    there: list[tuple[Value, Found]],
) -> Finding:
    func, receiver = bound
    try:
        mine = signatures.read(func.node, bound=receiver is not None or isinstance(there[0][0], Cls))
    except ValueError as error:
        return finding(use, "unresolved", message=str(error))
    wrong: dict[str, list[Fn]] = {}
    total = 0
    for option, one in there:
        for inner in options(one.value) if one.value is not None else ():
            if not isinstance(inner, Fn):
                continue
            total += 1
            base = signatures.read(inner.func.node, bound=not isinstance(option, Mod) and inner.func.owner is not None)
            for message in mismatch(base, mine)[:1]:
                wrong.setdefault(message, []).append(inner)
    path = [f"{func.name} ({func.site}) is put in its place at {use.module.place}:{use.line}"]
    site = there[0][1].site
    if not wrong:
        return finding(use, "compatible", evidence=Evidence(site=site, path=path))
    worst = [inner for inners in wrong.values() for inner in inners]
    path += [f"{f.func.name}{signatures.read(f.func.node, bound=True)} ({f.func.site})" for f in worst[:6]]
    told = "; ".join(
        f"{message} (as {', '.join(f.func.name for f in inners[:3])})" for message, inners in wrong.items()
    )
    at = Use("replacement", func.node, use.scope, f"{ast.unparse(use.node)} = {func.qualname}", use.base, use.name)
    message = f"it takes less than what it replaces, for {len(worst)} of {total}: {told}"
    made = finding(at, "broken", "override mismatch", message, evidence=Evidence(site=worst[0].func.site, path=path))
    contract = signatures.function(worst[0])
    return made.model_copy(
        update={"signature": contract.text, "consumer": Place(file=func.module.place, line=func.node.lineno)}
    )
