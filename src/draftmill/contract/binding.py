"""A call put to a signature with `inspect.Signature.bind`, so that what does not fit is said in Python's own words."""

import ast
import re
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

from draftmill.contract import signatures
from draftmill.contract.findings import Kind
from draftmill.contract.scopes import Scope
from draftmill.contract.values import Contract, FuncInfo, FunctionNode, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

KINDS: tuple[tuple[str, Kind], ...] = (
    ("missing a required", "missing argument"),
    ("unexpected keyword", "unknown argument"),
    ("too many positional", "too many positionals"),
    ("multiple values", "too many positionals"),
    ("positional only", "unknown argument"),
)
FOLLOWED = 6  # how many callables a keyword is followed through


@dataclass
class Arguments:
    """A call's arguments. `partial` is set where the source does not show all of them (`*args`, `**kwargs`)."""

    positional: list[object] = field(default_factory=list)
    keywords: dict[str, object] = field(default_factory=dict)
    partial: bool = False
    optional: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Misfit:
    """How a call does not fit: the kind, and Python's message. `unsure` where it cannot be told."""

    kind: Kind
    message: str
    unsure: bool = False


def arguments(types: "Types", call: ast.Call, scope: Scope) -> Arguments:
    """The arguments of a call; a `**name` whose dict is written out in the same block is read from there."""
    given = Arguments()
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            if isinstance(argument.value, ast.Tuple | ast.List):
                given.positional += list(argument.value.elts)
            else:
                given.partial = True
        elif not given.partial:
            given.positional.append(argument)
    for keyword in call.keywords:
        if keyword.arg:
            given.keywords[keyword.arg] = keyword.value
            continue
        names = _keys(types, keyword.value, scope)
        given.partial = given.partial or names is None or isinstance(keyword.value, ast.Name)
        for name in names or ():
            given.keywords.setdefault(name, keyword.value)
    return given


