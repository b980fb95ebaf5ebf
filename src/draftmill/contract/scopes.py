"""Where names are bound in a block of source, and which binding reaches a use."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftmill.contract.values import ClassInfo, FuncInfo

if TYPE_CHECKING:
    from draftmill.contract.modules import Module

ScopeNode = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(eq=False, slots=True)
class Binding:
    """One place where a name gets its meaning.

    `kind` is one of: assign, annotated, loop, with, import, from, function, class, parameter, except. `expr` is what
    it is taken from, `path` the indexes by which a tuple is unpacked.
    """

    kind: str
    node: ast.AST
    expr: ast.expr | None = None
    path: tuple[int, ...] = ()
    module: str = ""
    symbol: str = ""


@dataclass(eq=False)
class Scope:
    """A block with names of its own."""

    module: "Module"
    node: ScopeNode
    parent: "Scope | None" = None
    owner: ClassInfo | None = None
    func: FuncInfo | None = None
    _bindings: dict[str, list[Binding]] | None = field(default=None, repr=False)

    @property
    def bindings(self) -> dict[str, list[Binding]]:
        if self._bindings is None:
            self._bindings = dict(_collect(self))
        return self._bindings


def _collect(scope: Scope) -> dict[str, list[Binding]]:
    found: dict[str, list[Binding]] = {}
    for name, binding in _bindings(scope):
        found.setdefault(name, []).append(binding)
    if isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in statements(scope.node.body):
            for name in statement.names if isinstance(statement, ast.Global | ast.Nonlocal) else ():
                found.pop(name, None)
    return found


def _bindings(scope: Scope) -> Iterator[tuple[str, Binding]]:
    node = scope.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield from _parameters(node.args)
    if isinstance(node, COMPREHENSIONS):
        for part in node.generators:
            for name, path in targets(part.target):
                yield name, Binding("loop", part.target, part.iter, path)
    elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in statements(node.body):
            yield from bound_by(statement, scope.module)


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, Binding]]:
    for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        yield arg.arg, Binding("parameter", arg, arg.annotation)
    for star, kind in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
        if star:
            yield star.arg, Binding("parameter", star, star.annotation, symbol=kind)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a block and of the blocks in it, but not of functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, NESTED):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, part, None) or [])
        for handler in getattr(statement, "handlers", ()):
            yield from statements(handler.body)
        for case in getattr(statement, "cases", ()):
            yield from statements(case.body)


def targets(target: ast.expr, path: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(target, ast.Name):
        yield target.id, path
    elif isinstance(target, ast.Tuple | ast.List):
        for index, element in enumerate(target.elts):
            yield from targets(element, (*path, index))
    elif isinstance(target, ast.Starred):
        yield from targets(target.value, (*path[:-1], -1))


def bound_by(statement: ast.stmt, module: "Module") -> Iterator[tuple[str, Binding]]:
    """Yields the names that one statement binds, without those of the blocks inside it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name, Binding("function", statement)
    elif isinstance(statement, ast.ClassDef):
        yield statement.name, Binding("class", statement)
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from _imported(statement, module)
    elif isinstance(statement, ast.Try | ast.TryStar):
        for handler in statement.handlers:
            if handler.name:
                yield handler.name, Binding("except", handler, handler.type)
    else:
        yield from _assigned(statement)
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from _walrus(child)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, Binding]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            for name, path in targets(target):
                yield name, Binding("assign", statement, statement.value, path)
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, Binding("annotated", statement, statement.annotation)
    elif isinstance(statement, ast.For | ast.AsyncFor):
        for name, path in targets(statement.target):
            yield name, Binding("loop", statement.target, statement.iter, path)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars is not None:
                for name, path in targets(item.optional_vars):
                    yield name, Binding("with", item.optional_vars, item.context_expr, path)
    elif isinstance(statement, ast.TypeAlias):
        yield statement.name.id, Binding("assign", statement, statement.value)


