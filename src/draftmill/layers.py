"""The layer contract: which hidden states are extracted, trained on and served, in one place.

An id is one of vLLM's `eagle_aux_hidden_state_layer_ids`: id k means *the input of decoder layer k*, the residual
stream before that layer runs. vLLM's EAGLE-3 serving reads it so (`idx in self.aux_hidden_state_layers` is tested
before the layer, vllm/model_executor/models/llama.py), and a draft trained on the layer's output instead is off by
one. In the numbering of Hugging Face's `output_hidden_states`, id k is `hidden_states[k]`.

The target's last hidden state goes with them, taken *after* the target's final norm, so that
`lm_head(last_hidden_state)` are the target's logits, whatever kind of norm the target has.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from draftmill.errors import LayerError

# vLLM's eagle3 draft class reads exactly this many (its `fc` is built for 3 times the hidden size).
SERVED_LAYERS = 3


class LayerContract(BaseModel):
    """Ids in the order in which the draft concatenates them, with their meaning for every file that they are in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ids: tuple[int, ...]
    num_layers: int
    meaning: Literal["input of decoder layer k"] = "input of decoder layer k"
    last_hidden_state: Literal["after the final norm"] = "after the final norm"

    @classmethod
    def of(cls, ids: Sequence[int] | None, num_layers: int) -> Self:
        """Checks `ids` against a target of `num_layers` decoder layers; None asks for EAGLE-3's default.

        Raises:
            LayerError: an id is out of range or repeated, or none is given.
        """
        chosen = default_ids(num_layers) if ids is None else tuple(ids)
        if not chosen:
            raise LayerError("no layer id is given", next_step="name at least one, or leave `layers` out of the recipe")
        repeated = sorted({k for k in chosen if chosen.count(k) > 1})
        if repeated:
            raise LayerError(f"layer ids are repeated: {repeated}", next_step="name each layer once")
        outside = [k for k in chosen if not 1 <= k < num_layers]
        if outside:
            raise LayerError(
                f"layer ids out of range: {outside}; the target has {num_layers} decoder layers",
                cause="id k is the input of decoder layer k; layer 0's is the embedding, which vLLM does not serve",
                next_step=f"choose ids from 1 to {num_layers - 1}",
            )
        return cls(ids=chosen, num_layers=num_layers)


def default_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layer, as vLLM's models choose them when a draft names none.

    Raises:
        LayerError: the target is too shallow to have three different ones.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if len(set(ids)) < SERVED_LAYERS or min(ids) < 1 or max(ids) >= num_layers:
        raise LayerError(
            f"a target of {num_layers} decoder layers has no default layer ids",
            cause="the defaults are 2, half and the last but two",
            next_step="name three layers in the recipe: [extract] layers = [1, 2, 3]",
        )
    return ids
