"""What an expression may stand for, as far as the source says it, and where a value came from."""

import ast
from dataclasses import dataclass, field
from inspect import Signature
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftmill.contract.modules import Module
    from draftmill.contract.scopes import Scope

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Value:
    """Base of everything that an expression may stand for."""


@dataclass(eq=False, slots=True)
class ClassInfo:
    """A class as it stands in the source."""

    module: "Module"
    node: ast.ClassDef
    qualname: str
    scope: "Scope"

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.qualname}"

    @property
    def site(self) -> str:
        return f"{self.module.place}:{self.node.lineno}"


@dataclass(eq=False, slots=True)
class FuncInfo:
    """A function or method as it stands in the source; `owner` is the class whose body holds it."""

    module: "Module"
    node: FunctionNode
    qualname: str
    scope: "Scope"
    owner: ClassInfo | None = None
    overloads: list[FunctionNode] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.qualname}"

    @property
    def site(self) -> str:
        return f"{self.module.place}:{self.node.lineno}"


@dataclass(frozen=True, slots=True)
class Mod(Value):
    module: "Module"


@dataclass(frozen=True, slots=True)
class Cls(Value):
    """The class itself."""

    info: ClassInfo


@dataclass(frozen=True, slots=True)
class Obj(Value):
    """An instance."""

    info: ClassInfo


@dataclass(frozen=True, slots=True)
class Super(Value):
    """`super()` in a method of `after`, of an instance of `info`."""

    info: ClassInfo
    after: ClassInfo


@dataclass(frozen=True, slots=True)
class Fn(Value):
    """A function; with a receiver, a method that has its first argument already."""

    func: FuncInfo
    receiver: Value | None = None


@dataclass(frozen=True, slots=True)
class Seq(Value):
    item: Value


@dataclass(frozen=True, slots=True)
class Tup(Value):
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Map(Value):
    key: Value
    value: Value


@dataclass(frozen=True, slots=True)
class Lit(Value):
    value: str | int | float | bool | bytes | complex | None


@dataclass(frozen=True, slots=True)
class Wrapped(Value):
    """What `await` (kind "await") or `with` (kind "with") gives `value` for."""

    kind: str
    value: Value


@dataclass(frozen=True, slots=True)
class Returns(Value):
    """A callable of which only the result is known."""

    result: Value


@dataclass(frozen=True, slots=True)
class Ext(Value):
    """Something of neither package, by its dotted name."""

    name: str


@dataclass(frozen=True, slots=True)
class Unknown(Value):
    """Not known, and why. `provider` says whether it came out of the provider, so that a use of it counts."""

    reason: str
    provider: bool = False


@dataclass(frozen=True, slots=True)
class Either(Value):
    """One of several. `every` is true where the value may be any of them (each must then do), as after a type guard."""

    options: tuple[Value, ...]
    every: bool = False


NONE = Lit(None)
NOTHING = Unknown("nothing says what it is")


def either(options: list[Value], *, every: bool = False) -> Value:
    """Joins what a name may stand for; None goes where something else is known, since code tests for it."""
    flat: list[Value] = []
    for option in options:
        every = every or (isinstance(option, Either) and option.every)
        for part in option.options if isinstance(option, Either) else (option,):
            if part not in flat:
                flat.append(part)
    known = [part for part in flat if part != NONE] or flat
    sure = [part for part in known if not isinstance(part, Unknown)]
    known = sure or known
    if not known:
        return NOTHING
    return known[0] if len(known) == 1 else Either(tuple(known), every)


def options(value: Value) -> tuple[Value, ...]:
    return value.options if isinstance(value, Either) else (value,)


@dataclass(frozen=True)
class Found:
    """`value` is None where there is no such attribute; `opaque` says why it may be there all the same."""

    value: Value | None
    site: str = ""
    path: tuple[str, ...] = ()
    opaque: str = ""
    made: bool = False  # the consumer itself puts it there
    ours: bool = False  # it is a definition of the consumer's own


def of_provider(value: Value) -> bool:
    """Whether a use of `value` is a use of the provider."""
    if isinstance(value, Mod):
        return value.module.provider
    if isinstance(value, Cls | Obj | Super):
        return value.info.module.provider
    if isinstance(value, Fn):
        return value.func.module.provider
    return isinstance(value, Unknown) and value.provider


@dataclass(frozen=True)
class Contract:
    """What a callable takes. `opaque` says why that is not known; `func` is the function whose body may hand keywords
    on."""

    name: str
    site: str
    signature: Signature | None = None
    path: tuple[str, ...] = ()
    opaque: str = ""
    func: FuncInfo | None = None
    note: str = ""
    owner: ClassInfo | None = None

    @property
    def text(self) -> str:
        return f"{self.name}{self.signature}" if self.signature is not None else self.name
