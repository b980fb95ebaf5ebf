"""What the tests around a use say: narrowed values, and uses that the consumer itself guards."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftmill.contract.scopes import Scope, ancestors, ends
from draftmill.contract.values import Cls, Either, Ext, Fn, Obj, Tup, Unknown, Value, either, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types


def narrow(types: "Types", node: ast.Name | ast.Attribute, scope: Scope, value: Value) -> Value:
    """`value` as the type guards that hold at `node` leave it."""
    if not hasattr(node, "parent") or not _chain(node):
        return value
    key = ast.unparse(node)
    told = [test for test in tests(node) if key in ast.unparse(test[0])]
    parts = [part for test, positive in told for part in _parts(test, positive) if not _within(node, part[0])]
    for call, holds in parts:
        narrowed = _by(types, call, key, scope) if holds else None
        if narrowed is not None:
            value = _meet(types, value, narrowed)
            break
    for call, holds in parts:
        if ast.unparse(call.func) == "hasattr" and len(call.args) == 2 and ast.unparse(call.args[0]) == key:
            value = _having(types, value, call.args[1], holds)
    return value


def _having(types: "Types", value: Value, name: ast.expr, holds: bool) -> Value:
    """The options of a value of several that surely have an attribute, or those that do not."""
    if not (isinstance(value, Either) and isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return value
    found = [(option, types.find(option, name.value)) for option in options(value)]
    sure = [option for option, one in found if one.value is not None and not one.opaque]
    kept = sure if holds else [option for option, _ in found if option not in sure]
    return either(kept, every=value.every) if kept else value


def _chain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _within(node: ast.AST, other: ast.AST) -> bool:
    return any(parent is other for parent, _, _ in ancestors(node))


def tests(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yields (test, whether it held) for what was tested on every way to `node`, in its function, from the inside
    out."""
    for parent, name, child in ancestors(node):
        if (isinstance(parent, ast.If | ast.While) and name in ("body", "orelse")) or (
            isinstance(parent, ast.IfExp) and name in ("body", "orelse")
        ):
            yield parent.test, name == "body"
        elif isinstance(parent, ast.BoolOp):
            for other in parent.values[: parent.values.index(child)]:  # type: ignore[arg-type]
                yield other, isinstance(parent.op, ast.And)
        siblings = getattr(parent, name, None)
        if isinstance(siblings, list) and isinstance(child, ast.stmt):
            for statement in siblings[: siblings.index(child)]:
                if isinstance(statement, ast.Assert):
                    yield statement.test, True
                elif isinstance(statement, ast.If) and ends(statement.body) and not statement.orelse:
                    yield statement.test, False
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return


def _parts(test: ast.expr, holds: bool) -> Iterator[tuple[ast.Call, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not holds)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
        for value in test.values:
            yield from _parts(value, holds)
    elif isinstance(test, ast.Call):
        yield test, holds


def _by(types: "Types", call: ast.Call, key: str, scope: Scope) -> Value | None:
    if not call.args or ast.unparse(call.args[0]) != key:
        return None
    if isinstance(call.func, ast.Name) and call.func.id == "isinstance" and len(call.args) == 2:
        return either(list(_instances(types.infer(call.args[1], scope)))) if call.args else None
    callee = types.infer(call.func, scope)
    if not isinstance(callee, Fn):
        return None
    for node in [*callee.func.overloads, callee.func.node]:
        for value in types.annotations.guard(node.returns, callee.func.scope):
            if isinstance(value, Obj):
                return implementors(types, value)
    return None


def _instances(value: Value) -> Iterator[Value]:
    for option in options(value):
        if isinstance(option, Cls):
            yield Obj(option.info)
        elif isinstance(option, Tup):
            for item in option.items:
                yield from _instances(item)
        elif isinstance(option, Ext):
            yield Ext(option.name)


def _meet(types: "Types", value: Value, narrowed: Value) -> Value:
    """The options of `value` that `narrowed` allows; all of `narrowed` where `value` says less."""
    wanted = {option.info for option in options(narrowed) if isinstance(option, Obj)}
    kept = [
        option
        for option in options(value)
        if isinstance(option, Obj)
        and wanted & {a for a in types.hierarchy.mro(option.info) if not isinstance(a, Ext | Unknown)}
    ]
    return either(list(kept)) if kept else narrowed


def implementors(types: "Types", value: Obj) -> Value:
    """What a type guard leaves of a value that nothing else is known of: any class that names the guarded one among
    its own bases. A class below those is seen through the one it derives from."""
    info = value.info
    direct = [other for other in types.hierarchy.children(info) if other.module.provider]
    return either([Obj(other) for other in direct or [info]], every=True)


def handled(node: ast.AST, errors: set[str]) -> ast.ExceptHandler | None:
    """The handler by which the consumer itself expects one of `errors` at `node`."""
    for parent, name, _ in ancestors(node):
        if isinstance(parent, ast.Try) and name == "body":
            for handler in parent.handlers:
                kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                if any(kind is None or ast.unparse(kind).rpartition(".")[2] in errors for kind in kinds):
                    return handler
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None
    return None
