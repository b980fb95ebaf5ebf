"""Functions as values, their parameters, and what calling something gives."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftmill.contract import builtin, known, remote
from draftmill.contract.scopes import NESTED, Binding, Scope, statements
from draftmill.contract.values import (
    NOTHING,
    Cls,
    Ext,
    Fn,
    FuncInfo,
    FunctionNode,
    Obj,
    Returns,
    Seq,
    Super,
    Unknown,
    Value,
    Wrapped,
    either,
    options,
)

if TYPE_CHECKING:
    from draftmill.contract.hierarchy import Member
    from draftmill.contract.types import Types


def parameter(types: "Types", name: str, binding: Binding, scope: Scope) -> Value:
    """What a parameter is: the object of a method, what its annotation says, or what its default is."""
    node = scope.node
    if isinstance(node, ast.Lambda) or not isinstance(node, FunctionNode):
        return NOTHING
    func = scope.module.function_of(node)
    arguments = [*node.args.posonlyargs, *node.args.args]
    if arguments and binding.node is arguments[0]:
        if id(node) in types.replaced:
            return either(list(types.replaced[id(node)]), every=True)
        if func.owner is not None and "staticmethod" not in decorators(node):
            is_class = "classmethod" in decorators(node) or node.name in ("__new__", "__init_subclass__")
            return Cls(func.owner) if is_class else Obj(func.owner)
    if binding.expr is not None:
        declared = types.annotations.read(binding.expr, func.scope)
        if binding.symbol == "*":
            return Seq(declared)
        return declared if not binding.symbol else Ext("dict")
    default = _default(node, binding.node)
    if default is not None and not isinstance(default, ast.Constant):
        return types.infer(default, func.scope)
    return Unknown(f"the parameter {name} of {func.name} ({func.site}) has no annotation", scope.module.provider)


def _default(node: FunctionNode, arg: ast.AST) -> ast.expr | None:
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = list(zip(reversed(positional), reversed(node.args.defaults), strict=False))
    pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
    return next((default for parameter_, default in pairs if parameter_ is arg), None)


def decorators(node: ast.AST) -> list[str]:
    """The last part of each decorator's name."""
    found = []
    for decorator in getattr(node, "decorator_list", ()):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        found.append(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def function(types: "Types", node: FunctionNode, scope: Scope) -> Value:
    """A function defined by `def`, with its overloads; unknown where a decorator may change what it takes."""
    func = scope.module.function_of(node)
    if not func.overloads:
        others = scope.bindings.get(node.name, ()) if not isinstance(scope.node, ast.ClassDef) else ()
        func.overloads.extend(
            b.node for b in others if isinstance(b.node, FunctionNode) and "overload" in decorators(b.node)
        )
    changed = changing(types, func)
    if changed:
        return Unknown(f"{func.name} ({func.site}) is decorated by {changed}", scope.module.provider)
    return Fn(func)


def changing(types: "Types", func: FuncInfo) -> str:
    """The decorator that may change what a function takes; empty where none does."""
    for decorator in func.node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        text = ast.unparse(target)
        if text.rpartition(".")[2] in ("setter", "getter", "deleter", "register"):
            continue
        value = types.infer(target, func.scope)
        for option in options(value):
            if isinstance(option, Ext) and option.name not in known.KEEPING:
                if option.name.rpartition(".")[2] not in {name.rpartition(".")[2] for name in known.KEEPING}:
                    return text
            elif isinstance(option, Fn) and not _keeps(option.func.node):
                return text
    return ""


def _keeps(node: FunctionNode) -> bool:
    """Whether a decorator's source shows that it returns the function itself, or a wrapper that takes what it takes."""
    arguments = {arg.arg for arg in [*node.args.posonlyargs, *node.args.args]}
    for inner in ast.walk(node):
        if isinstance(inner, FunctionNode) and inner is not node:
            if "wraps" in decorators(inner):
                return True
            if inner.args.vararg and inner.args.kwarg and not inner.args.args:
                return True
            arguments |= {arg.arg for arg in inner.args.args}
        if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name) and inner.value.id in arguments:
            return True
        if isinstance(inner, ast.Call) and ast.unparse(inner.func).rpartition(".")[2] in ("update_wrapper", "wraps"):
            return True
    return False


