"""A class's ancestors in Python's order, its members, and where an attribute is found."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftmill.contract import known
from draftmill.contract.scopes import Scope, statements, targets
from draftmill.contract.values import ClassInfo, Cls, Either, Ext, Unknown

if TYPE_CHECKING:
    from draftmill.contract.types import Types

Ancestor = ClassInfo | Ext | Unknown
DECLARED = ("Generic", "Protocol")


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One definition of a class's member. `kind`: method, class, field (in the body), or self (set on the instance)."""

    name: str
    kind: str
    owner: ClassInfo
    node: ast.AST
    scope: Scope
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    path: tuple[int, ...] = ()

    @property
    def site(self) -> str:
        return f"{self.owner.module.place}:{getattr(self.node, 'lineno', self.owner.node.lineno)}"


@dataclass(frozen=True)
class Lookup:
    """Where an attribute of a class is found. `opaque` says why it cannot be told, where no definition is found."""

    members: tuple[Member, ...] = ()
    opaque: str = ""
    outside: str = ""
    path: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return bool(self.members or self.outside)


@dataclass
class Hierarchy:
    """Ancestors and members, each worked out once."""

    types: "Types"
    _mro: dict[int, tuple[Ancestor, ...]] = field(default_factory=dict)
    _members: dict[int, dict[str, list[Member]]] = field(default_factory=dict)
    _dynamic: dict[int, str] = field(default_factory=dict)
    _children: dict[int, list[ClassInfo]] = field(default_factory=dict)
    _ours: dict[int, list[ClassInfo]] | None = None

    def bases(self, info: ClassInfo) -> list[Ancestor]:
        found: list[Ancestor] = []
        for expr in info.node.bases:
            target = expr.value if isinstance(expr, ast.Subscript) else expr
            value = self.types.infer(target, info.scope)
            if isinstance(value, Either):
                value = next((option for option in value.options if isinstance(option, Cls)), value.options[0])
            if isinstance(value, Cls):
                found.append(value.info)
            elif isinstance(value, Ext):
                found.append(value)
            else:
                reason = value.reason if isinstance(value, Unknown) else "it is no class"
                found.append(Unknown(f"the base {ast.unparse(target)} of {info.name} is not known: {reason}"))
        return found

    def mro(self, info: ClassInfo) -> tuple[Ancestor, ...]:
        """The class itself, then its ancestors in the order of their linearization (C3)."""
        if id(info) not in self._mro:
            self._mro[id(info)] = (info,)  # what a cycle of bases finds
            bases = self.bases(info)
            lines: list[list[Ancestor]] = [
                list(self.mro(base)) if isinstance(base, ClassInfo) else [base] for base in bases
            ]
            after = [ancestor for ancestor in _merge([*lines, list(bases)]) if ancestor is not info]
            self._mro[id(info)] = (info, *after)
        return self._mro[id(info)]

    def members(self, info: ClassInfo) -> dict[str, list[Member]]:
        if id(info) not in self._members:
            found: dict[str, list[Member]] = {}
            self._members[id(info)] = found
            for member in self._read(info):
                found.setdefault(member.name, []).append(member)
        return self._members[id(info)]

    def _read(self, info: ClassInfo) -> Iterator[Member]:
        scope = info.module.scope_of(info.node)
        methods: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        for node in statements(info.node.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Member(node.name, "method", info, node, scope)
                methods.append(node)
            elif isinstance(node, ast.ClassDef):
                yield Member(node.name, "class", info, node, scope)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield Member(node.target.id, "field", info, node, scope, node.annotation, node.value)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for name, path in targets(target):
                        yield Member(name, "field", info, node, scope, None, node.value, path)
        for method in methods:
            yield from self._assigned(info, method)

    def _assigned(self, info: ClassInfo, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Member]:
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments:
            return
        me, scope = arguments[0].arg, info.module.scope_of(method)
        for node in statements(method.body):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name, path in _own(target, me):
                        yield Member(name, "self", info, node, scope, None, node.value, path)
            elif isinstance(node, ast.AnnAssign):
                for name, path in _own(node.target, me):
                    yield Member(name, "self", info, node, scope, node.annotation, node.value, path)
            elif isinstance(node, ast.With | ast.AsyncWith | ast.For | ast.AsyncFor):
                pass
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield from self._registered(info, node.value, me, scope)

    def _registered(self, info: ClassInfo, call: ast.Call, me: str, scope: Scope) -> Iterator[Member]:
        """`setattr(self, "name", …)` and torch's `self.register_buffer("name", …)`."""
        text = ast.unparse(call.func)
        registers = {f"{me}.register_buffer", f"{me}.register_parameter", f"{me}.add_module", f"{me}.register_module"}
        rest = call.args
        if text == "setattr" and rest and ast.unparse(rest[0]) == me:
            rest = rest[1:]
        elif text not in registers:
            if text in (f"{me}.__dict__.update", f"vars({me}).update"):
                self._dynamic[id(info)] = f"{info.name} fills its __dict__"
            return
        if rest and isinstance(rest[0], ast.Constant) and isinstance(rest[0].value, str):
            yield Member(rest[0].value, "self", info, call, scope, None, rest[1] if len(rest) > 1 else None)
        elif text == "setattr":
            self._dynamic[id(info)] = f"{info.name} sets attributes whose names the source does not show"

    def lookup(self, info: ClassInfo, name: str, after: ClassInfo | None = None) -> Lookup:
        """Finds attribute `name` of an instance of `info`; with `after`, past that class in the order (`super()`)."""
        line = self.mro(info)
        if after is not None and after in line:
            line = line[line.index(after) + 1 :]
        doubts: list[str] = []
        passed: list[str] = []
        for ancestor in line:
            found = self._in(ancestor, name, passed, doubts)
            if found is not None:
                return found
        if hasattr(object, name) or (name.startswith("__") and name.endswith("__")):
            return Lookup(outside=name)
        for getter in ("__getattr__", "__getattribute__"):
            doubts += [
                f"{ancestor.name} answers for unknown attributes in {getter}"
                for ancestor in self.mro(info)
                if isinstance(ancestor, ClassInfo) and getter in self.members(ancestor)
            ]
        return Lookup(opaque="; ".join(dict.fromkeys(doubts)))

    def _in(self, ancestor: Ancestor, name: str, passed: list[str], doubts: list[str]) -> Lookup | None:
        """The attribute in one class of the order; what was passed, and what may have it unseen, is noted."""
        if isinstance(ancestor, ClassInfo):
            members = self.members(ancestor).get(name)
            if members:
                passed.append(f"{ancestor.name} ({ancestor.site}) defines it at {members[-1].site}")
                return Lookup(tuple(members), path=tuple(passed))
            passed.append(f"{ancestor.name} ({ancestor.site}) inherits it")
            if id(ancestor) in self._dynamic:
                doubts.append(self._dynamic[id(ancestor)])
            return None
        if isinstance(ancestor, Unknown):
            doubts.append(ancestor.reason)
            return None
        network = ancestor.name.startswith(known.NETWORKS) and ancestor.name not in known.MODULES
        attributes = known.ATTRIBUTES.get(known.MODULES[0] if network else ancestor.name)
        if attributes is not None and name in attributes:
            return Lookup(outside=f"{ancestor.name}.{name}", path=(*passed, f"{ancestor.name} has it"))
        if (attributes is None or network) and ancestor.name.rpartition(".")[2] not in DECLARED:
            doubts.append(f"it may come from {ancestor.name}, which is in neither package")
        return None

    def derives(self, info: ClassInfo, names: tuple[str, ...]) -> bool:
        """Whether one of the outside classes `names` is among the ancestors."""
        outside = [ancestor.name for ancestor in self.mro(info) if isinstance(ancestor, Ext)]
        network = names is known.MODULES and any(name.startswith(known.NETWORKS) for name in outside)
        return network or any(name in names for name in outside)

    def children(self, info: ClassInfo) -> list[ClassInfo]:
        """The provider's classes that name `info` among their bases."""
        if id(info) not in self._children:
            name, world = info.node.name, self.types.world
            found: list[ClassInfo] = []
            for module in filter(None, map(world.module, world.derived.get(name, ()))):
                others = [module.class_of(node) for node in module.class_nodes if node.bases]
                found += [other for other in others if other is not info and info in self.bases(other)]
            self._children[id(info)] = found
        return self._children[id(info)]

    def below(self, info: ClassInfo) -> list[ClassInfo]:
        """Every class of the provider that derives from `info`, which comes first."""
        found = [info]
        for ancestor in found:
            found += [child for child in self.children(ancestor) if child not in found]
        return found

    def ours_below(self, info: ClassInfo) -> list[ClassInfo]:
        """Every class of the consumer that derives from `info`."""
        if self._ours is None:
            self._ours = {}
            modules = (self.types.world.module(name) for name, _ in self.types.world.consumer.files())
            nodes = [(m, node) for m in modules if m for node in ast.walk(m.tree) if isinstance(node, ast.ClassDef)]
            for module, node in nodes:
                for ancestor in self.mro(module.class_of(node))[1:]:
                    self._ours.setdefault(id(ancestor), []).append(module.class_of(node))
        return self._ours.get(id(info), [])

    def named(self, name: str) -> list[ClassInfo]:
        """The provider's top-level classes of that name."""
        modules = self.types.world.provider_files_with(f"class {name}")
        found = ((module, binding.node) for module in modules for binding in module.scope.bindings.get(name, ()))
        return [module.class_of(node) for module, node in found if isinstance(node, ast.ClassDef)]


def _own(target: ast.expr, me: str, path: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == me:
        yield target.attr, path
    elif isinstance(target, ast.Tuple | ast.List):
        for index, element in enumerate(target.elts):
            yield from _own(element, me, (*path, index))


def _merge(lines: list[list[Ancestor]]) -> list[Ancestor]:
    merged: list[Ancestor] = []
    while lines := [line for line in lines if line]:
        head = next(
            (line[0] for line in lines if not any(line[0] in other[1:] for other in lines)),
            lines[0][0],  # no consistent order exists: Python would refuse the class, we go on
        )
        merged.append(head)
        lines = [[other for other in line if other != head] for line in lines]
    return merged
