"""What a name means: through scopes, imports, re-exports, star imports and lazy module attributes."""

import ast
import builtins
from dataclasses import dataclass, field

from draftmill.contract.modules import Module, World
from draftmill.contract.scopes import Binding, Scope, final, reaching

BUILTIN = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """What a name leads to: a binding in a scope, a whole module, or something outside both packages.

    `dark` says why it cannot be told; all empty means that there is no such name. `via` lists the modules that re-
    export it.
    """

    binding: Binding | None = None
    scope: Scope | None = None
    module: Module | None = None
    outside: str = ""
    dark: str = ""
    via: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        return not (self.binding or self.module or self.outside or self.dark)


@dataclass
class Names:
    """Resolves names, each (module, name) once."""

    world: World
    _members: dict[tuple[str, str], list[Meaning]] = field(default_factory=dict)

    def here(self, name: str, scope: Scope, at: ast.AST | None = None) -> list[Meaning]:
        """What `name` may mean in `scope`, at the node `at`; imports are followed to the definition."""
        inner: Scope | None = scope
        while inner is not None:
            passes = isinstance(inner.node, ast.ClassDef) and inner is not scope
            if not passes and (bindings := inner.bindings.get(name)):
                direct = at is not None and inner is scope
                if direct and at is not None:
                    chosen = reaching(bindings, at)
                elif isinstance(inner.node, ast.Module):
                    chosen = final(bindings, inner.node)
                else:
                    chosen = bindings
                return [meaning for binding in chosen for meaning in self.follow(binding, inner)]
            inner = inner.parent
        found = self._starred(scope.module, name, ())
        if not found and name in BUILTIN:
            found = [Meaning(outside=name)]
        return found or [Meaning(dark=f"the name {name} is not bound here")]

    def follow(self, binding: Binding, scope: Scope, via: tuple[str, ...] = ()) -> list[Meaning]:
        if binding.kind == "import":
            return [self.module(binding.module)]
        if binding.kind == "from":
            return self.member(binding.module, binding.symbol, via)
        return [Meaning(binding=binding, scope=scope, via=via)]

    def module(self, name: str) -> Meaning:
        module = self.world.module(name)
        if module is not None:
            return Meaning(module=module)
        if self.world.owns(name) or self.world.ours(name):
            return Meaning()
        return Meaning(outside=name)

    def member(self, module_name: str, name: str, via: tuple[str, ...] = ()) -> list[Meaning]:
        """What `from module_name import name` gives; one meaning with `missing` set where there is no such thing."""
        key = (module_name, name)
        if key in self._members:
            return self._members[key]
        self._members[key] = [Meaning(dark=f"{module_name}.{name} is imported in a circle")]
        self._members[key] = self._member(module_name, name, via) or [Meaning()]
        return self._members[key]

    def _member(self, module_name: str, name: str, via: tuple[str, ...]) -> list[Meaning]:
        module = self.world.module(module_name)
        if module is None:
            if self.world.owns(module_name) or self.world.ours(module_name):
                return []
            return [Meaning(outside=f"{module_name}.{name}" if module_name else name)]
        path = (*via, module.place)
        bindings = module.scope.bindings.get(name)
        submodule = self.world.module(f"{module_name}.{name}")
        if bindings:
            chosen = final(bindings, module.tree)
            found = [m for b in chosen if not self._itself(b, module, name) for m in self.follow(b, module.scope, path)]
            if found and not all(meaning.missing for meaning in found):
                return [meaning for meaning in found if not meaning.missing]
        if submodule is not None:
            return [Meaning(module=submodule, via=via)]
        if module.error:
            return [Meaning(dark=module.error)]
        starred = self._starred(module, name, path)
        if starred:
            return starred
        if name in ("__name__", "__file__", "__doc__", "__path__", "__package__", "__spec__", "__dict__"):
            return [Meaning(outside=name)]
        return self._lazy(module, name, path)

    @staticmethod
    def _itself(binding: Binding, module: Module, name: str) -> bool:
        """`from . import name` in a package's own `__init__`."""
        return binding.kind == "from" and binding.module == module.name and binding.symbol == name

    def _starred(self, module: Module, name: str, via: tuple[str, ...]) -> list[Meaning]:
        for source in module.star_imports():
            other = self.world.module(source)
            if other is None:
                if not self.world.owns(source) and not self.world.ours(source):
                    return [Meaning(dark=f"{module.name} imports * from {source}, which is in neither package")]
                continue
            if name.startswith("_") and name not in (other.exported or ()):
                continue
            if other.exported is not None and name not in other.exported:
                continue
            found = self.member(source, name, via)
            if not found[0].missing:
                return found
        return []

    def _lazy(self, module: Module, name: str, via: tuple[str, ...]) -> list[Meaning]:
        if module.getter is None:
            return []
        if name in module.lazy:
            text, shown = module.lazy[name]
            target, _, symbol = text.partition(":")
            if not symbol:
                scope = module.scope_around(shown)
                return [Meaning(binding=Binding("assign", shown, shown), scope=scope, via=via)]
            if target.startswith("."):
                base = module.name if module.package else module.name.rpartition(".")[0]
                target = base + target
            return self.member(target, symbol, via)
        if module.lazy:
            return []
        return [Meaning(dark=f"{module.name}.__getattr__ answers for unknown names")]
