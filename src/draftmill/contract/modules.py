"""The modules of both packages: found, parsed once, and their names resolved through re-exports and lazy attributes."""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from draftmill.contract.scopes import Scope, link, statements
from draftmill.contract.sources import Tree
from draftmill.contract.values import ClassInfo, FuncInfo, FunctionNode

CLASS = re.compile(rb"^[ \t]*class\s+\w+\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*:", re.MULTILINE)
NAME = re.compile(rb"\w+")
ALIAS = re.compile(rb"\b(\w+)\s+as\s+(\w+)")


@dataclass(eq=False)
class Module:
    """One source file. `provider` says whose it is; `error` why it has no tree."""

    name: str
    path: Path
    place: str
    provider: bool
    package: bool
    namespace: bool = False
    error: str = ""
    _classes: dict[int, ClassInfo] = field(default_factory=dict, repr=False)
    _functions: dict[int, FuncInfo] = field(default_factory=dict, repr=False)
    _scopes: dict[int, Scope] = field(default_factory=dict, repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        if self.namespace:
            return ast.Module(body=[], type_ignores=[])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.path.read_bytes(), filename=self.place)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            self.error = f"{self.place} cannot be read as Python: {error}"
            tree = ast.Module(body=[], type_ignores=[])
        link(tree)
        return tree

    @cached_property
    def class_nodes(self) -> list[ast.ClassDef]:
        """The classes at the top of the module, and in its branches."""
        return [node for node in statements(self.tree.body) if isinstance(node, ast.ClassDef)]

    @cached_property
    def scope(self) -> Scope:
        return Scope(self, self.tree)

    def absolute(self, statement: ast.ImportFrom) -> str:
        """The module that a `from … import` names, with its dots resolved."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - statement.level + (1 if self.package else 0)]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def class_of(self, node: ast.ClassDef) -> ClassInfo:
        if id(node) not in self._classes:
            self._classes[id(node)] = ClassInfo(self, node, _qualname(node), self.scope_around(node))
        return self._classes[id(node)]

    def function_of(self, node: FunctionNode) -> FuncInfo:
        if id(node) not in self._functions:
            around = self.scope_around(node)
            owner = self.class_of(around.node) if isinstance(around.node, ast.ClassDef) else None
            self._functions[id(node)] = FuncInfo(self, node, _qualname(node), around, owner)
        return self._functions[id(node)]

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope that `node` (a module, class, function, lambda or comprehension) opens."""
        if node is self.tree:
            return self.scope
        if id(node) not in self._scopes:
            parent = self.scope_around(node)
            owner, func = parent.owner, parent.func
            if isinstance(node, ast.ClassDef):
                owner, func = self.class_of(node), None
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                func = self.function_of(node)
            self._scopes[id(node)] = Scope(self, node, parent, owner, func)  # type: ignore[arg-type]
        return self._scopes[id(node)]

    def scope_around(self, node: ast.AST) -> Scope:
        """The scope in which `node` is evaluated: a function's defaults and decorators belong outside it."""
        child, parent = node, getattr(node, "parent", None)
        while parent is not None:
            if isinstance(parent, ast.Module):
                return self.scope
            if isinstance(parent, ast.ClassDef) and child.block == "body":  # type: ignore[attr-defined]
                return self.scope_of(parent)
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and child.block == "body":  # type: ignore[attr-defined]
                return self.scope_of(parent)
            if isinstance(parent, ast.Lambda) and child.block == "body":  # type: ignore[attr-defined]
                return self.scope_of(parent)
            if isinstance(parent, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) and not (
                child is parent.generators[0] and _in_first_source(node, parent)
            ):
                return self.scope_of(parent)
            child, parent = parent, getattr(parent, "parent", None)
        return self.scope

    @cached_property
    def lazy(self) -> dict[str, tuple[str, ast.expr]]:
        """Names that a module-level `__getattr__` gives, read from the tables beside it and from its own tests: the
        "module:attribute" that it imports ("" where that is not what it does), and the expression that shows it."""
        if self.getter is None:
            return {}
        table: dict[str, tuple[str, ast.expr]] = {}
        for statement in statements(self.tree.body):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
                table.update(_lazy_table(statement.value))
        table.update(_lazy_tests(self.getter))
        return table

    @cached_property
    def getter(self) -> ast.FunctionDef | None:
        """The module-level `__getattr__`."""
        found = (n for n in statements(self.tree.body) if isinstance(n, ast.FunctionDef) and n.name == "__getattr__")
        return next(found, None)

    def star_imports(self) -> Iterator[str]:
        for statement in statements(self.tree.body):
            if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
                yield self.absolute(statement)

    @cached_property
    def exported(self) -> set[str] | None:
        """The names in `__all__`, or None where there is none that can be read."""
        for binding in self.scope.bindings.get("__all__", ()):
            if isinstance(binding.expr, ast.List | ast.Tuple):
                return {e.value for e in binding.expr.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)}
        return None


