"""The consumer's side: every place where it uses the provider, read in one pass over its sources."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftmill.contract import known, remote
from draftmill.contract.modules import Module
from draftmill.contract.scopes import Scope
from draftmill.contract.values import (
    ClassInfo,
    Cls,
    Fn,
    FuncInfo,
    FunctionNode,
    Obj,
    Super,
    Unknown,
    Value,
    of_provider,
    options,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types


@dataclass(frozen=True, eq=False)
class Use:
    """One use. `how` names its sort; `base` is what an attribute is taken from, or a call's callee."""

    how: str
    node: ast.AST
    scope: Scope
    text: str
    base: Value | None = None
    name: str = ""

    @property
    def module(self) -> Module:
        return self.scope.module

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)


def consumer_modules(types: "Types") -> list[Module]:
    found = (types.world.module(name) for name, _ in types.world.consumer.files())
    return [module for module in found if module is not None and not module.provider]


def prepare(types: "Types", modules: list[Module]) -> None:
    """Notes what the consumer puts into the provider's objects, before anything is inferred from them: attributes
    that it sets, functions bound as methods, and classes mixed in by their dotted name."""
    for module in modules:
        try:
            _note(types, module)
        except RecursionError:
            module.error = f"{module.place} is nested too deeply to be read"


def _note(types: "Types", module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    _note_set(types, module, target, node.value)
        elif isinstance(node, ast.keyword) and node.arg in known.HOSTS:
            _note_mixed(types, node)


def _note_set(types: "Types", module: Module, target: ast.Attribute, value: ast.expr) -> None:
    scope = module.scope_around(target)
    owner = scope.owner is not None and scope.func is not None and _is_self(target.value, scope.func)
    if owner:
        return
    types.grafts.setdefault(target.attr, []).append((value, scope))
    bound = bound_method(types, value, scope)
    if bound is not None:
        func, receiver = bound
        if receiver is not None:
            types.later.append((func, receiver, scope))


def _is_self(node: ast.expr, func: FuncInfo) -> bool:
    arguments = [*func.node.args.posonlyargs, *func.node.args.args]
    return bool(arguments) and isinstance(node, ast.Name) and node.id == arguments[0].arg and func.owner is not None


def bound_method(types: "Types", value: ast.expr, scope: Scope) -> tuple[FuncInfo, ast.expr | None] | None:
    """The function of `types.MethodType(f, x)` or `f.__get__(x)`, with the `x`; or of a plain name, without."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        if name.rpartition(".")[2] == "MethodType" and len(value.args) == 2:
            inner = types.infer(value.args[0], scope)
            return (inner.func, value.args[1]) if isinstance(inner, Fn) else None
        if isinstance(value.func, ast.Attribute) and value.func.attr == "__get__" and value.args:
            inner = types.infer(value.func.value, scope)
            return (inner.func, value.args[0]) if isinstance(inner, Fn) else None
    if isinstance(value, ast.Name | ast.Call):  # a function, or what a function that wraps one gives
        inner = types.infer(value, scope)
        return (inner.func, None) if isinstance(inner, Fn) else None
    return None


def _note_mixed(types: "Types", node: ast.keyword) -> None:
    if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
        return
    found = remote.class_named(types, node.value.value)
    if found is None or id(found.info.node) in types.hosts:
        return
    hosts = [info for top in types.hierarchy.named(known.HOSTS[node.arg or ""]) for info in types.hierarchy.below(top)]
    types.mixed.append(found.info)
    types.hosts[id(found.info.node)] = [Obj(info) for info in hosts]


def settle(types: "Types") -> None:
    """Works out what the first argument of each function is that the consumer binds to an object."""
    for func, receiver, scope in types.later:
        value = types.infer(receiver, scope)
        types.replaced.setdefault(id(func.node), []).append(value)


def uses(types: "Types", module: Module) -> Iterator[Use]:
    """Every use of the provider in one module of the consumer."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(types, node, module)
        elif isinstance(node, ast.Call):
            yield from _call(types, node, module)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(types, node, module)
        elif isinstance(node, ast.ClassDef):
            yield from _class(types, node, module)
        elif isinstance(node, ast.keyword) and node.arg and node.arg.endswith("_cls"):
            yield from _class_name(types, node, module)


def _imports(types: "Types", node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[Use]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if types.world.owns(alias.name):
                yield Use("import", node, module.scope_around(node), f"import {alias.name}", name=alias.name)
        return
    origin = module.absolute(node)
    if not types.world.owns(origin) or (types.world.ours(origin) and node.level != 0):
        return
    for alias in node.names:
        yield Use("import", alias, module.scope_around(node), f"from {origin} import {alias.name}", name=origin)


def relevant(types: "Types", value: Value) -> bool:
    """Whether using `value` may use the provider: it is the provider's, or derives from, or is mixed into, a class of
    it."""
    if of_provider(value):
        return True
    if isinstance(value, Obj | Cls | Super):
        line = types.hierarchy.mro(value.info)
        return id(value.info.node) in types.hosts or any(isinstance(a, ClassInfo) and a.module.provider for a in line)
    return False


def _follows(types: "Types", node: ast.expr, scope: Scope) -> bool:
    """Whether what is unknown about `node` was already unknown one step before, and so is counted there."""
    while isinstance(node, ast.Subscript | ast.Await):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        base = types.infer(node.value, scope)
        return any(isinstance(option, Unknown) and option.provider for option in options(base))
    return False


def _attribute(types: "Types", node: ast.Attribute, module: Module) -> Iterator[Use]:
    parent = getattr(node, "parent", None)
    if (isinstance(parent, ast.Call) and parent.func is node) or isinstance(node.ctx, ast.Del):
        return
    scope = module.scope_around(node)
    base = types.infer(node.value, scope)
    if not any(relevant(types, option) for option in options(base)):
        return
    if isinstance(base, Unknown) and _follows(types, node.value, scope):
        return
    if isinstance(node.ctx, ast.Store):
        if not (scope.func is not None and _is_self(node.value, scope.func)):
            yield Use("setting", node, scope, ast.unparse(node), base, node.attr)
        return
    yield Use("attribute", node, scope, ast.unparse(node), base, node.attr)


def _call(types: "Types", node: ast.Call, module: Module) -> Iterator[Use]:
    scope = module.scope_around(node)
    if isinstance(node.func, ast.Attribute):
        base = types.infer(node.func.value, scope)
        if not any(relevant(types, option) for option in options(base)):
            return
        if isinstance(base, Unknown) and _follows(types, node.func.value, scope):
            return
        yield Use("call", node, scope, short(node), base, node.func.attr)
        return
    callee = types.infer(node.func, scope)
    if isinstance(node.func, ast.Name) and node.func.id == "getattr":
        yield from _getattr(types, node, scope)
    elif any(relevant(types, option) for option in options(callee)):
        yield Use("call", node, scope, short(node), callee)


def _getattr(types: "Types", node: ast.Call, scope: Scope) -> Iterator[Use]:
    if len(node.args) != 2 or not isinstance(node.args[1], ast.Constant) or not isinstance(node.args[1].value, str):
        return
    base = types.infer(node.args[0], scope)
    if any(relevant(types, option) for option in options(base)):
        yield Use("attribute", node, scope, ast.unparse(node), base, node.args[1].value)


def _class(types: "Types", node: ast.ClassDef, module: Module) -> Iterator[Use]:
    info = module.class_of(node)
    line = types.hierarchy.mro(info)
    if not any(isinstance(ancestor, ClassInfo) and ancestor.module.provider for ancestor in line):
        return
    scope = module.scope_around(node)
    yield Use("subclass", node, scope, f"class {node.name}({', '.join(map(ast.unparse, node.bases))})", Cls(info))
    for name, members in types.hierarchy.members(info).items():
        for member in members[-1:]:
            if isinstance(member.node, FunctionNode):
                yield Use("override", member.node, scope, f"{node.name}.{name}", Cls(info), name)


def _class_name(types: "Types", node: ast.keyword, module: Module) -> Iterator[Use]:
    call = getattr(node, "parent", None)
    if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) and isinstance(call, ast.Call)):
        return
    scope = module.scope_around(node.value)
    callee = types.infer(call.func, scope)
    if any(relevant(types, option) for option in options(callee)):
        text = f'{node.arg}="{node.value.value}"'
        yield Use("class name", node.value, scope, text, remote.class_named(types, node.value.value), node.value.value)


def short(node: ast.AST, limit: int = 90) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
