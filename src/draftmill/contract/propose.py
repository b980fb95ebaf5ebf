"""What became of a use between a provider in which it bound and one in which it breaks, read from both sources."""

import ast
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

from draftmill.contract import binding, signatures
from draftmill.contract.audit import Audit
from draftmill.contract.calls import Use
from draftmill.contract.findings import Finding, Report
from draftmill.contract.values import ClassInfo, Cls, Contract, Fn, FunctionNode, Mod, Obj, Value, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

Key = tuple[str, int, int, str, str]
VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def _key(use: Use) -> Key:
    return (use.module.place, use.line, getattr(use.node, "col_offset", 0), use.how, use.text)


def compared(now: Audit, before: Audit) -> Report:
    """The report of `now`, with a proposal on each broken use, and a finding for each default that changed under a
    call."""
    earlier: dict[Key, tuple[Use, Finding]] = {}
    for use, found in before.judged:
        earlier.setdefault(_key(use), (use, found))
    findings: list[Finding] = []
    for use, found in now.judged:
        old = earlier.get(_key(use))
        if old is None or old[1].verdict == "broken":
            findings.append(found)
        elif found.verdict == "broken":
            text = f"{before.provider.label}: {proposal(now.types, before.types, use, old[0], found)}"
            findings.append(found.model_copy(update={"proposal": text}))
        else:
            findings.append(found)
            findings += _defaults(now, before, use, old[0], found)
    return now.report.model_copy(update={"findings": findings})


def proposal(now: "Types", before: "Types", use: Use, old: Use, found: Finding) -> str:
    """What replaced what the use asks for."""
    if found.kind == "missing target":
        return _moved(now, use)
    if found.kind == "missing attribute":
        return _renamed(now, before, use, old)
    if found.kind == "return shape":
        return "its result was read as the consumer reads it; drop the [0], or the argument"
    new_contract, old_contract = callee_contract(now, use), callee_contract(before, old)
    if found.kind == "override mismatch" and (same := _replaced(before, old, found)) is not None:
        return f"it replaced {same.text} at {same.site}"
    if new_contract is None or old_contract is None or not new_contract.signature or not old_contract.signature:
        return "no signature on both sides to compare"
    text = "; ".join(_parameters(new_contract.signature, old_contract.signature, use, now))
    return f"{old_contract.text} at {old_contract.site}" + (f" — {text}" if text else "")


def _callee(types: "Types", use: Use) -> list[Value]:
    if use.base is None:
        return []
    if not use.name or use.how in ("import", "class name"):
        return list(options(use.base))
    found = [types.find(option, use.name).value for option in options(use.base)]
    return [inner for value in found if value is not None for inner in options(value)]


def callee_contract(types: "Types", use: Use) -> Contract | None:
    for value in _callee(types, use):
        if isinstance(value, Fn | Cls | Obj):
            return signatures.of(types, value)
    return None


def _replaced(before: "Types", old: Use, found: Finding) -> Contract | None:
    """The earlier signature of the very method that a function no longer fits."""
    contracts = (signatures.of(before, value) for value in _callee(before, old) if isinstance(value, Fn))
    return next((c for c in contracts if c.signature is not None and found.signature.startswith(f"{c.name}(")), None)


def _parameters(new: Signature, old: Signature, use: Use, types: "Types") -> list[str]:
    """Each parameter that the call passes and is gone, and each that it must pass now."""
    told = []
    plain = [p for p in new.parameters.values() if p.kind not in VARIABLE]
    before = [p for p in old.parameters.values() if p.kind not in VARIABLE]
    given: set[str] = set()
    if isinstance(use.node, ast.Call):
        given = set(binding.arguments(types, use.node, use.scope).keywords)
    fresh = [p for p in plain if p.name not in old.parameters]
    taken: set[str] = set()
    for index, parameter in enumerate(before):
        if parameter.name in new.parameters or (given and parameter.name not in given):
            continue
        same = [p for p in fresh if str(p.annotation) == str(parameter.annotation) and p.name not in taken]
        there = plain[index] if index < len(plain) and plain[index] in same else None
        heir = there or (same[0] if len(same) == 1 and parameter.annotation is not Parameter.empty else None)
        if heir is not None:
            taken.add(heir.name)
            told.append(f"{parameter.name} was renamed {heir.name} (same {'position and ' if there else ''}type)")
        else:
            told.append(f"{parameter.name} was removed")
    for parameter in plain:
        if parameter.default is not Parameter.empty or parameter.name in taken or parameter.name in given:
            continue
        was = old.parameters.get(parameter.name)
        kind = "" if parameter.annotation is Parameter.empty else f": {parameter.annotation}"
        if was is None:
            told.append(f"{parameter.name}{kind} is new, and required")
        elif was.default is not Parameter.empty:
            told.append(f"{parameter.name}{kind} was made required (its default was {was.default})")
    return told