def _walrus(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, ast.NamedExpr):
        yield node.target.id, Binding("assign", node, node.value)
    if isinstance(node, ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.comprehension | ast.keyword):
            yield from _walrus(child)


def _imported(statement: ast.Import | ast.ImportFrom, module: "Module") -> Iterator[tuple[str, Binding]]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, Binding("import", statement, module=alias.name if alias.asname else name)
        return
    origin = module.absolute(statement)
    for alias in statement.names:
        yield alias.asname or alias.name, Binding("from", statement, module=origin, symbol=alias.name)


def link(root: ast.AST) -> None:
    """Gives every node below `root` a `parent`, and the `block` (a field's name) in which it stands there."""
    stack = [root]
    node_type = ast.AST
    while stack:
        node = stack.pop()
        fields = node.__dict__
        for name in node._fields:
            value = fields.get(name)
            if value.__class__ is list:
                for child in value:
                    if isinstance(child, node_type):
                        child.parent, child.block = node, name  # type: ignore[attr-defined]
                        stack.append(child)
            elif isinstance(value, node_type) and value._fields:
                value.parent, value.block = node, name  # type: ignore[attr-defined]
                stack.append(value)


def ancestors(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yields (parent, the field in which the child stands, the child), from the inside out."""
    while (parent := getattr(node, "parent", None)) is not None:
        yield parent, node.block, node  # type: ignore[attr-defined]
        node = parent


def _blocks(node: ast.AST) -> list[tuple[ast.AST, str]]:
    return [(parent, name) for parent, name, _ in ancestors(node)]


def _end(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0)


def _start(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _home(binding: Binding) -> tuple[ast.AST, str]:
    """The block in which a binding holds once it has run."""
    node = binding.node
    if binding.kind == "loop":
        return node.parent, "body"  # type: ignore[attr-defined]
    if binding.kind == "except":
        return node, "body"
    while not isinstance(node, ast.stmt):
        node = node.parent  # type: ignore[attr-defined]
    return node.parent, node.block  # type: ignore[attr-defined]


def final(bindings: list[Binding], root: ast.AST) -> list[Binding]:
    """Those bindings of one name that may hold once the whole of `root` (a module, a class) has run: its variants."""
    kept: list[Binding] = []
    for binding in bindings:
        home, _ = _home(binding)
        typing_only = isinstance(home, ast.If) and "TYPE_CHECKING" in ast.unparse(home.test)
        if home is root or (typing_only and not kept):
            kept = [binding]
        elif not typing_only:
            kept.append(binding)
    return kept


def reaching(bindings: list[Binding], use: ast.AST) -> list[Binding]:
    """Those bindings of one name, in one scope, that may hold at `use`: the last one that always runs before it, and
    what may run after that."""
    if len(bindings) == 1 or not hasattr(use, "parent"):
        return bindings
    around = _blocks(use)
    within = {(id(parent), name) for parent, name in around}
    fields = {id(parent): name for parent, name in around}
    loops = {id(parent) for parent, _ in around if isinstance(parent, LOOPS)}
    kept: list[Binding] = []
    later: list[Binding] = []
    for binding in bindings:
        if binding.kind == "parameter":
            kept = [binding]
            continue
        blocks = _blocks(binding.node)
        if any(isinstance(p, ast.If) and {fields.get(id(p)), name} == {"body", "orelse"} for p, name in blocks):
            continue
        home, name = _home(binding)
        if _end(binding.node) > _start(use) and binding.kind != "except":
            if any(id(parent) in loops for parent, _ in blocks):
                later.append(binding)
        elif (id(home), name) in within:
            kept = [binding]
        elif not ends(getattr(home, name, None) or []):
            kept.append(binding)
    return kept + later or bindings


def ends(body: list[ast.stmt]) -> bool:
    """Whether a block never runs to its end."""
    return bool(body) and isinstance(body[-1], EXITS)
