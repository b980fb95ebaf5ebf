"""The target model's folder: what it is, read from its files without loading it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from draftmill.errors import TargetError

_SAMPLED = 1 << 20
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


class TargetIdentity(BaseModel):
    """Which target the states are of. `fingerprint` is of its configuration and weights, see `fingerprint`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int


def read_config(folder: Path) -> dict[str, Any]:
    """The text model's part of a target's config.json (a multimodal target nests it).

    Raises:
        TargetError: there is none, or it cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
    except (OSError, ValueError, AttributeError) as error:  # an AttributeError where it is no object
        raise TargetError(
            f"cannot read {path}: {error}",
            cause="the folder is no Hugging Face model, or `draftmill prepare` has not made it yet",
            next_step="check [target] path in the recipe, and run `draftmill prepare` first",
        ) from error
    lacking = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if key not in text]
    if lacking:
        raise TargetError(f"{path} lacks {', '.join(lacking)}", next_step="name the folder of a decoder language model")
    return dict(text)


def length_limit(config: dict[str, Any], wanted: int) -> int:
    """The tokens that a sample may have: those wanted, or fewer where the target itself takes fewer."""
    return min(int(config.get("max_position_embeddings") or wanted), wanted)


def identify(folder: Path) -> TargetIdentity:
    """The identity of the target in `folder`.

    Raises:
        TargetError: as `read_config`, or there are no weights.
    """
    config = read_config(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise TargetError(
            f"{folder} holds no weights",
            cause="the download was not finished, or only its configuration was copied",
            next_step="put the model's .safetensors files there",
        )
    return TargetIdentity(
        fingerprint=fingerprint(folder),
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
    )


def tokenizer_digest(folder: Path) -> str:
    """sha256 over the tokenizer's files, the chat template with them."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (path := folder / name).exists():
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(folder: Path) -> str:
    """A digest of a model folder: its configuration, and each weight file's name, size, first and last MiB.

    Not of every byte: a model of a trillion parameters would take an hour to read. The header of a safetensors file is
    at its start, so another layout, dtype or name of a tensor is always seen.
    """
    digest = hashlib.sha256()
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.bin"))]
    for path in files:
        if not path.exists():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED))
            file.seek(max(size - _SAMPLED, 0))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()
