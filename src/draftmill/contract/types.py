"""What an expression stands for, worked out from the source: the reading half, used on both sides."""

import ast
from collections.abc import Callable
from typing import Any

from draftmill.contract import attributes, guards, known, results
from draftmill.contract.annotations import Annotations
from draftmill.contract.hierarchy import Hierarchy
from draftmill.contract.modules import World
from draftmill.contract.names import Meaning, Names
from draftmill.contract.scopes import COMPREHENSIONS, Binding, Scope
from draftmill.contract.values import (
    NONE,
    NOTHING,
    ClassInfo,
    Cls,
    Either,
    Ext,
    Fn,
    Found,
    FuncInfo,
    Lit,
    Map,
    Mod,
    Obj,
    Seq,
    Tup,
    Unknown,
    Value,
    Wrapped,
    either,
    of_provider,
    options,
)

ITSELF, TOO_LONG = "it depends on itself", "the chain of definitions is too long to follow"
DEPTH = 120  # nested questions before we say that we do not know


class Types:
    """Infers what expressions stand for. Every answer is kept, and a question within itself ends in `Unknown`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.names = Names(world)
        self.hierarchy = Hierarchy(self)
        self.annotations = Annotations(self)
        self.replaced: dict[
            int, list[Value]
        ] = {}  # a function's node -> what its first argument is, once put on an object
        self.grafts: dict[
            str, list[tuple[ast.expr, Scope]]
        ] = {}  # attributes that the consumer sets on foreign objects
        self.mixed: list[ClassInfo] = []  # the consumer's classes that are mixed into the provider's
        self.hosts: dict[int, list[Value]] = {}  # a class's node -> instances into whose class it is mixed
        self.later: list[tuple[FuncInfo, ast.expr, Scope]] = []  # functions bound to objects that are not looked at yet
        self._memo: dict[int, Value] = {}
        self._asked: set[object] = set()
        self._kinds: dict[type[ast.expr], Callable[[Any, Scope], Value]] = {
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: lambda node, scope: results.call(self, node, scope),
            ast.Constant: lambda node, _: Lit(node.value) if node.value is not ... else NOTHING,
            ast.JoinedStr: lambda *_: Ext("str"),
            ast.Subscript: self._subscript,
            ast.IfExp: lambda node, scope: either([self.infer(node.body, scope), self.infer(node.orelse, scope)]),
            ast.BoolOp: lambda node, scope: either([self.infer(value, scope) for value in node.values]),
            ast.NamedExpr: lambda node, scope: self.infer(node.value, scope),
            ast.Await: lambda node, scope: self.opened(self.infer(node.value, scope), "await"),
            ast.Tuple: lambda node, scope: Tup(tuple(self.infer(e, scope) for e in node.elts)),
            ast.List: self._display,
            ast.Set: self._display,
            ast.Dict: self._dict,
            ast.BinOp: self._operation,
            ast.UnaryOp: lambda node, scope: (
                Ext("bool") if isinstance(node.op, ast.Not) else self.infer(node.operand, scope)
            ),
            ast.Compare: lambda *_: Ext("bool"),
            ast.Lambda: lambda *_: NOTHING,
            ast.Starred: lambda node, scope: self.infer(node.value, scope),
        }

    def infer(self, node: ast.expr, scope: Scope) -> Value:
        key = id(node)
        if key in self._memo:
            return self._memo[key]
        if key in self._asked:
            return Unknown(ITSELF)
        if len(self._asked) > DEPTH:
            return Unknown(TOO_LONG)
        self._asked.add(key)
        try:
            if isinstance(node, COMPREHENSIONS):
                value = self._comprehension(node, scope)
            else:
                reader = self._kinds.get(type(node))
                value = reader(node, scope) if reader else NOTHING
        finally:
            self._asked.discard(key)
        if not self._asked or not (isinstance(value, Unknown) and value.reason.endswith((ITSELF, TOO_LONG))):
            self._memo[key] = value
        return value

    def find(self, value: Value, name: str) -> Found:
        """Looks attribute `name` of `value` up, as Python would."""
        return attributes.find(self, value, name)

    def result(self, fn: Fn, call: ast.Call | None = None, scope: Scope | None = None) -> Value:
        """What calling `fn` gives."""
        return results.of(self, fn, call, scope)

    def once(self, key: object, question: Callable[[], Value]) -> Value:
        """Asks `question` unless it is being asked already."""
        if key in self._asked or len(self._asked) > DEPTH:
            return Unknown(ITSELF)
        self._asked.add(key)
        try:
            return question()
        finally:
            self._asked.discard(key)

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        found = [self.meaning(meaning, node.id) for meaning in self.names.here(node.id, scope, node)]
        return guards.narrow(self, node, scope, either(found))

    def meaning(self, meaning: Meaning, name: str) -> Value:
        if meaning.binding is not None and meaning.scope is not None:
            return self.bound(name, meaning.binding, meaning.scope)
        if meaning.module is not None:
            return Mod(meaning.module)
        if meaning.outside:
            return Ext(meaning.outside)
        return Unknown(meaning.dark or f"there is no {name}", provider=bool(meaning.via))

    def bound(self, name: str, binding: Binding, scope: Scope) -> Value:
        """What one binding gives."""
        return self.once(("bound", id(binding)), lambda: self._bound(name, binding, scope))

    def _bound(self, name: str, binding: Binding, scope: Scope) -> Value:
        if binding.kind == "parameter":
            return results.parameter(self, name, binding, scope)
        if binding.kind == "function":
            return results.function(self, binding.node, scope)  # type: ignore[arg-type]
        if binding.kind == "class":
            return Cls(scope.module.class_of(binding.node))  # type: ignore[arg-type]
        assert binding.expr is not None or binding.kind == "except"
        if binding.kind == "annotated":
            value = self.annotations.read(binding.expr, scope)
            given = getattr(binding.node, "value", None)
            return self.infer(given, scope) if isinstance(value, Unknown) and given is not None else value
        if binding.expr is None:
            return Ext("BaseException")
        at = scope if binding.kind != "loop" else scope.module.scope_around(binding.expr)
        value = self.infer(binding.expr, at)
        if binding.kind == "loop":
            value = self.item(value)
        elif binding.kind == "with":
            value = self.opened(value, "with")
        elif binding.kind == "except":
            return either([Obj(o.info) if isinstance(o, Cls) else Ext("BaseException") for o in options(value)])
        return self.unpacked(value, binding.path)

    def unpacked(self, value: Value, path: tuple[int, ...]) -> Value:
        for index in path:
            value = either([self._at(option, index) for option in options(value)])
        return value

    def _at(self, value: Value, index: int) -> Value:
        if isinstance(value, Tup):
            return value.items[index] if -len(value.items) <= index < len(value.items) else NOTHING
        return self.item(value)

    def item(self, value: Value) -> Value:
        """What a loop over `value` gives."""
        found: list[Value] = []
        for option in options(value):
            if isinstance(option, Seq):
                found.append(option.item)
            elif isinstance(option, Tup):
                found.append(either(list(option.items)))
            elif isinstance(option, Map):
                found.append(option.key)
            elif isinstance(option, Cls) and self.hierarchy.derives(option.info, known.ENUMS):
                found.append(Obj(option.info))
            elif isinstance(option, Ext):
                found.append(Ext(f"{option.name}[]"))
            elif isinstance(option, Obj):
                found.append(self._through(option, ("__iter__", "__getitem__")))
            elif isinstance(option, Unknown):
                found.append(option)
            else:
                found.append(NOTHING)
        return either(found)

    def _through(self, value: Obj, methods: tuple[str, ...]) -> Value:
        for name in methods:
            method = self.find(value, name).value
            if isinstance(method, Fn):
                result = self.result(method)
                return self.item(result) if name == "__iter__" and not isinstance(result, Obj) else result
        return Unknown(f"what {value.info.name} holds is not written down", value.info.module.provider)

    def opened(self, value: Value, kind: str) -> Value:
        """What `await` or `with … as` gives."""
        found: list[Value] = []
        for option in options(value):
            if isinstance(option, Wrapped):
                found.append(option.value if option.kind == kind else option)
            elif isinstance(option, Obj) and kind == "with":
                enter = self.find(option, "__enter__").value
                enter = enter if isinstance(enter, Fn) else self.find(option, "__aenter__").value
                result = self.result(enter) if isinstance(enter, Fn) else option
                found.append(result.value if isinstance(result, Wrapped) else result)
            else:
                found.append(option)
        return either(found)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        base = self.infer(node.value, scope)
        found = [self.find(option, node.attr).value for option in options(base)]
        every = isinstance(base, Either) and base.every
        known_ones = [value for value in found if value is not None]
        value = either(known_ones, every=every) if known_ones else self._nothing_found(base, node.attr)
        return guards.narrow(self, node, scope, value)

    def _nothing_found(self, base: Value, name: str) -> Value:
        provider = any(of_provider(option) for option in options(base))
        return Unknown(f"there is no attribute {name}", provider)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        found: list[Value] = []
        for option in options(self.infer(node.value, scope)):
            if isinstance(option, Map):
                found.append(option.value)
            elif isinstance(option, Seq | Tup) and isinstance(node.slice, ast.Slice):
                found.append(option)
            elif isinstance(option, Tup) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                found.append(self._at(option, node.slice.value))
            elif isinstance(option, Cls):
                enum = self.hierarchy.derives(option.info, known.ENUMS)
                found.append(Obj(option.info) if enum else option)
            elif isinstance(option, Obj):
                found.append(self._through(option, ("__getitem__",)))
            elif isinstance(option, Lit):
                found.append(NOTHING)
            else:
                found.append(self.item(option))
        return either(found)

    def _display(self, node: ast.List | ast.Set, scope: Scope) -> Value:
        return Seq(either([self.infer(element, scope) for element in node.elts]) if node.elts else NOTHING)

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        values = [self.infer(value, scope) for value in node.values]
        return Map(Ext("str"), either(values) if values else NOTHING)

    def _operation(self, node: ast.BinOp, scope: Scope) -> Value:
        left = self.infer(node.left, scope)
        if isinstance(left, Seq | Tup | Map) or left == NONE:
            return left
        if isinstance(left, Obj | Cls | Either):
            return either([left, self.infer(node.right, scope)]) if isinstance(node.op, ast.BitOr) else NOTHING
        return left if isinstance(left, Ext | Unknown) else Ext("number")

    def _comprehension(self, node: ast.expr, scope: Scope) -> Value:
        inner = scope.module.scope_of(node)
        if isinstance(node, ast.DictComp):
            return Map(self.infer(node.key, inner), self.infer(node.value, inner))
        return Seq(self.infer(node.elt, inner))  # type: ignore[attr-defined]