def method(types: "Types", member: "Member", value: Value) -> Value:
    """A method reached through `value`: a property's result, or a function that has its first argument or not."""
    node = member.node
    assert isinstance(node, FunctionNode)
    func = member.owner.module.function_of(node)
    if not func.overloads:
        same = types.hierarchy.members(member.owner)[member.name]
        func.overloads.extend(
            m.node for m in same if isinstance(m.node, FunctionNode) and "overload" in decorators(m.node)
        )
    names = set(decorators(node))
    if names & {"property", "cached_property", "abstractproperty", "computed_field"} or _is_property(types, func):
        return of(types, Fn(func, value)) if not isinstance(value, Cls) else Ext("property")
    changed = changing(types, func)
    if changed:
        return Unknown(f"{func.name} ({func.site}) is decorated by {changed}", func.module.provider)
    if "staticmethod" in names:
        return Fn(func)
    if "classmethod" in names or node.name in ("__init_subclass__", "__class_getitem__"):
        return Fn(func, value if isinstance(value, Cls) else Cls(value.info))  # type: ignore[attr-defined]
    return Fn(func) if isinstance(value, Cls) else Fn(func, value)


def _is_property(types: "Types", func: FuncInfo) -> bool:
    for decorator in func.node.decorator_list:
        value = types.infer(decorator, func.scope)
        if isinstance(value, Ext) and value.name in known.PROPERTIES:
            return True
        if isinstance(value, Cls) and ("property" in value.info.node.name.lower()):
            return True
    return False


def of(types: "Types", fn: Fn, call: ast.Call | None = None, scope: Scope | None = None) -> Value:
    """What calling `fn` gives, by its annotation, its overloads, or what its body returns."""
    return types.once(("result", id(fn.func), id(call)), lambda: _of(types, fn, call, scope))


def _of(types: "Types", fn: Fn, call: ast.Call | None, scope: Scope | None) -> Value:
    func, node = fn.func, fn.func.node
    chosen = overload(fn, call) or node
    value = _declared(types, fn, chosen, call, scope)
    if isinstance(value, Unknown):
        told = _own_class(fn, _from_body(types, func))
        if not isinstance(told, Unknown):
            value = told
        elif "annotation" in value.reason and chosen.returns is None:
            value = Unknown(f"{func.name} ({func.site}) does not say what it returns", func.module.provider)
        else:
            value = Unknown(f"the result of {func.name} ({func.site}): {value.reason}", func.module.provider)
    names = decorators(node)
    if "contextmanager" in names or "asynccontextmanager" in names:
        return Wrapped("with", types.item(value))
    if isinstance(node, ast.AsyncFunctionDef) and not _yields(node):
        return Wrapped("await", value)
    return value


def _declared(types: "Types", fn: Fn, node: FunctionNode, call: ast.Call | None, scope: Scope | None) -> Value:
    if node.returns is None:
        return Unknown("no annotation", fn.func.module.provider)
    text = ast.unparse(node.returns)
    if isinstance(fn.receiver, Obj | Cls) and text.strip("'\"").rpartition(".")[2] == "Self":
        return Obj(fn.receiver.info)
    value = types.annotations.read(node.returns, fn.func.scope)
    if isinstance(value, Unknown) and isinstance(node.returns, ast.Name) and call is not None and scope is not None:
        return _solved(types, fn, node, call, scope) or value
    return value


