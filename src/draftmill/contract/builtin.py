"""Calls of things outside both packages that hand on what they are given: `list(x)`, `cast(T, x)`, `super()`,
`d.values()`."""

import ast
from typing import TYPE_CHECKING

from draftmill.contract.scopes import Scope
from draftmill.contract.values import NOTHING, Cls, Either, Ext, Map, Obj, Seq, Super, Tup, Value, either, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

SEQUENCES = {"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "itertools.islice", "itertools.chain"}
ITEMS = {"next", "max", "min", "anext"}
SAME = {"copy.copy", "copy.deepcopy", "dataclasses.replace", "asyncio.shield", "functools.partial", "weakref.proxy"}
OPENED = {"asyncio.run", "asyncio.wait_for", "asyncio.create_task"}
CAST = {"typing.cast", "typing_extensions.cast"}
OF_MAPS = {"values", "items", "keys", "get", "pop", "setdefault", "copy"}
OF_SEQUENCES = {"pop", "popleft", "copy", "get", "get_nowait"}


def call(types: "Types", node: ast.Call, scope: Scope) -> Value | None:
    """What the call gives, or None where it is none of these."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in OF_MAPS | OF_SEQUENCES:
        return _of_container(types, node.func, scope)
    if not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    callee = types.infer(node.func, scope)
    if not isinstance(callee, Ext):
        return None
    if callee.name == "super":
        return _super(types, node, scope)
    if not node.args:
        return Map(Ext("str"), NOTHING) if callee.name == "dict" else None
    if callee.name in CAST:
        return types.annotations.read(node.args[0], scope)
    return _handed_on(types, callee.name, node, scope)


def _handed_on(types: "Types", name: str, node: ast.Call, scope: Scope) -> Value | None:
    first = types.infer(node.args[0], scope)
    if name in SEQUENCES:
        return Seq(types.item(first))
    if name in ITEMS:
        return first if len(node.args) > 1 and name in ("max", "min") else types.item(first)
    if name in SAME:
        return first
    if name in OPENED:
        return types.opened(first, "await")
    if name == "enumerate":
        return Seq(Tup((Ext("int"), types.item(first))))
    if name == "zip":
        return Seq(Tup(tuple(types.item(types.infer(arg, scope)) for arg in node.args)))
    if name in ("type", "getattr", "dict", "filter"):
        return _other(types, name, node, scope)
    return None


def _other(types: "Types", name: str, node: ast.Call, scope: Scope) -> Value | None:
    first = types.infer(node.args[0], scope)
    if name == "type":
        return either([Cls(option.info) if isinstance(option, Obj) else NOTHING for option in options(first)])
    if name == "dict":
        return first if isinstance(first, Map) else None
    if name == "filter":
        return NOTHING
    attribute = node.args[1] if len(node.args) > 1 else None
    if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
        return _named(types, node, attribute.value, scope)
    return NOTHING


def _named(types: "Types", node: ast.Call, name: str, scope: Scope) -> Value:
    """`getattr(x, "name")`; with a third argument, that one for what `x` may be without the attribute."""
    first = types.infer(node.args[0], scope)
    default = types.infer(node.args[2], scope) if len(node.args) > 2 else None
    found: list[Value] = []
    for option in options(first):
        value = types.find(option, name).value
        if value is not None:
            found.append(value)
        elif default is not None:
            found += [option] if default == first else list(options(default))
    return either(found, every=isinstance(first, Either) and first.every)


def _super(types: "Types", node: ast.Call, scope: Scope) -> Value | None:
    if node.args and (not isinstance(node.args[0], ast.Name) or len(node.args) != 2):
        return None
    if scope.owner is None:
        return None
    if node.args:
        after = types.infer(node.args[0], scope)
        return Super(scope.owner, after.info) if isinstance(after, Cls) else None
    return Super(scope.owner, scope.owner)


def _of_container(types: "Types", func: ast.Attribute, scope: Scope) -> Value | None:
    found: list[Value] = []
    for option in options(types.infer(func.value, scope)):
        if isinstance(option, Map) and func.attr in OF_MAPS:
            found.append(
                {
                    "values": Seq(option.value),
                    "items": Seq(Tup((option.key, option.value))),
                    "keys": Seq(option.key),
                    "copy": option,
                }.get(func.attr, option.value)
            )
        elif isinstance(option, Seq) and func.attr in OF_SEQUENCES:
            found.append(option if func.attr == "copy" else option.item)
        else:
            return None
    return either(found)
