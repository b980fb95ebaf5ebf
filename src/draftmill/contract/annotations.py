"""Annotations as values: what a name, parameter or result is declared to be."""

import ast
from typing import TYPE_CHECKING

from draftmill.contract import known
from draftmill.contract.scopes import Scope, link
from draftmill.contract.values import (
    NONE,
    Cls,
    Either,
    Ext,
    Lit,
    Map,
    Obj,
    Returns,
    Seq,
    Tup,
    Unknown,
    Value,
    Wrapped,
    either,
)

if TYPE_CHECKING:
    from draftmill.contract.types import Types

VARIABLES = {"typing.TypeVar()", "typing_extensions.TypeVar()", "typing.ParamSpec()", "typing_extensions.ParamSpec()"}


class Annotations:
    """Reads annotations of one audit."""

    def __init__(self, types: "Types") -> None:
        self.types = types
        self._parsed: dict[int, tuple[ast.AST, ast.expr | None]] = {}

    def read(self, node: ast.expr | None, scope: Scope) -> Value:
        if node is None:
            return Unknown("no annotation says what it is", scope.module.provider)
        return self.types.once(("annotation", id(node)), lambda: self._read(node, scope))

    def _read(self, node: ast.expr, scope: Scope) -> Value:
        provider = scope.module.provider
        if isinstance(node, ast.Constant):
            if node.value is None:
                return NONE
            if isinstance(node.value, str):
                parsed = self._text(node)
                return self.read(parsed, scope) if parsed else Unknown("an annotation that is no expression", provider)
            return Unknown("an annotation that is no type", provider)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return either([self.read(node.left, scope), self.read(node.right, scope)])
        if isinstance(node, ast.Subscript):
            return self._generic(node, scope)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._plain(node, scope)
        return Unknown(f"the annotation {ast.unparse(node)} is not understood", scope.module.provider)

    def _text(self, node: ast.Constant) -> ast.expr | None:
        if id(node) not in self._parsed:
            try:
                tree = ast.parse(str(node.value).strip(), mode="eval")
                link(tree)
                parsed: ast.expr | None = tree.body
            except (SyntaxError, ValueError):
                parsed = None
            self._parsed[id(node)] = (node, parsed)
        return self._parsed[id(node)][1]

    def _plain(self, node: ast.Name | ast.Attribute, scope: Scope) -> Value:
        text = ast.unparse(node).rpartition(".")[2]
        provider = scope.module.provider
        if text == "Self":
            return Obj(scope.owner) if scope.owner else Unknown("Self outside a class", provider)
        if text in ("Any", "object"):
            return Unknown(f"it is annotated {text}", provider)
        if isinstance(node, ast.Name):
            found = [
                self._alias(m.binding.expr, m.scope)
                for m in self.types.names.here(node.id, scope)
                if m.binding is not None
                and m.scope is not None
                and m.binding.expr is not None
                and m.binding.kind in ("assign", "annotated")
                and self._is_type(m.binding.expr)
            ]
            if found:
                return either(found)
        value = self.types.infer(node, scope)
        if isinstance(value, Either):
            return either([self._instance(option, text, provider) for option in value.options])
        return self._instance(value, text, provider)

    @staticmethod
    def _is_type(expr: ast.expr) -> bool:
        if isinstance(expr, ast.Name | ast.Attribute | ast.Subscript):
            return True
        return (isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.BitOr)) or (
            isinstance(expr, ast.Constant) and isinstance(expr.value, str)
        )

    def _alias(self, expr: ast.expr, scope: Scope) -> Value:
        return self.read(expr, scope)

    def _instance(self, value: Value, text: str, provider: bool) -> Value:
        if isinstance(value, Cls):
            return Obj(value.info)
        if isinstance(value, Ext):
            if value.name in VARIABLES:
                return Unknown(f"it is the type variable {text}", provider)
            if value.name in known.MODULES and provider:
                return Unknown(f"it is annotated {text}, which any model is", provider)
            if text in known.GENERIC_SEQUENCES:
                return Seq(Unknown(f"a {text} of unnamed things", provider))
            if text in known.GENERIC_MAPS:
                return Map(Ext("object"), Unknown(f"a {text} of unnamed things", provider))
            if text == "Callable":
                return Returns(Unknown("a callable without a stated result", provider))
            return Ext(value.name.removesuffix("()"))
        return value if isinstance(value, Unknown) else Unknown(f"the annotation {text} is no type", provider)

    def _generic(self, node: ast.Subscript, scope: Scope) -> Value:
        head = ast.unparse(node.value).rpartition(".")[2]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        parts = parts or [node.slice]
        first = parts[0]
        if head in known.TRANSPARENT:
            return self.read(first, scope)
        if head == "Union":
            return either([self.read(part, scope) for part in parts])
        if head == "Literal":
            constants = [part.value for part in parts if isinstance(part, ast.Constant)]
            return either([Lit(value) for value in constants if value is not ...])
        if head in ("type", "Type"):
            value = self.read(first, scope)
            return Cls(value.info) if isinstance(value, Obj) else value
        if head in ("tuple", "Tuple"):
            if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...:
                return Seq(self.read(first, scope))
            return Tup(tuple(self.read(part, scope) for part in parts))
        return self._container(node, head, parts, scope)

    def _container(self, node: ast.Subscript, head: str, parts: list[ast.expr], scope: Scope) -> Value:
        first = parts[0]
        if head in known.GENERIC_MAPS:
            return Map(self.read(first, scope), self.read(parts[-1], scope))
        if head in known.GENERIC_SEQUENCES:
            return Seq(self.read(first, scope))
        if head in known.AWAITABLES:
            return Wrapped("await", self.read(parts[-1], scope))
        if head in known.CONTEXTS:
            return Wrapped("with", self.read(first, scope))
        if head in known.GUARDS:
            return Ext("bool")
        if head == "Callable":
            return Returns(self.read(parts[-1], scope))
        if isinstance(node.value, ast.Name | ast.Attribute):
            return self._plain(node.value, scope)
        return Unknown(f"{ast.unparse(node)} is not understood", scope.module.provider)

    def guard(self, node: ast.expr | None, scope: Scope) -> list[Value]:
        """What a `TypeGuard[…]` or `TypeIs[…]` result narrows its first argument to; nothing where it is none."""
        if isinstance(node, ast.BinOp):
            return [*self.guard(node.left, scope), *self.guard(node.right, scope)]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in known.GUARDS:
            return [self.read(node.slice, scope)]
        return []
