"""Signatures and signed statements on an image in a registry: cosign's, with a key and without a public log.

So a private registry needs nothing else, and the names of what is in it stay there.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmill.errors import ProcessError, ReleaseError
from draftmill.process import run


def sign(reference: str, key: Path) -> None:
    """Signs an image, named by its digest; the key's password is COSIGN_PASSWORD.

    Raises:
        ProcessError: cosign is missing, or failed.
    """
    _cosign("sign", "--tlog-upload=false", "--yes", "--key", key, *_plain(reference), reference)


def attest(reference: str, key: Path, kind: str, predicate: Mapping[str, Any]) -> None:
    """Attaches a signed statement on an image: `kind` is cosign's name for its type.

    Raises:
        ProcessError: as `sign`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicate.json"
        path.write_text(json.dumps(predicate), encoding="utf-8")
        words = ("--tlog-upload=false", "--yes", "--type", kind, "--predicate", path, "--key", key)
        _cosign("attest", *words, *_plain(reference), reference)


def verify(reference: str, key: Path) -> None:
    """Checks that an image carries a signature of the key.

    Raises:
        ReleaseError: it has none, or another key's; or the public key is missing.
    """
    if not key.exists():
        raise ReleaseError(
            f"there is no public key {key}", next_step="get it from who published the image, and name it with --key"
        )
    try:
        _cosign("verify", "--insecure-ignore-tlog=true", "--key", key, *_plain(reference), reference)
    except ProcessError as error:
        if "no matching signatures" in error.what:
            what = f"{reference} is not signed with the key of {key}"
        elif "no signatures found" in error.what:
            what = f"{reference} is not signed"
        else:
            raise
        raise ReleaseError(
            what,
            cause="it was published by someone else, or was changed on its way",
            next_step="do not run it; ask who published it for the digest and the key",
        ) from error


def _cosign(*words: str | Path) -> str:
    return run(["cosign", *words], next_step="see that cosign (2.x) is installed and that the registry answers")


def _plain(reference: str) -> tuple[str, ...]:
    """A registry on this machine has no certificate; the engine too talks to it without."""
    return ("--allow-http-registry",) if re.match(r"(localhost|127\.[\d.]+|\[::1\])[:/]", reference) else ()
