"""Whether a use is reached at all with this provider: tests of its version and of what it has, worked out from the
source."""

import ast
import operator
import re
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from draftmill.contract import calls, guards
from draftmill.contract.scopes import Scope, ancestors
from draftmill.contract.values import Mod, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

COMPARISONS = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
NUMBER = re.compile(r"\d+(\.\d+)+[\w.+]*$")
AT_LEAST = re.compile(r"ge$|at_least|gte|min|greater|newer", re.IGNORECASE)
EQUAL = re.compile(r"_is$|_eq$|equal", re.IGNORECASE)


def unreached(types: "Types", node: ast.AST, scope: Scope) -> str:
    """Why `node` is not reached with this provider; empty where it is, or where that cannot be told."""
    for test, holds in guards.tests(node):
        told = _value(types, test, scope, 0)
        if told is not None and told != holds:
            return f"not reached with this provider: {ast.unparse(test)} is {told}"
    for parent, name, child in ancestors(node):
        if isinstance(child, ast.ExceptHandler) and isinstance(parent, ast.Try) and name == "handlers":
            errors = ast.unparse(child.type) if child.type is not None else ""
            if ("ImportError" in errors or "ModuleNotFoundError" in errors) and _imports_work(types, parent.body):
                return f"not reached with this provider: the import at line {parent.body[0].lineno} works"
    return ""


def _imports_work(types: "Types", body: list[ast.stmt]) -> bool:
    """Whether a `try` block holds imports of the provider alone, and finds all of them."""
    for statement in body:
        if not isinstance(statement, ast.ImportFrom) or not types.world.owns(statement.module or ""):
            return False
        for alias in statement.names:
            meanings = types.names.member(statement.module or "", alias.name)
            if meanings[0].missing or meanings[0].dark:
                return False
    return True


def _value(types: "Types", test: ast.expr, scope: Scope, depth: int) -> bool | None:
    if depth > 6:
        return None
    if isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING":
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _value(types, test.operand, scope, depth + 1)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [_value(types, value, scope, depth + 1) for value in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in parts:
            return decisive
        return None if None in parts else not decisive
    if isinstance(test, ast.Call):
        return _call(types, test, scope)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(types, test, scope)
    if isinstance(test, ast.Name):
        meanings = types.names.here(test.id, scope, test)
        binding = meanings[0].binding if len(meanings) == 1 else None
        if binding is not None and binding.kind == "assign" and binding.expr is not None and not binding.path:
            return _value(types, binding.expr, meanings[0].scope or scope, depth + 1)
    return None


def _call(types: "Types", test: ast.Call, scope: Scope) -> bool | None:
    name = ast.unparse(test.func).rpartition(".")[2]
    texts = [a.value for a in [*test.args, *(k.value for k in test.keywords)] if isinstance(a, ast.Constant)]
    if name in ("hasattr", "getattr") and len(test.args) > 1 and isinstance(test.args[1], ast.Constant):
        there = _has(types, test.args[0], str(test.args[1].value), scope)
        falls_back = len(test.args) == 3 and isinstance(test.args[2], ast.Constant) and not test.args[2].value
        return there if name == "hasattr" else False if there is False and falls_back else None
    numbers = [text for text in texts if isinstance(text, str) and NUMBER.match(text)]
    about = any(text in types.world.provider.packages for text in texts) or any(
        top in name for top in types.world.provider.packages
    )
    mine = _version(types.world.provider.version)
    other = _version(numbers[0]) if len(numbers) == 1 else None
    if not about or mine is None or other is None:
        return None
    if AT_LEAST.search(name):
        return mine >= other
    return mine == other if EQUAL.search(name) else None


def _has(types: "Types", node: ast.expr, name: str, scope: Scope) -> bool | None:
    answers = []
    for option in options(types.infer(node, scope)):
        if not calls.relevant(types, option):
            return None
        found = types.find(option, name)
        answers.append(None if found.opaque or found.made else found.value is not None)
    return answers[0] if answers and len(set(answers)) == 1 else None


def _compared(types: "Types", test: ast.Compare, scope: Scope) -> bool | None:
    compare = COMPARISONS.get(type(test.ops[0]))
    left, right = (_side(types, side, scope, 0) for side in (test.left, test.comparators[0]))
    if compare is None or left is None or right is None:
        return None
    return bool(compare(left, right))


def _side(types: "Types", node: ast.expr, scope: Scope, depth: int) -> Version | None:
    """A side of a comparison as a version: a literal, the provider's own, or either inside `parse(…)` or
    `Version(…)`."""
    if depth > 6:
        return None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _version(node.value)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        name = ast.unparse(node.func)
        first = node.args[0]
        if name.rpartition(".")[2] == "version" and isinstance(first, ast.Constant):
            ours = str(first.value).replace("-", "_") in types.world.provider.packages
            return _version(types.world.provider.version) if ours else None
        if name.rpartition(".")[2] in ("parse", "Version", "parse_version"):
            return _side(types, first, scope, depth + 1)
    if isinstance(node, ast.Attribute) and node.attr in ("__version__", "base_version", "release"):
        if node.attr != "__version__":
            return _side(types, node.value, scope, depth + 1)
        base = types.infer(node.value, scope)
        return _version(types.world.provider.version) if isinstance(base, Mod) and base.module.provider else None
    if isinstance(node, ast.Name):
        meanings = types.names.here(node.id, scope, node)
        one = meanings[0] if len(meanings) == 1 else None
        if one is not None and one.via and node.id.endswith("version__"):
            return _version(types.world.provider.version)
        if (
            one is not None
            and one.binding is not None
            and one.binding.kind == "assign"
            and one.binding.expr is not None
        ):
            return _side(types, one.binding.expr, one.scope or scope, depth + 1)
    return None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
