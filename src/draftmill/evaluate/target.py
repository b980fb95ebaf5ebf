"""The target in plain torch, in float32, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.compute import has_cuda
from draftmill.errors import TargetError
from draftmill.evaluate.slots import SlotCache

if TYPE_CHECKING:
    import torch


class Target:
    """The target model in float32, with the inputs of its decoder layers at hand."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Loads a Hugging Face folder.

        Raises:
            TargetError: it cannot be loaded, or its decoder layers are not where they are looked for.
        """
        import torch
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cuda" if has_cuda() else "cpu")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=_grouped_attention(),
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(
                f"cannot load the target {folder}: {error}",
                cause="weights or config.json are missing, or of an architecture that Hugging Face does not know",
                next_step="check the folder; draftmill prepare makes it from a GGUF file",
            ) from error
        self.model: Any = model.eval().to(self.device)
        self.layers: Any = getattr(model.base_model, "layers", ())
        if len(self.layers) != model.config.num_hidden_layers:
            raise TargetError(
                f"{type(model).__name__} does not keep its decoder layers in `layers`",
                cause="an architecture that the reference loop does not cover",
                next_step='set [evaluate] engine = "vllm"',
            )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache, layer_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over tokens [B, T] at `positions` [B, T].

        Returns:
            the last hidden state after the final norm, [B, T, H], and the inputs of the decoder layers `layer_ids`,
            side by side in that order, [B, T, len(layer_ids) * H].
        """
        import torch

        found: dict[int, torch.Tensor] = {}

        def reader(layer_id: int) -> Callable[..., None]:
            def read(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[layer_id] = args[0] if args else kwargs["hidden_states"]

            return read

        hooks = [self.layers[k].register_forward_pre_hook(reader(k), with_kwargs=True) for k in layer_ids]
        try:
            out = self.model.base_model(
                input_ids=tokens,
                attention_mask=cache.at(positions),
                position_ids=positions,
                cache_position=positions[0],
                past_key_values=cache,
                use_cache=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return out.last_hidden_state, torch.cat([found[k] for k in layer_ids], dim=-1)

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """The greedy token after each hidden state [..., H]: int64 [...]."""
        best: torch.Tensor = self.model.get_output_embeddings()(hidden).argmax(-1)
        return best

    def gap(self, token_ids: Sequence[int]) -> float:
        """The best logit less the second best, for the token after `token_ids`."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([list(token_ids)], device=self.device)).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        return float(first - second)


def _grouped_attention() -> str:
    """Registers torch's attention with grouped key heads under the name that it returns.

    Hugging Face's own repeats the keys and values for each query head first wherever there is a mask, which on a CPU
    takes longer than the attention itself.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and query.shape[2] > 1 and module.is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.transpose(1, 2).contiguous(), None

    name = "draftmill_grouped"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
