"""What a call gives, against how the consumer reads it: one reply where it expects a list, a coroutine not awaited."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftmill.contract import remote
from draftmill.contract.scopes import Scope
from draftmill.contract.values import Ext, Fn, Lit, Map, Obj, Seq, Tup, Value, Wrapped, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

PLAIN = {"int", "float", "bool", "builtins.int", "builtins.float", "builtins.bool"}


def misread(fn: Fn, call: ast.Call) -> str:
    """Says that the consumer takes the first element of what is one element already; empty where it does not."""
    single = remote.single(fn.func)
    given = {
        k.arg for k in call.keywords if k.arg and not (isinstance(k.value, ast.Constant) and k.value.value is None)
    }
    asked = sorted(given & set(single))
    if not asked:
        return ""
    reads = list(_reads(call))
    if not reads or not all(isinstance(r, ast.Subscript) and ast.unparse(r.slice) == "0" for r in reads):
        return ""
    line = f"{fn.func.module.place}:{single[asked[0]]}"
    return (
        f"with {asked[0]}, the result is that one reply, not a list ({line}); the consumer takes [0] of it at line "
        f"{reads[0].lineno}"  # type: ignore[attr-defined]
    )


def plain(value: Value) -> str:
    """How Python names something built in that cannot be called; empty for all else."""
    if isinstance(value, Seq | Tup | Map):
        return {Seq: "'list' object", Tup: "'tuple' object", Map: "'dict' object"}[type(value)]
    if isinstance(value, Ext) and value.name in PLAIN | {"str", "bytes"}:
        return f"'{value.name.rpartition('.')[2]}' object"
    return f"'{type(value.value).__name__}' object" if isinstance(value, Lit) and value.value is not None else ""


def _reads(call: ast.Call) -> Iterator[ast.AST]:
    """How the consumer reads a call's result: the node around the call, or around each use of the one name it is
    given."""
    node: ast.AST = call
    parent = getattr(node, "parent", None)
    if isinstance(parent, ast.Await):
        node, parent = parent, parent.parent  # type: ignore[attr-defined]
    if not (isinstance(parent, ast.Assign) and len(parent.targets) == 1 and parent.value is node):
        yield _reader(node)
        return
    target = parent.targets[0]
    if isinstance(target, ast.Tuple | ast.List):
        yield parent
        return
    if not isinstance(target, ast.Name):
        return
    block = parent
    while not isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        block = block.parent  # type: ignore[attr-defined]
    same = [n for n in ast.walk(block) if isinstance(n, ast.Name) and n.id == target.id]
    if sum(isinstance(n.ctx, ast.Store) for n in same) != 1:
        return
    for name in same:
        if isinstance(name.ctx, ast.Load):
            yield _reader(name)


def _reader(node: ast.AST) -> ast.AST:
    """The node that reads `node` itself; `node` where it only stands in the other's index or body."""
    parent: ast.AST | None = getattr(node, "parent", None)
    taken = getattr(parent, "iter" if isinstance(parent, ast.For | ast.AsyncFor) else "value", None)
    return parent if parent is not None and taken is node else node


def unusable(types: "Types", call: ast.Call, scope: Scope, fn: Fn) -> str:
    """Says that the consumer subscripts, loops over, unpacks or awaits a result that cannot be; empty where it fits."""
    result = types.infer(call, scope)
    for read in _reads(call):
        wrong = [message for option in options(result) if (message := _wrong(types, option, read, call))]
        if wrong and len(wrong) == len(options(result)):
            return f"{fn.func.name} returns {wrong[0]}, at line {getattr(read, 'lineno', call.lineno)}"
    return ""


def _wrong(types: "Types", value: Value, read: ast.AST, call: ast.Call) -> str:
    awaited = isinstance(getattr(call, "parent", None), ast.Await)
    if isinstance(value, Wrapped) and value.kind == "await" and not awaited:
        taken = isinstance(read, ast.Subscript | ast.For) or (isinstance(read, ast.Attribute) and read.value is call)
        return "a coroutine, which is read without await" if taken else ""
    if awaited and not isinstance(value, Wrapped):
        value_known = isinstance(value, Seq | Tup | Lit) or (isinstance(value, Ext) and value.name in PLAIN)
        return "no awaitable, which is awaited" if value_known else ""
    if isinstance(value, Tup) and isinstance(read, ast.Assign) and isinstance(read.targets[0], ast.Tuple):
        wanted = read.targets[0].elts
        if not any(isinstance(e, ast.Starred) for e in wanted) and len(wanted) != len(value.items):
            return f"{len(value.items)} values, which are unpacked into {len(wanted)}"
    plain = (isinstance(value, Ext) and value.name in PLAIN) or value == Lit(None)
    if isinstance(value, Obj) and not isinstance(read, ast.Attribute):
        lookup = types.hierarchy.lookup(value.info, "__getitem__")
        other = types.hierarchy.lookup(value.info, "__iter__")
        plain = not (lookup.found or other.found or lookup.opaque or other.opaque)
    subscripted = isinstance(read, ast.Subscript) and isinstance(read.ctx, ast.Load)
    unpacked = isinstance(read, ast.Assign) and isinstance(read.targets[0], ast.Tuple | ast.List)
    if plain and (subscripted or unpacked or isinstance(read, ast.For)):
        name = (
            value.info.name
            if isinstance(value, Obj)
            else ("None" if value == Lit(None) else str(getattr(value, "name", "")))
        )
        return f"{name}, which is read as a sequence"
    return ""