def _in_first_source(node: ast.AST, comprehension: ast.AST) -> bool:
    child = node
    while getattr(child, "parent", None) is not comprehension:
        if child.block == "iter":  # type: ignore[attr-defined]
            return True
        child = child.parent  # type: ignore[attr-defined]
    return False


def _lazy_table(node: ast.Dict) -> Iterator[tuple[str, tuple[str, ast.expr]]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            continue
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        target = ":".join(texts) if len(texts) == len(parts) <= 2 else ""
        if len(texts) == 1 and target and ":" not in target:
            target = f"{target}:{key.value}"
        yield key.value, (target, value)


def _lazy_tests(getter: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, ast.expr]]]:
    """`if name == "x": …; return y` in a `__getattr__`."""
    for node in ast.walk(getter):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
            returned = next((s.value for s in node.body if isinstance(s, ast.Return) and s.value is not None), None)
            sides = [node.test.left, *node.test.comparators]
            literals = [
                e for side in sides for e in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
            ]
            for literal in literals:
                if returned is not None and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                    yield literal.value, ("", returned)


def _qualname(node: ast.AST) -> str:
    parts = [node.name]  # type: ignore[attr-defined]
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.name)
    return ".".join(reversed(parts))


class World:
    """Both packages together, each file parsed when it is first asked for."""

    def __init__(self, consumer: Tree, provider: Tree) -> None:
        self.consumer, self.provider = consumer, provider
        self._modules: dict[str, Module | None] = {}
        self._texts: list[tuple[str, bytes]] | None = None

    def module(self, name: str) -> Module | None:
        """The module of that dotted name, in the consumer or the provider; None if neither has it."""
        if name not in self._modules:
            self._modules[name] = self._find(name)
        return self._modules[name]

    def _find(self, name: str) -> Module | None:
        for tree, is_provider in ((self.consumer, False), (self.provider, True)):
            path = tree.module_file(name)
            if path is not None:
                package = path.is_dir() or path.name == "__init__.py"
                if path.is_dir():
                    return Module(name, path / "__init__.py", tree.place(path), is_provider, True, namespace=True)
                return Module(name, path, tree.place(path), is_provider, package)
        return None

    def owns(self, name: str) -> bool:
        """Whether a dotted name belongs to the provider."""
        return name.partition(".")[0] in self.provider.packages

    def ours(self, name: str) -> bool:
        return name.partition(".")[0] in self.consumer.packages

    @property
    def known(self) -> list[Module]:
        """The modules of both packages that were looked at so far."""
        return [module for module in self._modules.values() if module is not None]

    @property
    def texts(self) -> list[tuple[str, bytes]]:
        """The provider's modules, by name, as bytes."""
        if self._texts is None:
            self._texts = [(name, path.read_bytes()) for name, path in self.provider.files()]
        return self._texts

    @cached_property
    def derived(self) -> dict[str, list[str]]:
        """For each name that stands among the bases of a class of the provider, also under the name that an import gave
        it, the modules with such a class."""
        found: dict[str, list[str]] = {}
        for name, data in self.texts:
            renamed = {alias: original for original, alias in ALIAS.findall(data)}
            bases = {base for listed in CLASS.findall(data) for base in NAME.findall(listed)}
            for base in sorted(bases | {renamed[base] for base in bases if base in renamed}):
                found.setdefault(base.decode(), []).append(name)
        return found

    def provider_files_with(self, text: str) -> list[Module]:
        """The provider's modules whose source holds `text`, in the order of their names."""
        wanted = text.encode()
        found = (self.module(name) for name, data in self.texts if wanted in data)
        return [module for module in found if module is not None]
