"""A target that comes as a GGUF file, made into a Hugging Face folder, which every part of the stack reads."""

from pathlib import Path
from typing import Any

from rich.console import Console

from draftmill.errors import TargetError
from draftmill.files import sha256, whole_folder

SOURCE = "source.sha256"
# What a converted tokenizer must give back as it was: code's white space, line ends, and bytes beyond the vocabulary.
PROBES = (
    "def f(x):\n    return x  # two  spaces\n\n\tif a:\n",
    "  lead and trail  ",
    "a\r\nb",
    "日本語 émoji 🎉",
    "1234 567",
    "f (x) , y . z , don 't",
)


def convert(source: Path, folder: Path, console: Console) -> None:
    """Makes `folder` from `source`, in bfloat16, unless it was made from this very file before.

    Raises:
        TargetError: transformers cannot read the file, or the tokenizer does not give back what it is given.
    """
    digest = _sha256(source)
    marker = folder / SOURCE
    if marker.exists() and marker.read_text(encoding="utf-8") == digest:
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    console.print(f"making a Hugging Face folder of {source.name}", markup=False)
    named = {"gguf_file": source.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **named)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **named)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"cannot read {source}: {error}", next_step="name a GGUF file of a Llama-like model"
        ) from error
    _name_special_tokens(tokenizer, model.config)
    _as_the_file_says(tokenizer, source)
    _check(tokenizer, source)
    with whole_folder(folder) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        (work / "tokenizer.model").unlink(missing_ok=True)  # a copy of the GGUF file, which is no such model
        (work / SOURCE).write_text(digest, encoding="utf-8")


def _name_special_tokens(tokenizer: Any, config: Any) -> None:
    """The conversion leaves the tokenizer with other special tokens than the model's configuration names."""
    for name in ("bos", "eos", "pad"):
        token_id = getattr(config, f"{name}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))


def _as_the_file_says(tokenizer: Any, source: Path) -> None:
    """The conversion puts a first token before every text, though the file forbids it, and tidies decoded spaces."""
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.add_bos_token")
    if field is not None:
        tokenizer.add_bos_token = bool(field.contents())
    tokenizer.clean_up_tokenization_spaces = False


def _check(tokenizer: Any, source: Path) -> None:
    for probe in PROBES:
        back = tokenizer.decode(tokenizer(probe, add_special_tokens=False)["input_ids"])
        if back != probe:
            raise TargetError(
                f"the tokenizer of {source.name} turns {probe!r} into {back!r}", next_step="use the model's own folder"
            )
    for token in {tokenizer.eos_token, tokenizer.bos_token} - {None}:
        if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1:
            raise TargetError(f"the tokenizer of {source.name} splits {token}", next_step="use the model's own folder")


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}", next_step="check [target] path") from error
