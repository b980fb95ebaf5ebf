"""What a callable takes, read from its source: functions, methods, and every kind of constructor."""

import ast
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from draftmill.contract import fields, known
from draftmill.contract.hierarchy import Member
from draftmill.contract.values import (
    ClassInfo,
    Cls,
    Contract,
    Ext,
    Fn,
    FuncInfo,
    FunctionNode,
    Obj,
    Super,
    Unknown,
    Value,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types

BUILDERS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
SILENT = {"object", "abc.ABC", "typing.Generic", "typing.Protocol", "typing_extensions.Protocol"}


def of(types: "Types", value: Value) -> Contract:
    """The contract of a callable value."""
    if isinstance(value, Fn):
        owner = value.func.owner if value.func.node.name == "__init__" else None
        rewritten = _rewritten(types, owner) if owner is not None else None
        return function(Fn(rewritten, value.receiver) if rewritten is not None else value)
    if isinstance(value, Cls):
        return constructor(types, value.info)
    if isinstance(value, Obj | Super):
        name = "forward" if types.hierarchy.derives(value.info, known.MODULES) else "__call__"
        found = types.find(value, name)
        if isinstance(found.value, Fn):
            return function(found.value)
        if isinstance(found.value, Ext):
            anything = [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
            return Contract(value.info.name, value.info.site, Signature(anything), (f"called as {found.value.name}",))
        return Contract(
            value.info.name, value.info.site, opaque=found.opaque or f"{value.info.name} is not callable here"
        )
    reason = value.reason if isinstance(value, Unknown) else "it is no callable of the provider"
    return Contract("", "", opaque=reason)


def function(fn: Fn) -> Contract:
    func = fn.func
    try:
        signature = read(func.node, bound=fn.receiver is not None)
    except ValueError as error:
        return Contract(func.name, func.site, opaque=f"{func.name} has a signature that Python refuses: {error}")
    return Contract(func.name, func.site, signature, func=func, owner=func.owner)


def read(node: FunctionNode | ast.Lambda, *, bound: bool) -> Signature:
    """The signature of a `def`, without its first parameter if `bound`; defaults and annotations are their source
    text."""
    arguments = node.args
    positional: list[tuple[ast.arg, Any]] = [(a, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [fields.parameter(a.arg, kind, a.annotation, d) for (a, kind), d in zip(positional, defaults, strict=True)]
    if bound:
        found = found[1:] if found else found
    if arguments.vararg:
        found.append(
            fields.parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL, arguments.vararg.annotation, None)
        )
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(fields.parameter(argument.arg, Parameter.KEYWORD_ONLY, argument.annotation, default))
    if arguments.kwarg:
        found.append(fields.parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD, arguments.kwarg.annotation, None))
    returns = getattr(node, "returns", None)
    return Signature(found, return_annotation=fields.Text(ast.unparse(returns)) if returns else Signature.empty)


def constructor(types: "Types", info: ClassInfo) -> Contract:
    """What making an instance takes: the first in the class's order that defines it, or that a decorator or base
    generates."""
    doubts: list[str] = []
    passed: list[str] = []
    for ancestor in types.hierarchy.mro(info):
        if isinstance(ancestor, Unknown):
            doubts.append(ancestor.reason)
        elif isinstance(ancestor, Ext):
            known_ = _outside(info, ancestor, doubts)
            if known_ is not None:
                return known_
        else:
            made = _defined(types, info, ancestor, (*passed, f"{ancestor.name} ({ancestor.site})"))
            if made is not None:
                return Contract(
                    info.name, made.site, made.signature, made.path, "; ".join(doubts), made.func, made.note, ancestor
                )
            passed.append(f"{ancestor.name} ({ancestor.site}) inherits its constructor")
    if doubts:
        return Contract(info.name, info.site, opaque="; ".join(doubts), path=tuple(passed))
    return Contract(info.name, info.site, Signature(), (*passed, "object"))


def _outside(info: ClassInfo, ancestor: Ext, doubts: list[str]) -> Contract | None:
    last = ancestor.name.rpartition(".")[2]
    if ancestor.name in SILENT or ancestor.name in known.MODULES:
        return None
    if last in BUILDERS:
        value = Parameter("value", Parameter.POSITIONAL_ONLY)
        return Contract(info.name, info.site, Signature([value]), (f"{info.name} is an enum",))
    if last.endswith(("Exception", "Error")):
        anything = Parameter("args", Parameter.VAR_POSITIONAL)
        return Contract(info.name, info.site, Signature([anything]), (f"{info.name} is an exception",))
    doubts.append(f"its constructor may come from {ancestor.name}, which is in neither package")
    return None


def _defined(types: "Types", info: ClassInfo, ancestor: ClassInfo, path: tuple[str, ...]) -> Contract | None:
    members = types.hierarchy.members(ancestor)
    rewritten = _rewritten(types, ancestor)
    if rewritten is not None:
        path = (*path, f"a decorator of the class replaces its constructor by {rewritten.name} ({rewritten.site})")
        return Contract(rewritten.name, rewritten.site, read(rewritten.node, bound=True), path)
    for name in ("__init__", "__new__"):
        found = [m for m in members.get(name, ()) if isinstance(m.node, FunctionNode)]
        if name == "__new__" and found and _generated(types, ancestor):
            continue
        if found and not (name == "__new__" and _inherits_init(types, ancestor)):
            return _method(ancestor, found[-1], path)
    kind = _generated(types, ancestor)
    return (kind and fields.generated(types, info, kind, path)) or None


def _rewritten(types: "Types", info: ClassInfo) -> FuncInfo | None:
    """The function that a decorator of the class, or a function that it calls, puts in the place of `__init__`."""
    for decorator in info.node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        value = types.infer(target, info.scope)
        if not isinstance(value, Fn) or not value.func.module.provider:
            continue
        for func in (value.func, *_called(types, value.func)):
            for node in ast.walk(func.node):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                    ends = [t.attr for t in node.targets if isinstance(t, ast.Attribute)]
                    made = types.infer(node.value, func.module.scope_around(node)) if "__init__" in ends else None
                    if isinstance(made, Fn):
                        return made.func
    return None


def _called(types: "Types", func: FuncInfo) -> list[FuncInfo]:
    calls = [node for node in ast.walk(func.node) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    values = (types.infer(node.func, func.module.scope_around(node)) for node in calls)
    return [value.func for value in values if isinstance(value, Fn) and value.func.module.provider]


def _inherits_init(types: "Types", info: ClassInfo) -> bool:
    line = types.hierarchy.mro(info)[1:]
    return any(isinstance(a, ClassInfo) and "__init__" in types.hierarchy.members(a) for a in line)


def _method(ancestor: ClassInfo, member: Member, path: tuple[str, ...]) -> Contract:
    node = member.node
    assert isinstance(node, FunctionNode)
    func = ancestor.module.function_of(node)
    try:
        signature = read(node, bound=True)
    except ValueError as error:
        return Contract(func.name, func.site, opaque=str(error))
    return Contract(func.name, func.site, signature, (*path, f"{func.name} ({func.site})"), func=func)


def _generated(types: "Types", ancestor: ClassInfo) -> str:
    """By what a constructor is generated for `ancestor`: "dataclass", "pydantic", "model", "struct", "tuple", "dict"
    or ""."""
    decorated = fields.decorated(types, ancestor)
    if decorated:
        return decorated
    bases = [base.name for base in types.hierarchy.bases(ancestor) if isinstance(base, Ext)]
    line = [a.name for a in types.hierarchy.mro(ancestor) if isinstance(a, Ext)]
    if any(base.rpartition(".")[2] == "NamedTuple" for base in bases):
        return "tuple"
    if any(base.rpartition(".")[2] == "TypedDict" for base in line):
        return "dict"
    if any(name in known.MODELS for name in line):
        return "model"
    return "struct" if "msgspec.Struct" in line else ""