def by_name(node: ast.Call) -> Arguments | None:
    """What a call by name hands on: the tuple after `args=` and the dict after `kwargs=`; None where they are not
    written out."""
    given = Arguments()
    extra = {k.arg: k.value for k in node.keywords if k.arg}
    extra |= dict(zip(("method", "timeout", "args", "kwargs"), node.args, strict=False))
    positional, keywords = extra.get("args"), extra.get("kwargs")
    if isinstance(positional, ast.Tuple | ast.List):
        if any(isinstance(element, ast.Starred) for element in positional.elts):
            return None
        given.positional = list(positional.elts)
    elif positional is not None:
        return None
    if isinstance(keywords, ast.Dict):
        for key, value in zip(keywords.keys, keywords.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                return None
            given.keywords[key.value] = value
    elif isinstance(keywords, ast.Call) and ast.unparse(keywords.func) == "dict" and not keywords.args:
        given.keywords = {k.arg: k.value for k in keywords.keywords if k.arg}
    elif keywords is not None and not (isinstance(keywords, ast.Constant) and keywords.value is None):
        return None
    return given


def _keys(types: "Types", node: ast.expr, scope: Scope) -> list[str] | None:
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        return keys if len(keys) == len(node.keys) else None
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        return [k.arg for k in node.keywords if k.arg]
    if isinstance(node, ast.Name):
        bindings = scope.bindings.get(node.id, ())
        found = [
            _keys(types, b.expr, scope) for b in bindings if b.kind == "assign" and b.expr is not None and not b.path
        ]
        if len(found) == len(bindings) and found and len(found) == 1:
            return found[0]
    return None


def misfits(types: "Types", contract: Contract, given: Arguments) -> list[Misfit]:
    """Everything by which a call does not fit; nothing where it binds."""
    if contract.signature is None:
        return [Misfit("", contract.opaque, unsure=True)]
    found = [] if contract.opaque else bound(contract.signature, given)
    if contract.func is not None and contract.func.node.args.kwarg:
        names = set(contract.signature.parameters)
        loose = [name for name in given.keywords if name not in names]
        found += _handed_on(types, contract.func, loose)
    if contract.opaque and not found:
        return [Misfit("", contract.opaque, unsure=True)]
    return found


def bound(signature: Signature, given: Arguments) -> list[Misfit]:
    found: list[Misfit] = []
    positional, keywords = list(given.positional), dict(given.keywords)
    bind = signature.bind_partial if given.partial else signature.bind
    for _ in range(len(positional) + len(keywords) + len(signature.parameters) + 1):
        try:
            bind(*positional, **keywords)
            return found
        except TypeError as error:
            message = str(error)
        kind: Kind = next((kind for words, kind in KINDS if words in message), "unknown argument")
        found.append(Misfit(kind, message))
        name = re.search(r"'(\w+)'", message)
        if kind == "missing argument" and name:
            if signature.parameters[name[1]].kind is Parameter.POSITIONAL_ONLY:
                return found
            keywords[name[1]] = None
        elif kind == "too many positionals" and "multiple" not in message:
            limit = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
            positional = positional[: sum(p.kind in limit for p in signature.parameters.values())]
        elif name and name[1] in keywords:
            del keywords[name[1]]
        else:
            return found
    return found


def _handed_on(types: "Types", func: FuncInfo, names: list[str], depth: int = 0) -> list[Misfit]:
    """What becomes of keywords that land in `**kwargs`: followed to the callables that it is handed on to."""
    if not names or func.node.args.kwarg is None or depth > FOLLOWED:
        return []
    use = _Use(func.node, func.node.args.kwarg.arg)
    if use.free or not use.calls:
        return []
    found: list[Misfit] = []
    for name in names:
        if name in use.named:
            continue
        answers = [_accepts(types, func, call, name, depth) for call in use.calls]
        if any(answer is None for answer in answers):
            continue
        sure = [answer for answer in answers if answer is not None]
        found.append(next((answer for answer in sure if answer.unsure), sure[0]))
    return found


def _accepts(types: "Types", func: FuncInfo, call: ast.Call, name: str, depth: int) -> Misfit | None:
    """None where the callable that gets `**kwargs` takes `name`."""
    scope = func.module.scope_around(call)
    reasons: list[Misfit] = []
    for option in options(types.infer(call.func, scope)):
        contract = signatures.of(types, option)
        if contract.signature is None or contract.opaque:
            reasons.append(
                Misfit("", f"{name} is handed on to {ast.unparse(call.func)}: {contract.opaque}", unsure=True)
            )
            continue
        parameter = contract.signature.parameters.get(name)
        if parameter is not None and parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            return None
        if any(p.kind is Parameter.VAR_KEYWORD for p in contract.signature.parameters.values()):
            further = _handed_on(types, contract.func, [name], depth + 1) if contract.func else []
            if not further:
                return None
            reasons += further
            continue
        where = f"handed on by {func.name} to {contract.text} at {contract.site}"
        text = f"got an unexpected keyword argument '{name}' ({where})"
        reasons.append(Misfit("unknown argument", text))
    return reasons[0] if reasons else None


class _Use:
    """How a function uses its `**kwargs`: the calls that get all of it, the names it looks up, and whether it does
    more."""

    def __init__(self, node: FunctionNode, name: str) -> None:
        self.calls: list[ast.Call] = []
        self.named: set[str] = set()
        self.free = False
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == name:
                self._read(inner)

    def _read(self, node: ast.Name) -> None:
        parent = getattr(node, "parent", None)
        if isinstance(parent, ast.keyword) and parent.arg is None:
            call = getattr(parent, "parent", None)
            if isinstance(call, ast.Call):
                self.calls.append(call)
                return
        if isinstance(parent, ast.Attribute) and parent.attr in ("get", "pop", "setdefault"):
            call = getattr(parent, "parent", None)
            first = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if isinstance(first, ast.Constant):
                self.named.add(str(first.value))
                return
        if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
            self.named.add(str(parent.slice.value))
            return
        if isinstance(parent, ast.Compare) and isinstance(parent.left, ast.Constant):
            self.named.add(str(parent.left.value))
            return
        self.free = True
