"""Prepared samples on disk, in which `prepare` and `extract` meet: JSON Lines, a sample a line.

    {"id": "…", "input_ids": [1, 2, …], "loss_mask": [0, 1, …]}

The same form is an input format of `prepare`, so what it wrote can be edited and given to it again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TokenSample:
    """One conversation as T token ids, and T zeros and ones: one where a loss may ask for the token."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]

    def line(self) -> str:
        """The sample as its line of a file."""
        return json.dumps({"id": self.id, "input_ids": self.input_ids, "loss_mask": self.loss_mask}) + "\n"


def read_samples(path: Path, vocab_size: int | None = None) -> Iterator[TokenSample]:
    """Reads a file of samples, and checks each against the target's vocabulary where its size is given.

    Raises:
        DataError: the file is missing, or a line is no sample; the line is named.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield parse(json.loads(line.decode()), vocab_size, default_id=f"{path.name}:{number}")
                except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors too
                    raise DataError(
                        f"{path}, line {number}: {error}", next_step="correct or remove that line"
                    ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", next_step="run `draftmill prepare` first") from error


def parse(value: Any, vocab_size: int | None, default_id: str) -> TokenSample:
    """One line's value as a sample.

    Raises:
        ValueError: it is none, and why.
    """
    if not isinstance(value, dict) or not isinstance(value.get("input_ids"), list):
        raise ValueError("no object with a list input_ids")
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not ids:
        raise ValueError("input_ids is empty")
    if not all(type(i) is int for i in ids):
        raise ValueError("input_ids holds something other than whole numbers")
    outside = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the target's vocabulary of {vocab_size}")
    if not isinstance(mask, list) or any(m not in (0, 1) for m in mask):
        raise ValueError("loss_mask is not a list of zeros and ones")
    if len(mask) != len(ids):
        raise ValueError(f"{len(ids)} input_ids and {len(mask)} values of loss_mask")
    return TokenSample(id=str(value.get("id", default_id)), input_ids=ids, loss_mask=[int(m) for m in mask])
