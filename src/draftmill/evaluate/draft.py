"""An EAGLE-3 draft in plain torch, from the folder that vLLM and speculators load.

Reads the exported tensors themselves, not through the library that trained them, and follows vLLM's serving code
(vllm/model_executor/models/llama_eagle3.py, vllm/v1/spec_decode/eagle.py): at position i the draft's first layer gets
the embedding of token i + 1 and fc(target states at i); its prediction is token i + 2; the residual stream before the
final norm is the hidden state of the next drafted position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.errors import LayerError, TargetError, TrainingError
from draftmill.evaluate.slots import SlotCache
from draftmill.layers import SERVED_LAYERS, LayerContract

if TYPE_CHECKING:
    import torch

NOT_THIS_TARGET = "the draft was trained for another target"


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft's config.json says. `transformer` is Hugging Face's LlamaConfig of its layers."""

    transformer: Any
    layers: LayerContract
    norm_before_residual: bool

    @classmethod
    def read(cls, folder: Path, target: Any) -> DraftConfig:
        """Reads `folder`/config.json and holds it against the target's Hugging Face config.

        Raises:
            TrainingError: the draft is missing, or is no eagle3 draft.
            LayerError: it names no layer ids, or ids that the target lacks.
            TargetError: it was made for a target of another width or vocabulary.
        """
        from transformers import LlamaConfig

        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            written = dict(config["transformer_layer_config"])
            kind = config["speculators_model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{folder} holds no draft: {error}", cause="training has not ended yet", next_step="run draftmill train"
            ) from error
        if kind != "eagle3" or written.get("model_type", "llama") != "llama":
            raise TrainingError(
                f"{folder} is no eagle3 draft of llama's shape: {kind}", next_step="run draftmill train"
            )
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        if not ids or len(ids) != SERVED_LAYERS:
            raise LayerError(
                f"{folder / 'config.json'} names {len(ids or ())} layers in eagle_aux_hidden_state_layer_ids, "
                f"not {SERVED_LAYERS}",
                cause="it was exported without its layer contract; vLLM would feed it the target's default layers",
                next_step="run draftmill train again",
            )
        transformer = LlamaConfig(**written)  # what equals the class's default was not written
        for key in ("hidden_size", "vocab_size"):
            if getattr(transformer, key) != getattr(target, key):
                raise TargetError(
                    f"the draft's {key} is {getattr(transformer, key)}, the target's is {getattr(target, key)}",
                    cause=NOT_THIS_TARGET,
                    next_step="evaluate it with its own target, or run draftmill train for this one",
                )
        return cls(
            transformer=transformer,
            layers=LayerContract.of(ids, target.num_hidden_layers),
            # vLLM takes True where the key is missing (transformers_utils/configs/speculators/algos.py).
            norm_before_residual=bool(config.get("norm_before_residual", True)),
        )


