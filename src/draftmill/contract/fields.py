"""Constructors that are generated from a class's fields: dataclasses, pydantic, NamedTuple, TypedDict, msgspec."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from draftmill.contract.hierarchy import Member
from draftmill.contract.values import ClassInfo, Contract, Ext, Fn, options

if TYPE_CHECKING:
    from draftmill.contract.types import Types

FACTORIES = {"field", "Field", "PydanticField", "ib", "attrib"}
_Kind = Any  # inspect's own type of a parameter's kind is private


class Text:
    """A default or an annotation, by its source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass
class _Fields:
    """The fields so far, in the order in which the constructor takes them."""

    found: dict[str, Parameter] = field(default_factory=dict)
    extra: str = ""
    keyword_only: bool = False
    opaque: list[str] = field(default_factory=list)


def parameter(name: str, kind: _Kind, annotation: ast.expr | None, default: ast.expr | None) -> Parameter:
    return Parameter(
        name,
        kind,
        default=Text(ast.unparse(default)) if default is not None else Parameter.empty,
        annotation=Text(ast.unparse(annotation)) if annotation is not None else Parameter.empty,
    )


def decorated(types: "Types", info: ClassInfo) -> str:
    """ "dataclass" or "pydantic" where a decorator makes the class one, directly or inside a decorator of its own."""
    for decorator in info.node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        for option in options(types.infer(target, info.scope)):
            kind = _makes(option.name) if isinstance(option, Ext) else ""
            if isinstance(option, Fn):
                kind = _inside(types, option)
            if kind and not _says(decorator, "init", False):
                return kind
    return ""


def _makes(name: str) -> str:
    if name in ("pydantic.dataclasses.dataclass", "pydantic.dataclass"):
        return "pydantic"
    return (
        "dataclass"
        if name in ("dataclasses.dataclass", "attr.s", "attrs.define", "attr.dataclass", "attrs.frozen")
        else ""
    )


def _inside(types: "Types", fn: Fn) -> str:
    for node in ast.walk(fn.func.node):
        if isinstance(node, ast.Call):
            value = types.infer(node.func, fn.func.module.scope_around(node))
            kind = _makes(value.name) if isinstance(value, Ext) else ""
            if kind:
                return kind
    return ""


def _says(decorator: ast.expr, keyword: str, value: bool) -> bool:
    return isinstance(decorator, ast.Call) and any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is value for k in decorator.keywords
    )


def generated(types: "Types", info: ClassInfo, kind: str, path: tuple[str, ...]) -> Contract:
    """The constructor that `kind` generates for `info`."""
    fields = _Fields()
    line = [a for a in types.hierarchy.mro(info) if isinstance(a, ClassInfo)]
    for ancestor in reversed(line):
        decorator = decorated(types, ancestor)
        if kind in ("dataclass", "pydantic") and not decorator:
            continue
        fields.keyword_only = (
            kind in ("model", "dict")
            or any(_says(d, "kw_only", True) for d in ancestor.node.decorator_list)
            or any(k.arg == "kw_only" and ast.unparse(k.value) == "True" for k in ancestor.node.keywords)
        )
        for parameter_ in _fields(types, ancestor, kind, fields):
            fields.found[parameter_.name] = parameter_
        fields.extra = _extra(types, ancestor) or fields.extra
    found = list(fields.found.values())
    found.sort(key=lambda p: p.kind is Parameter.KEYWORD_ONLY)
    note = ""
    loose = (kind in ("model", "pydantic") and fields.extra != "forbid") or kind == "dict"
    if loose:
        found.append(Parameter("extra", Parameter.VAR_KEYWORD))
        note = (
            "unknown keywords are kept" if fields.extra == "allow" else "unknown keywords are ignored without an error"
        )
    try:
        signature = Signature(found)
    except ValueError as error:
        return Contract(info.name, info.site, opaque=f"{info.name}'s fields make no signature: {error}", path=path)
    path = (*path, f"its constructor is generated from its fields ({kind})")
    return Contract(info.name, info.site, signature, path, note=note)


def _extra(types: "Types", info: ClassInfo) -> str:
    """What pydantic does with unknown keywords: "forbid", "allow", "ignore", or "" where this class does not say."""
    texts = [ast.unparse(d) for d in info.node.decorator_list] + [ast.unparse(k) for k in info.node.keywords]
    texts += [ast.unparse(m.node) for m in types.hierarchy.members(info).get("model_config", ())]
    for decorator in info.node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        value = types.infer(target, info.scope)
        if isinstance(value, Fn):
            texts.append(ast.unparse(value.func.node))
    for choice in ("forbid", "allow", "ignore"):
        if any(f"extra='{choice}'" in text or f"'extra': '{choice}'" in text for text in texts):
            return choice
    return ""


def _fields(types: "Types", info: ClassInfo, kind: str, so_far: _Fields) -> Iterator[Parameter]:
    keyword_only = so_far.keyword_only
    for members in types.hierarchy.members(info).values():
        for member in members:
            if member.kind != "field" or (member.annotation is None and not _attrs(member.value)):
                continue
            text = ast.unparse(member.annotation) if member.annotation is not None else ""
            if text.rpartition(".")[2] == "KW_ONLY":
                keyword_only = True
                continue
            head = text.strip("'\"").partition("[")[0].rpartition(".")[2]
            if head == "ClassVar" or (
                kind == "model" and (member.name.startswith("_") or member.name == "model_config")
            ):
                continue
            made = _parameter(member, kind, keyword_only)
            if made is not None:
                yield made


def _attrs(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("ib", "attrib")


def _parameter(member: Member, kind: str, keyword_only: bool) -> Parameter | None:
    how: _Kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
    value = member.value
    if value is None and isinstance(member.annotation, ast.Subscript) and "Field(" in ast.unparse(member.annotation):
        value = next((n for n in ast.walk(member.annotation) if isinstance(n, ast.Call)), None)
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in FACTORIES:
        given = {k.arg: k.value for k in value.keywords if k.arg}
        if "init" in given and ast.unparse(given["init"]) == "False":
            return None
        if "kw_only" in given and ast.unparse(given["kw_only"]) == "True":
            how = Parameter.KEYWORD_ONLY
        alias = given.get("alias") or given.get("validation_alias")
        default = given.get("default") or given.get("default_factory") or given.get("factory")
        if default is None and value.args and ast.unparse(value.args[0]) not in ("...", "Ellipsis"):
            default = value.args[0]
        if default is not None and ast.unparse(default) in ("...", "Ellipsis"):
            default = None
        made = parameter(member.name, how, member.annotation, default)
        if isinstance(alias, ast.Constant) and isinstance(alias.value, str) and alias.value.isidentifier():
            made = made.replace(name=alias.value)
        return made
    if kind == "dict":
        made = parameter(member.name, how, member.annotation, None)
        return made.replace(default=Text("<absent>"))  # a TypedDict checks nothing when it is made
    return parameter(member.name, how, member.annotation, value)