def _moved(types: "Types", use: Use) -> str:
    name = use.text.rpartition(" ")[2].rpartition(".")[2] if use.how == "import" else use.name.rpartition(".")[2]
    for head in (f"class {name}", f"def {name}("):
        for module in types.world.provider_files_with(head):
            for binding_ in module.scope.bindings.get(name, ()):
                if isinstance(binding_.node, ast.ClassDef | FunctionNode):
                    return f"it was there; now {module.name} defines a {name} ({module.place}:{binding_.node.lineno})"
    return "it was there; now nothing in the provider has that name"


def _renamed(now: "Types", before: "Types", use: Use, old: Use) -> str:
    """The member that took a missing one's place: new in the class, and with the same signature."""
    was = next((o for o in options(old.base) if isinstance(o, Obj | Cls | Mod)), None) if old.base else None
    is_ = next((o for o in options(use.base) if isinstance(o, Obj | Cls | Mod)), None) if use.base else None
    if was is None or is_ is None:
        return "it was there"
    definition = before.find(was, use.name)
    if not isinstance(definition.value, Fn):
        return f"it was defined at {definition.site}"
    wanted = signatures.function(definition.value)
    fresh = sorted(_names(now, is_) - _names(before, was))
    for name in fresh:
        value = now.find(is_, name).value
        if isinstance(value, Fn) and signatures.function(value).signature == wanted.signature:
            return f"{wanted.text} at {wanted.site} — renamed {name} (same signature, {value.func.site})"
    return f"{wanted.text} at {wanted.site} — removed; new beside it: {', '.join(fresh[:6]) or 'nothing'}"


def _names(types: "Types", value: Value) -> set[str]:
    if isinstance(value, Mod):
        return set(value.module.scope.bindings)
    if isinstance(value, Obj | Cls):
        line = types.hierarchy.mro(value.info)
        return {name for a in line if isinstance(a, ClassInfo) for name in types.hierarchy.members(a)}
    return set()


def _defaults(now: Audit, before: Audit, use: Use, old: Use, found: Finding) -> list[Finding]:
    """A finding for each parameter that the call leaves out and whose default is another one than before."""
    if use.how != "call" or not isinstance(use.node, ast.Call):
        return []
    new_contract, old_contract = callee_contract(now.types, use), callee_contract(before.types, old)
    if new_contract is None or old_contract is None or not new_contract.signature or not old_contract.signature:
        return []
    given = binding.arguments(now.types, use.node, use.scope)
    if given.partial:
        return []
    try:
        passed = set(new_contract.signature.bind(*given.positional, **given.keywords).arguments)
    except TypeError:
        return []
    changed = []
    for name, parameter in new_contract.signature.parameters.items():
        was = old_contract.signature.parameters.get(name)
        if name in passed or was is None or Parameter.empty in (was.default, parameter.default):
            continue
        if str(was.default) != str(parameter.default) and not _same(str(was.default), str(parameter.default)):
            changed.append(f"{name} was {was.default}, is {parameter.default}")
    if not changed:
        return []
    message = f"provider changed: default ({before.provider.label}: {'; '.join(changed)})"
    return [found.model_copy(update={"kind": "changed default", "message": message, "how": "default"})]


def _same(one: str, other: str) -> bool:
    """Whether two defaults differ in spelling only: `Field(default=None)` and `None`."""
    try:
        return _plain(ast.parse(one, mode="eval").body) == _plain(ast.parse(other, mode="eval").body)
    except SyntaxError:
        return False


def _plain(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Field", "field", "PydanticField"):
        for keyword in node.keywords:
            if keyword.arg in ("default", "default_factory"):
                return ast.unparse(keyword.value) + ("()" if keyword.arg == "default_factory" else "")
        if node.args:
            return ast.unparse(node.args[0])
    return ast.unparse(node)