class Draft:
    """Drafts `draft_tokens` greedy tokens a row (see `draftmill.evaluate.reference.Proposer`). float32."""

    def __init__(self, folder: Path, config: DraftConfig, target: Any, *, draft_tokens: int) -> None:
        """Loads the weights.

        Args:
            target: the Hugging Face model, which lends its embedding where the draft has none of its own, as vLLM does.

        Raises:
            TrainingError: weights are missing or of another shape than config.json says.
        """
        from transformers.activations import ACT2FN
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config.transformer
        self.layer_ids, self.norm_before_residual = config.layers.ids, config.norm_before_residual
        self.draft_tokens = draft_tokens
        self.rotary = LlamaRotaryEmbedding(self.config).to(target.device)
        self.activation = ACT2FN[self.config.hidden_act]
        self.weights = _load(folder, target)
        self.weights.setdefault("embed_tokens.weight", target.get_input_embeddings().weight)
        _check(folder, self.weights, self.config)
        self.cache: SlotCache

    def begin(self, rows: int, capacity: int) -> None:  # noqa: ARG002  the cache takes its rows from the first states
        self.cache = SlotCache(self.config.num_hidden_layers, capacity)

    def keep(self, rows: torch.Tensor) -> None:
        self.cache.keep(rows)

    def propose(
        self, states: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        import torch

        row = torch.arange(len(last), device=last.device)
        hidden = self.forward(next_tokens, self._linear("fc", states), positions)[row, last]
        position = positions[row, last]
        drafted = [self.choose(hidden)]
        for _ in range(self.draft_tokens - 1):
            position = position + 1
            hidden = self.forward(drafted[-1][:, None], hidden[:, None], position[:, None])[:, 0]
            drafted.append(self.choose(hidden))
        return torch.stack(drafted, dim=1)

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """The greedy token after each hidden state [B, H] before the norm: int64 [B], in the target's vocabulary."""
        best = self._linear("lm_head", self._norm("norm", hidden)).argmax(-1)
        return best + self.weights["d2t"][best] if "d2t" in self.weights else best

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, T] tokens and [B, T, H] hidden states to the residual stream after the last layer, [B, T, H]."""
        import torch
        import torch.nn.functional as f

        mask = self.cache.at(positions)
        cos, sin = (x[:, None] for x in self.rotary(hidden, positions))
        for index in range(self.config.num_hidden_layers):
            name = f"layers.{index}"
            if index:
                residual, fed = hidden, self._norm(f"{name}.input_layernorm", hidden)
            else:
                embedded = self._norm(
                    f"{name}.input_layernorm", f.embedding(tokens, self.weights["embed_tokens.weight"])
                )
                normed = self._norm(f"{name}.hidden_norm", hidden)
                residual = normed if self.norm_before_residual else hidden
                fed = torch.cat([embedded, normed], dim=-1)
            q, k, v = (self._heads(f"{name}.self_attn.{x}_proj", fed) for x in "qkv")
            keys, values = self.cache.update(_rotate(k, cos, sin), v, index)
            mixed = f.scaled_dot_product_attention(_rotate(q, cos, sin), keys, values, attn_mask=mask, enable_gqa=True)
            hidden = residual + self._linear(f"{name}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
            fed = self._norm(f"{name}.post_attention_layernorm", hidden)
            gate, up = (self._linear(f"{name}.mlp.{x}_proj", fed) for x in ("gate", "up"))
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", self.activation(gate) * up)
        return hidden

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        import torch.nn.functional as f

        return f.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        import torch.nn.functional as f

        return f.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[B, T, in] to [B, heads, T, D]."""
        return self._linear(name, x).view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    import torch

    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _load(folder: Path, target: Any) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(path, device=str(target.device)))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"cannot read the draft's weights {path}: {error}", next_step="run draftmill train again"
        ) from error
    return {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}


def _shapes(config: Any, draft_vocabulary: int) -> dict[str, list[int]]:
    """Every weight that `Draft.forward` reads, with its shape."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = {
        "fc": [width, SERVED_LAYERS * width],
        "embed_tokens": [config.vocab_size, width],
        "norm": [width],
        "lm_head": [draft_vocabulary, width],
        "layers.0.hidden_norm": [width],
    }
    for index in range(config.num_hidden_layers):
        fed = width if index else 2 * width
        layer = {
            "input_layernorm": [width],
            "post_attention_layernorm": [width],
            "self_attn.q_proj": [heads, fed],
            "self_attn.k_proj": [kv, fed],
            "self_attn.v_proj": [kv, fed],
            "self_attn.o_proj": [width, heads],
            "mlp.gate_proj": [inner, width],
            "mlp.up_proj": [inner, width],
            "mlp.down_proj": [width, inner],
        }
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _check(folder: Path, weights: dict[str, torch.Tensor], config: Any) -> None:
    import torch

    offsets = weights.get("d2t")
    for name, shape in _shapes(config, config.vocab_size if offsets is None else len(offsets)).items():
        found = list(weights[name].shape) if name in weights else "missing"
        if found != shape:
            raise TrainingError(
                f"{folder}: {name} is {found}, expected {shape}",
                cause="the weights and config.json are not of one export",
                next_step="run draftmill train again",
            )
    if offsets is not None:
        tokens = torch.arange(len(offsets), device=offsets.device) + offsets
        if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
            raise TargetError(f"{folder}: d2t points outside the target's vocabulary", cause=NOT_THIS_TARGET)
