"""A recipe as TOML, so that the report holds all that a run needs to be run again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftmill.recipe import Recipe


def dumps(recipe: Recipe) -> str:
    """TOML text that `Recipe.parse` reads back as the same recipe. What is None is left out: it is the default."""
    return "\n".join(_table("", recipe.model_dump(exclude_none=True))).strip() + "\n"


def _table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    nested = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    for key, value in table.items():
        if key not in nested and key not in arrays:
            yield f"{key} = {_value(value)}"
    prefix = f"{name}." if name else ""
    for key, value in nested.items():
        yield from ("", f"[{prefix}{key}]", *_table(prefix + key, value))
    for key, rows in arrays.items():
        for row in rows:
            yield from ("", f"[[{prefix}{key}]]", *_table(prefix + key, row))


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # Strings, numbers and booleans are written alike in JSON and in TOML.
    return json.dumps(value, ensure_ascii=False)
