"""An attribute of a value: the value it has, where it is defined, or why that cannot be told."""

import ast
from typing import TYPE_CHECKING

from draftmill.contract import known, results
from draftmill.contract.hierarchy import Lookup, Member
from draftmill.contract.values import (
    ClassInfo,
    Cls,
    Ext,
    Found,
    Mod,
    Obj,
    Returns,
    Super,
    Unknown,
    Value,
    Wrapped,
    either,
    options,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types


def find(types: "Types", value: Value, name: str) -> Found:
    """Looks attribute `name` of `value` up, as Python would."""
    if isinstance(value, Mod):
        return _of_module(types, value, name)
    if isinstance(value, Obj | Cls | Super):
        return _of_class(types, value, name)
    if isinstance(value, Ext):
        return Found(Ext(f"{value.name}.{name}"))
    if isinstance(value, Wrapped) and value.kind == "await" and name in ("result", "remote"):
        return Found(Returns(value.value))
    if isinstance(value, Unknown):
        return Found(value, opaque=value.reason)
    return Found(Unknown(f"the attribute {name} of something built in"))


def _of_module(types: "Types", value: Mod, name: str) -> Found:
    found = types.names.member(value.module.name, name)
    if found[0].missing:
        return Found(None, site=value.module.place, path=(f"{value.module.name} ({value.module.place}) has no {name}",))
    first = found[0]
    site, via = value.module.place, tuple(f"re-exported by {place}" for place in first.via[:-1])
    if first.binding is not None and first.scope is not None:
        site = f"{first.scope.module.place}:{getattr(first.binding.node, 'lineno', 1)}"
    elif first.module is not None:
        site = first.module.place
    return Found(either([types.meaning(meaning, name) for meaning in found]), site, via, first.dark)


def _of_class(types: "Types", value: Obj | Cls | Super, name: str) -> Found:
    info = value.info
    after = value.after if isinstance(value, Super) else None
    lookup = types.hierarchy.lookup(info, name, after)
    if lookup.members:
        members = lookup.members
        found = either([read(types, member, value) for member in _chosen(members)])
        return Found(found, members[-1].site, lookup.path, ours=not members[-1].owner.module.provider)
    if lookup.outside:
        return Found(_outside(types, info, lookup, name), info.site, lookup.path)
    grafted = types.grafts.get(name)
    if grafted:
        values = [types.infer(expr, scope) for expr, scope in grafted]
        return Found(either(values), info.site, (f"the consumer itself sets {name}",), made=True)
    hosts = types.hosts.get(id(info.node))
    if hosts and after is None:
        return _of_hosts(types, hosts, name)
    handed = _delegated(types, value, name) if lookup.opaque else None
    if handed is not None:
        return handed
    below = _of_children(types, info, name) if after is None else None
    if below is not None:
        return below
    if lookup.opaque:
        return Found(Unknown(lookup.opaque, info.module.provider), info.site, lookup.path, lookup.opaque)
    missing = (*lookup.path, f"none of them has {name}")
    return Found(None, info.site, missing)


def _delegated(types: "Types", value: Obj | Cls | Super, name: str) -> Found | None:
    """An attribute that a class's `__getattr__` takes from another object: `return getattr(self.x, name)`."""
    for member in types.hierarchy.lookup(value.info, "__getattr__").members:
        arguments = member.node.args.args if isinstance(member.node, ast.FunctionDef) else []
        for node in ast.walk(member.node):
            call = node.value if isinstance(node, ast.Return) else None
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr" and len(call.args) == 2):
                continue
            if len(arguments) == 2 and ast.unparse(call.args[1]) == arguments[1].arg:
                inner = types.infer(call.args[0], member.owner.module.scope_of(member.node))
                found = [find(types, option, name) for option in options(inner) if isinstance(option, Obj)]
                there = [one for one in found if one.value is not None]
                if there:
                    path = (f"{value.info.name} hands it on in __getattr__ ({member.site})", *there[0].path)
                    known_ones = [one.value for one in there if one.value is not None]
                    return Found(either(known_ones), there[0].site, path, there[0].opaque)
    return None


def _of_children(types: "Types", info: ClassInfo, name: str) -> Found | None:
    """An attribute that only classes below have: a value declared as the class may well be one of those."""
    if not info.module.provider:
        return None
    for child in (*types.hierarchy.below(info)[1:], *types.hierarchy.ours_below(info)):
        lookup = types.hierarchy.lookup(child, name)
        whose = "" if child.module.provider else "the consumer's own "
        reason = f"only {whose}{child.name} ({child.site}), which derives from {info.name}, has it"
        if lookup.members:
            value = either([read(types, member, Obj(child)) for member in _chosen(lookup.members)])
            return Found(value, lookup.members[-1].site, (reason,), reason)
        if lookup.outside:
            return Found(Ext(lookup.outside), child.site, (reason,), reason)
    return None


def _of_hosts(types: "Types", hosts: list[Value], name: str) -> Found:
    found = [find(types, host, name) for host in hosts]
    there = [one for one in found if one.value is not None]
    if not there:
        return found[0]
    value = either([one.value for one in there if one.value is not None])
    return Found(value, there[0].site, ("mixed into the provider's class", *there[0].path), there[0].opaque)


def _outside(types: "Types", info: ClassInfo, lookup: Lookup, name: str) -> Value:
    if types.hierarchy.derives(info, known.ENUMS) and name in ("value", "name"):
        return Ext("str")
    if name in ("model_copy", "copy", "__enter__", "__aenter__"):
        return Returns(Obj(info))
    if name in ("model_validate", "model_validate_json", "construct", "model_construct", "parse_obj"):
        return Returns(Obj(info))
    if name == "__class__":
        return Cls(info)
    return Ext(lookup.outside)


def _chosen(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members that count: methods before what is set beside them, else what has an annotation, else all."""
    methods = tuple(m for m in members if m.kind in ("method", "class"))
    if methods:
        plain = tuple(m for m in methods if not _secondary(m.node))
        return (plain or methods)[-1:]
    annotated = tuple(m for m in members if m.annotation is not None)
    return annotated or members


def _secondary(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
    return any(n.rpartition(".")[2] in ("overload", "setter", "deleter", "register") for n in names)


def read(types: "Types", member: Member, value: Value) -> Value:
    """What a member of a class is, reached through `value`."""
    info = member.owner
    if member.kind == "class":
        return Cls(info.module.class_of(member.node))  # type: ignore[arg-type]
    if member.kind == "method":
        return results.method(types, member, value)
    if types.hierarchy.derives(info, known.ENUMS) and member.kind == "field":
        return Obj(info)
    if member.annotation is not None:
        declared = types.annotations.read(member.annotation, member.scope)
        if not isinstance(declared, Unknown) or member.value is None:
            return declared
        given = types.infer(member.value, member.scope)
        return declared if isinstance(given, Unknown) else given
    if member.value is None:
        return Ext("torch.Tensor")
    given = types.unpacked(types.infer(member.value, member.scope), member.path)
    if isinstance(given, Unknown) and info.module.provider:
        return Unknown(f"{info.name}.{member.name} ({member.site}) has no annotation: {given.reason}", provider=True)
    return given