def _solved(types: "Types", fn: Fn, node: FunctionNode, call: ast.Call, scope: Scope) -> Value | None:
    """A result annotated by a type variable that also annotates an argument."""
    variable = node.returns.id  # type: ignore[union-attr]
    parameters = [*node.args.posonlyargs, *node.args.args][1 if fn.receiver is not None else 0 :]
    given = {p.arg: a for p, a in zip(parameters, call.args, strict=False)}
    given.update({k.arg: k.value for k in call.keywords if k.arg})
    for parameter_ in [*parameters, *node.args.kwonlyargs]:
        text = ast.unparse(parameter_.annotation) if parameter_.annotation else ""
        if parameter_.arg in given and text in (variable, f"type[{variable}]", f"Type[{variable}]"):
            value = types.infer(given[parameter_.arg], scope)
            return Obj(value.info) if text != variable and isinstance(value, Cls) else value
    return None


def overload(fn: Fn, call: ast.Call | None) -> FunctionNode | None:
    """The first overload whose literal arguments agree with the call's."""
    if call is None:
        return fn.func.overloads[0] if fn.func.overloads and fn.func.node.returns is None else None
    given = {k.arg: k.value for k in call.keywords if k.arg}
    for node in fn.func.overloads:
        names = [*node.args.posonlyargs, *node.args.args][1 if fn.receiver is not None else 0 :]
        bound = {p.arg: a for p, a in zip(names, call.args, strict=False)} | given
        everything = {p.arg: p for p in [*names, *node.args.kwonlyargs]}
        if set(given) <= set(everything) and all(_agrees(p.annotation, bound.get(n)) for n, p in everything.items()):
            return node
    return None


def _agrees(annotation: ast.expr | None, given: ast.expr | None) -> bool:
    if annotation is None or given is None or "Literal" not in ast.unparse(annotation):
        return True
    return not isinstance(given, ast.Constant) or repr(given.value) in ast.unparse(annotation)


def _yields(node: FunctionNode) -> bool:
    stack: list[ast.AST] = list(node.body)
    while stack:
        inner = stack.pop()
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(inner, NESTED):
            stack.extend(ast.iter_child_nodes(inner))
    return False


def _own_class(fn: Fn, value: Value) -> Value:
    """What a class method that returns `cls(…)` gives, when it is called on a class below."""
    mine = isinstance(fn.receiver, Cls) and fn.func.owner is not None and value == Obj(fn.func.owner)
    return Obj(fn.receiver.info) if mine and isinstance(fn.receiver, Cls) else value


def _from_body(types: "Types", func: FuncInfo) -> Value:
    scope = func.module.scope_of(func.node)
    returned = [s.value for s in statements(func.node.body) if isinstance(s, ast.Return) and s.value is not None]
    found = [types.infer(value, scope) for value in returned]
    sure = [value for value in found if not isinstance(value, Unknown)]
    return either(sure) if sure and len(sure) == len(found) else NOTHING


def call(types: "Types", node: ast.Call, scope: Scope) -> Value:
    """What a call expression gives."""
    special = builtin.call(types, node, scope)
    if special is not None:
        return special
    callee = types.infer(node.func, scope)
    return either([called(types, option, node, scope) for option in options(callee)])


def called(types: "Types", callee: Value, node: ast.Call, scope: Scope) -> Value:
    if isinstance(callee, Cls):
        return Obj(callee.info)
    if isinstance(callee, Fn):
        replies = remote.reply(types, callee, node)
        return replies if replies is not None else of(types, callee, node, scope)
    if isinstance(callee, Returns):
        return callee.result
    if isinstance(callee, Obj | Super):
        name = "forward" if types.hierarchy.derives(callee.info, known.MODULES) else "__call__"
        inner = types.find(callee, name).value
        return (
            of(types, inner, node, scope)
            if isinstance(inner, Fn)
            else Unknown(f"what calling a {callee.info.name} gives is not written down", callee.info.module.provider)
        )
    if isinstance(callee, Ext):
        return Ext(f"{callee.name}()")
    if isinstance(callee, Unknown):
        return callee
    return NOTHING


def returned(func: FuncInfo) -> Iterator[ast.expr]:
    for statement in statements(func.node.body):
        if isinstance(statement, ast.Return) and statement.value is not None:
            yield statement.value
