"""The draft model: its configuration from the target's, and the folder that vLLM and speculators load as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.errors import TargetError
from draftmill.files import whole_folder
from draftmill.layers import LayerContract
from draftmill.recipe import Recipe
from draftmill.train.ranks import whole

if TYPE_CHECKING:
    from torch import Tensor

    from draftmill.train.vocabulary import Vocabulary

TRAINING_JSON = "training.json"
_FIRST_NORM = 0.5
_SELF = 2.0  # variance of the first keys' entries; a row's own score is then head_dim ** 0.5 times as much
_LLAMA_ROPE = ("rope_theta", "rope_scaling")


def target_config(recipe: Recipe) -> Any:
    """The target's configuration, a `PretrainedConfig`.

    Raises:
        TargetError: the folder holds none that transformers can read.
    """
    from transformers import AutoConfig

    folder = recipe.target_folder
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=recipe.target.trust_remote_code)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"cannot read the target's configuration in {folder}: {error}",
            cause="`prepare` has not run, or the folder is not a Hugging Face model",
            next_step="run `draftmill prepare` first, or correct target.path",
        ) from error


def end_tokens(recipe: Recipe, config: Any) -> list[int]:
    """The ids that end the target's turn, which every draft must be able to say."""
    found: set[int] = set()
    generation = recipe.target_folder / "generation_config.json"
    listed = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    for value in (config.get_text_config().eos_token_id, listed.get("eos_token_id")):
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return sorted(found)


def draft_config(recipe: Recipe, target: Any, contract: LayerContract, draft_vocab_size: int) -> Any:
    """speculators' `Eagle3SpeculatorConfig` for a draft of this target.

    The draft's layers are Llama layers of the target's widths; its positions are rotated as the target's are, scaling
    included. `norm_before_residual` is written out because speculators and vLLM have different defaults for it.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    text = target.get_text_config()
    heads = text.num_attention_heads
    layer = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=recipe.train.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_act="silu",
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        tie_word_embeddings=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        attention_bias=False,
        mlp_bias=False,
        **{key: getattr(text, key) for key in _LLAMA_ROPE if getattr(text, key, None) is not None},
    )
    folder = recipe.target_folder
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(contract.ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=recipe.evaluate.draft_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(folder.resolve()) if folder.exists() else str(folder),
                architectures=list(target.architectures or []),
            ),
        ),
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )


def build(recipe: Recipe, target: Any, contract: LayerContract, vocabulary: Vocabulary) -> Any:
    """A fresh `Eagle3DraftModel` in float32 on the CPU, the same for the same `run.seed`.

    Embedding and head are the target's. `fc` starts as the mean of the three layers' states, which share the residual
    stream's basis, beside its random part; every row first attends to itself; and the last norm starts low, so that
    first guesses are unsure and not wrong with confidence. Each saves hundreds of steps over a random start.

    Raises:
        TargetError: the target's folder lacks the embedding or has another shape than its configuration says.
    """
    import torch
    from loguru import logger
    from speculators.models.eagle3 import Eagle3DraftModel

    logger.disable("speculators")  # it reports each file that it looks for
    t2d, d2t = vocabulary.mappings()
    config = draft_config(recipe, target, contract, len(vocabulary.ids))
    torch.manual_seed(recipe.run.seed)
    try:
        model = Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t).float()
    except (OSError, KeyError, ValueError) as error:
        raise TargetError(
            f"cannot build a draft for the target in {recipe.target_folder}: {error}",
            cause="the folder lacks the embedding or the head, or its configuration is another model's",
            next_step="check the target's folder",
        ) from error
    with torch.no_grad():
        width = model.fc.out_features
        model.fc.weight += torch.eye(width).repeat(1, len(contract.ids)) / len(contract.ids)
        model.norm.weight.fill_(_FIRST_NORM)
        for layer in model.layers:
            _attend_to_self(layer.self_attn)
    model.lm_head.weight.requires_grad = recipe.train.train_head
    return model


def _attend_to_self(attention: Any) -> None:
    """Makes every query its own key, so that a row's first look is at the token whose successor is asked for.

    Random queries and keys look at the whole text alike, and the token drowns in it.
    """
    import torch

    key = attention.k_proj.weight
    torch.nn.init.normal_(key, std=(_SELF / key.shape[1]) ** 0.5)
    groups = key.view(-1, 1, attention.head_dim, key.shape[1])
    attention.q_proj.weight.view(len(groups), -1, *groups.shape[2:]).copy_(groups)


def target_head(recipe: Recipe) -> Any:
    """The target's output embedding, float32 [vocabulary, H]: its head, or its embedding where the two are tied."""
    from speculators.utils.loading import load_model_layers

    names = ["lm_head.weight", "model.embed_tokens.weight"]
    found = load_model_layers(names, str(recipe.target_folder))
    return found.get(names[0], found[names[1]]).float()


def tensors(model: Any) -> dict[str, Tensor]:
    """What a draft's folder holds, bfloat16 on the CPU; all ranks have to ask for it.

    The target's embedding goes along, so that the folder loads without the target's; the target's head does not.
    """
    import torch

    found = ((name, whole(value)) for name, value in model.state_dict().items() if name != "verifier_lm_head.weight")
    return {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).cpu().contiguous().clone()
        for name, value in found
    }


def export(config: Any, weights: Mapping[str, Tensor], folder: Path, training: Mapping[str, object]) -> None:
    """Writes the draft whole or not at all: config.json, model.safetensors and training.json.

    Args:
        config: the model's.
        weights: of `tensors`.
    """
    from safetensors.torch import save_file

    with whole_folder(folder) as work:
        save_file(dict(weights), work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(_config_json(config), indent=2) + "\n", encoding="utf-8")
        (work / TRAINING_JSON).write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")


def _config_json(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string())
    # The library leaves out what is LlamaConfig's default; vLLM reads these with another class, whose default differs.
    found["transformer_layer_config"]["tie_word_embeddings"] = False
    return found
