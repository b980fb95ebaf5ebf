"""SPEC (a folder, a wheel, an sdist, or name==version) to a tree of Python sources, which nothing here ever runs."""

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from draftmill.contract import index
from draftmill.contract.archives import unpack
from draftmill.errors import AuditError

CACHE = Path.home() / ".cache" / "draftmill" / "sources"
VERSION = re.compile(r"""^(?:__version__|version)\b[^'"\n]*['"]([^'"]+)['"]""", re.MULTILINE)
VERSION_IN_NAME = re.compile(r"-(\d+(?:\.\d+)+[^-]*?)(?:-|\.tar|\.zip|$)")
ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
BESIDE = {"tests", "test", "testing", "docs", "doc", "examples", "example", "benchmarks", "build", "dist", "tools"}


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The sources of one side. `packages` maps each top-level import name to its folder or file."""

    label: str
    root: Path
    packages: dict[str, Path]
    archive: str = ""  # the sha256 of the archive that it was unpacked from

    def module_file(self, name: str) -> Path | None:
        """The file of module `name`; its folder, for a package without `__init__.py`; None if there is none."""
        top, *rest = name.split(".")
        path = self.packages.get(top)
        if path is None:
            return None
        if path.is_file():
            return None if rest else path
        path = path.joinpath(*rest)
        if (initial := path / "__init__.py").is_file():
            return initial
        if rest and (file := path.with_name(path.name + ".py")).is_file():
            return file
        return path if path.is_dir() and any(path.glob("*.py")) else None

    def place(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @cached_property
    def _files(self) -> tuple[tuple[str, Path], ...]:
        found = []
        for top, path in sorted(self.packages.items()):
            for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
                parts = [top, *file.relative_to(path).with_suffix("").parts] if path.is_dir() else [top]
                if all(part.isidentifier() for part in parts) and not file.is_symlink():
                    found.append((".".join(parts).removesuffix(".__init__"), file))
        return tuple(found)

    def files(self) -> tuple[tuple[str, Path], ...]:
        """Every module as (dotted name, file), in the order of the names."""
        return self._files

    @cached_property
    def version(self) -> str:
        """The package's version, where its label or its own `_version.py` says it; else empty."""
        _, equals, version = self.label.partition("==")
        if equals:
            return version
        for path in self.packages.values():
            for name in ("_version.py", "version.py", "__init__.py"):
                file = path / name
                text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
                if found := VERSION.search(text):
                    return found[1]
        found = VERSION_IN_NAME.search(self.label)
        return found[1] if found else ""

    @cached_property
    def digest(self) -> str:
        """The archive's sha256, or for a folder the sha256 over every source's name and bytes."""
        if self.archive:
            return self.archive
        total = hashlib.sha256()
        for name, path in self._files:
            total.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


def open_tree(spec: str, cache: Path = CACHE) -> Tree:
    """Reads SPEC.

    Raises:
        AuditError: there is no such thing, it is no archive, it would write outside its folder, or it has no Python
            sources.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path.resolve(), path.resolve().name)
    if path.is_file():
        if not path.name.endswith(ARCHIVES):
            raise AuditError(
                f"{path}: neither a folder, a wheel nor an sdist", next_step="give one of those, or name==version"
            )
        return _archive(path, cache)
    name, equals, version = spec.partition("==")
    if not equals or not version or "/" in name:
        raise AuditError(
            f"{spec}: no such file or folder, and not name==version",
            next_step="as in: --provider vllm==0.17.0, or a path",
        )
    folder = index.fetch(name.strip(), version.strip(), cache)
    tree = _folder(folder, f"{name.strip()}=={version.strip()}", prefer=name.strip())
    return replace(tree, archive=folder.name)


def _archive(path: Path, cache: Path) -> Tree:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    folder = cache / digest
    if not folder.is_dir():
        unpack(path, folder)
    name = path.name.partition("-")[0]
    return replace(_folder(folder, path.name, prefer=name), archive=digest)


def _folder(folder: Path, label: str, prefer: str = "") -> Tree:
    if (folder / "__init__.py").is_file():
        return Tree(label=label, root=folder.parent, packages={folder.name: folder})
    root = folder
    inner = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if (len(inner) == 1 and not _packages(folder) and not any(folder.glob("*.py"))) or (
        len(inner) == 1 and ((inner[0] / "setup.py").is_file() or (inner[0] / "src").is_dir())
    ):
        root = inner[0]
    for scheme in ("purelib", "platlib"):  # a wheel that keeps its packages under NAME-VERSION.data
        if root.name.endswith(".data") and (root / scheme).is_dir():
            root = root / scheme
    if (root / "src").is_dir() and _packages(root / "src"):
        root = root / "src"
    packages = _packages(root)
    wanted = prefer.lower().replace("-", "_").replace(".", "_")
    main = {name: path for name, path in packages.items() if name.lower() == wanted}
    packages = main or packages
    if not packages:
        raise AuditError(
            f"{label} holds no Python sources",
            cause="it is compiled only, or not the folder that holds the package",
            next_step="give the sdist, or the folder above the package",
        )
    return Tree(label=label, root=root, packages=packages)


def _packages(folder: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".py")
        if not name.isidentifier() or path.name.startswith(".") or name in BESIDE or name in ("setup", "conftest"):
            continue
        if path.suffix == ".py" or (path.is_dir() and next(path.rglob("*.py"), None) is not None and name != "src"):
            found[name] = path
    regular = {n: p for n, p in found.items() if p.is_dir() and (p / "__init__.py").is_file()}
    return regular or found
