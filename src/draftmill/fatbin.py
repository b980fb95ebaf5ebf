"""Which GPU architectures a built library holds code for, read from its fat binaries without CUDA's tools."""

import re
import struct
import sys
from pathlib import Path

from draftmill.errors import Finding

MAGIC = 0xBA55ED50
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
_PTX, _CUBIN = 1, 2


def architectures(data: bytes) -> dict[str, int]:
    """How often each architecture occurs: `sm_120` is machine code, `compute_120` is PTX, still to be compiled."""
    counts: dict[str, int] = {}
    for match in re.finditer(re.escape(struct.pack("<I", MAGIC)), data):
        start = match.start()
        if start + _HEADER.size > len(data):
            break
        _, version, header, size = _HEADER.unpack_from(data, start)
        end = start + header + size
        if version != 1 or header < _HEADER.size or end > len(data):
            continue  # the magic number, but no fat binary
        at = start + header
        while at + _ENTRY.size <= end:
            kind, _, length, payload, _, _, _, _, architecture = _ENTRY.unpack_from(data, at)
            if kind not in (_PTX, _CUBIN) or length < _ENTRY.size:
                break
            name = f"{'compute' if kind == _PTX else 'sm'}_{architecture}"
            counts[name] = counts.get(name, 0) + 1
            at += length + payload
    return counts


def check(libraries: list[Path], wanted: list[str]) -> list[Finding]:
    """Every library that holds device code, but none for an architecture of `TORCH_CUDA_ARCH_LIST`'s.

    A set of libraries with no device code at all is a finding as well.
    """
    asked = [f"sm_{one.strip().removesuffix('+PTX').rstrip('af').replace('.', '')}" for one in wanted if one.strip()]
    findings, coded = [], 0
    for library in libraries:
        found = architectures(library.read_bytes())
        coded += bool(found)
        lacking = [one for one in asked if one not in found]
        if found and lacking:
            held = ", ".join(sorted(found))
            findings.append(Finding(kind="no code for", place=library.name, expected=", ".join(lacking), found=held))
    if not coded:
        findings.append(Finding(kind="no device code", place="the wheel", expected=", ".join(asked), found="none"))
    return findings


def main(words: list[str]) -> int:
    """`LIST FOLDER`: 1 unless every library with device code in the folder has it for the whole list."""
    wanted, folder = re.split(r"[;\s]+", words[0]), Path(words[1])
    libraries = sorted(folder.rglob("*.so"))
    findings = check(libraries, wanted)
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    sys.stdout.write(f"{len(libraries)} libraries read for {words[0]}\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
