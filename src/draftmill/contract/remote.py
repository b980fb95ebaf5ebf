"""Calls by name: `collective_rpc("method", args=…)` runs a method of each worker, and classes named in a string."""

import ast
from typing import TYPE_CHECKING

from draftmill.contract import known
from draftmill.contract.values import Cls, Fn, FuncInfo, Obj, Seq, Unknown, Value, Wrapped, either

if TYPE_CHECKING:
    from draftmill.contract.types import Types


def method_named(fn: Fn, node: ast.Call) -> str | None:
    """The name of the method that a call by name runs; None where `fn` is no such call or the name is no literal."""
    if fn.func.node.name not in known.REMOTE:
        return None
    given = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "method"), None)
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None


def targets(types: "Types", fn: Fn, name: str) -> list[Fn]:
    """The methods that a call by name may run: of the provider's workers, or of what the consumer mixes into them."""
    found: list[Fn] = []
    for host in types.hosts:
        for info in types.mixed:
            if id(info.node) == host and name in types.hierarchy.members(info):
                value = types.find(Obj(info), name).value
                found += [value] if isinstance(value, Fn) else []
    for root in known.REMOTE[fn.func.node.name]:
        if found:
            break
        for top in types.hierarchy.named(root):
            for info in types.hierarchy.below(top):
                if name in types.hierarchy.members(info):
                    value = types.find(Obj(info), name).value
                    found += [value] if isinstance(value, Fn) and value not in found else []
    return found


def reply(types: "Types", fn: Fn, node: ast.Call) -> Value | None:
    """What a call by name gives: a list with each worker's result, or the one result where an argument asks for one."""
    name = method_named(fn, node)
    if name is None:
        return None
    found = targets(types, fn, name)
    if not found:
        return Unknown(f"no worker of the provider has a method {name}", provider=True)
    given = {
        k.arg for k in node.keywords if k.arg and not (isinstance(k.value, ast.Constant) and k.value.value is None)
    }
    together = either([types.result(target) for target in found])
    replies = together if given & set(single(fn.func)) else Seq(together)
    return Wrapped("await", replies) if isinstance(fn.func.node, ast.AsyncFunctionDef) else replies


def single(func: FuncInfo) -> dict[str, int]:
    """Parameters by which a function returns one element instead of the whole, each with the line that shows it.

    Read from `return x[0] if p is not None else x`, in the function or one inside it, where `p` is a parameter or a
    name assigned from one.
    """
    parameters = {a.arg for a in [*func.node.args.args, *func.node.args.kwonlyargs]}
    origins: dict[str, set[str]] = {}
    for node in ast.walk(func.node):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in parameters:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    origins.setdefault(target.id, set()).add(node.value.id)
    found: dict[str, int] = {}
    for node in ast.walk(func.node):
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp)):
            continue
        one, whole = node.value.body, node.value.orelse
        if isinstance(one, ast.Subscript) and ast.unparse(one.value) == ast.unparse(whole):
            for name in (n.id for n in ast.walk(node.value.test) if isinstance(n, ast.Name)):
                for parameter in origins.get(name, {name} & parameters):
                    found[parameter] = node.lineno
    return found


def class_named(types: "Types", text: str) -> Cls | None:
    """The class of either package that a dotted name in a string leads to."""
    module, _, name = text.replace(":", ".").rpartition(".")
    if not module or not all(part.isidentifier() for part in text.replace(":", ".").split(".")):
        return None
    if types.world.module(module) is None:
        return None
    value = types.find(types.meaning(types.names.module(module), module), name).value
    return value if isinstance(value, Cls) else None
