"""Where a model of vLLM's has its decoder layers, and what they are called with."""

import inspect
from typing import TYPE_CHECKING, Any

from draftmill.errors import TargetError

if TYPE_CHECKING:
    from torch import nn

HIDDEN = ("hidden_states", "x")  # the names that vLLM's decoder layers give their first input
RESIDUAL = "residual"


def decoder_layers(model: "nn.Module", count: int) -> "nn.ModuleList":
    """The target's decoder layers, nested however deep: of a model that also sees or hears, the language model's.

    Args:
        count: how many the target's configuration says there are.

    Raises:
        TargetError: there is no list of so many layers that take hidden states, or more than one.
    """
    from torch import nn

    whole: nn.Module = getattr(model, "get_language_model", lambda: model)()
    lists = {name: m for name, m in whole.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    found = {name: layers for name, layers in lists.items() if all(arguments(layer) for layer in layers)}
    if len(found) != 1:
        raise TargetError(
            f"{type(model).__name__}: {len(found)} lists of {count} decoder layers were found"
            + (f" ({', '.join(found)})" if found else ""),
            cause="its layers take their input under a name that draftmill does not know"
            if lists
            else "its layers are not in one list, as where they are spread over pipeline stages",
            next_step="extract with a target whose layers take `hidden_states`, or report this one",
        )
    return next(iter(found.values()))


def arguments(layer: "nn.Module") -> tuple[str, ...]:
    """The names of a decoder layer's arguments in their order, if it is one: it takes hidden states."""
    names = tuple(inspect.signature(layer.forward).parameters)
    return names if any(name in names for name in HIDDEN) else ()


def stream(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The hidden states and the residual of one call of a layer; their sum is the layer's input.

    The residual is None where the layer takes none, or in the first layer.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return next(given[name] for name in HIDDEN if name in given), given.get(RESIDUAL)
