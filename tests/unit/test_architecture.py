"""Imports go down only, the stages never import each other, and each heavy dependency has one owner."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "draftmill"
LEVELS = {
    0: {"errors", "process", "files"},
    1: {"pins", "recipe", "layers", "shard", "store", "tokens", "target", "compute"},
    2: {
        *("patches", "environment", "image", "engine", "fetch", "manifest", "fatbin", "node", "doctor", "contract"),
        *("release", "cosign", "archive"),
    },
    3: {"prepare", "extract", "train", "evaluate", "serve", "report"},
    4: {"cli"},
    5: {"__main__"},
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names}
STANDARD_LIBRARY_ONLY = ("errors", "process", "pins", "environment", "manifest", "fatbin")
HEAVY = {
    "torch",
    "vllm",
    "transformers",
    "speculators",
    "safetensors",
    "matplotlib",
    "datasets",
    "tensorboard",
    "numpy",
}
IN_THE_WORKER = {"extract/keep.py", "extract/worker.py"}  # which vLLM imports by name, and nobody else
OF_TORCHS_CLASSES = {"train/gradients.py"}  # whose classes are torch's: others import them inside functions only
OWNERS = {"docker": {"engine"}, "pynvml": {"node"}}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def dotted(paths: set[str]) -> set[str]:
    return {f"draftmill.{path.removesuffix('.py').replace('/', '.')}" for path in paths}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields (dotted name, whether it happens at import time) for every import."""
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    typing = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and ast.unparse(i.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for n in ast.walk(i)
    }
    for node in ast.walk(tree):
        at_import = id(node) not in inside and id(node) not in typing
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "draftmill":
                yield from ((f"draftmill.{alias.name}", at_import) for alias in node.names)
            else:
                yield node.module, at_import


def ours(path: Path) -> Iterator[str]:
    for name, _ in imports(ast.parse(path.read_text())):
        if name.startswith("draftmill.") and (other := name.split(".")[1]) != part(path):
            yield other


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    level = LEVEL[part(path)]
    for other in ours(path):
        assert LEVEL[other] < level or (LEVEL[other] == level and level < 3), f"{path.name} (L{level}) imports {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_heavy_is_imported_at_import_time(path: Path) -> None:
    allowed = str(path.relative_to(SOURCE)) in IN_THE_WORKER | OF_TORCHS_CLASSES
    late = dotted(OF_TORCHS_CLASSES)
    for name, at_import in imports(ast.parse(path.read_text())):
        top = name.partition(".")[0]
        assert allowed or not (at_import and top in HEAVY), f"{path.name} imports {name} at import time"
        assert not (at_import and name in late), f"{path.name} imports {name} at import time"
        assert part(path) in OWNERS.get(top, {part(path)}), f"{top} belongs to {OWNERS[top]}"


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_what_runs_before_the_installation_needs_nothing_installed(name: str) -> None:
    import sys

    for module, _ in imports(ast.parse((SOURCE / f"{name}.py").read_text())):
        assert module.partition(".")[0] in sys.stdlib_module_names | {"draftmill"}
        if module.startswith("draftmill."):
            assert module.split(".")[1] in STANDARD_LIBRARY_ONLY


def test_what_the_worker_imports_nobody_else_does() -> None:
    theirs = dotted(IN_THE_WORKER)
    for path in modules():
        if str(path.relative_to(SOURCE)) not in IN_THE_WORKER:
            assert not theirs & {name for name, _ in imports(ast.parse(path.read_text()))}, path


def test_what_draftmill_imports_is_declared_and_in_every_image() -> None:
    import sys
    import tomllib

    from packaging.requirements import Requirement

    root = SOURCE.parents[1]
    declared = {
        Requirement(r).name for r in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    imported = {
        name.partition(".")[0]
        for path in modules()
        if str(path.relative_to(SOURCE)) not in IN_THE_WORKER | OF_TORCHS_CLASSES
        for name, at_import in imports(ast.parse(path.read_text()))
        if at_import
    }
    assert imported - sys.stdlib_module_names - {"draftmill"} <= declared
    for lock in ("cpu", "cuda"):
        locked = tomllib.loads((root / "lockfiles" / f"pylock.{lock}.toml").read_text())["packages"]
        assert declared | {"nvidia-ml-py"} <= {package["name"] for package in locked}, lock


def test_relative_imports_are_not_used() -> None:
    for path in modules():
        assert not [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.level], path


def test_this_test_sees_an_upward_import(tmp_path: Path) -> None:
    bad = ast.parse("def f():\n    from draftmill.cli import main\nimport torch\n")
    assert list(imports(bad)) == [("torch", True), ("draftmill.cli", False)] or set(imports(bad)) == {
        ("torch", True),
        ("draftmill.cli", False),
    }
