"""Architectures of transformers, built from configurations: at their real sizes, or as a small stand-in.

Nothing is downloaded and no weights are read.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ghostclip._validate import did_you_mean
from ghostclip.errors import InvalidOptionError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The stand-in's sizes, by the names that configurations have for them.
_SMALL: Final[dict[str, int]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("d_kv", "head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("vocab_size",), 128),
    **dict.fromkeys(("projection_dim",), 16),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
}
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
_AUTO_CLASSES: Final = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModel",
)


def named_config(name: str) -> "PretrainedConfig":
    """Return the configuration of an architecture, or of a local folder.

    Args:
        name: As transformers calls it (``"gpt2"``), or a folder with a ``config.json``.

    Returns:
        The configuration.

    Raises:
        InvalidOptionError: Neither, or transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise InvalidOptionError(
            f"{name}: architectures by name need transformers (pip install transformers), or give "
            "path/to/file.py:factory"
        ) from None
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InvalidOptionError(f"{name}: no Hugging Face model lies here (config.json is missing)")
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    try:
        return transformers.AutoConfig.for_model(name)
    except ValueError:
        raise InvalidOptionError(
            f"{name}: no local folder, no path/to/file.py:factory or module:factory, and no architecture that "
            f"transformers knows (such as gpt2, bert, vit, llama, t5){did_you_mean(name, transformers.CONFIG_MAPPING)}"
        ) from None


def small_config(config: "PretrainedConfig", *, positions: int) -> "PretrainedConfig":
    """Return the configuration of a stand-in: the same architecture with two layers of width 32.

    Args:
        config: The configuration.
        positions: Tokens that it must hold.

    Returns:
        Another configuration.
    """
    return type(config)(**_overrides(config, positions=positions))


def _overrides(config: "PretrainedConfig", *, positions: int) -> dict[str, Any]:
    known = config.to_dict()
    small: dict[str, Any] = {key: _SMALL[key] for key in known if key in _SMALL and isinstance(known[key], int)}
    heads = known.get("num_attention_heads")
    if known.get("num_key_value_heads") == heads and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
    small.update({key: positions + 8 for key in _POSITIONS if isinstance(known.get(key), int)})
    if "depths" in known and isinstance(known.get("hidden_sizes"), list):
        small.update(
            depths=[1] * len(known["depths"]), hidden_sizes=[16 * (k + 1) for k in range(len(known["depths"]))]
        )
    vocabulary = small.get("vocab_size")
    for key, value in known.items():
        if key.endswith("_token_id") and isinstance(value, int) and vocabulary and value >= vocabulary:
            small[key] = 0
    for key in known:
        part: Any = getattr(config, key, None)
        if key.endswith("_config") and hasattr(part, "to_dict"):
            small[key] = small_config(part, positions=positions).to_dict()
    return small


def build(config: "PretrainedConfig", *, device: str) -> nn.Module:
    """Build the model that is usually trained of an architecture: with a head where transformers has one.

    Args:
        config: Its configuration.
        device: ``"cpu"``, or ``"meta"`` for shapes without memory.

    Returns:
        The model in training mode, with random weights.
    """
    import transformers

    if hasattr(config, "use_cache"):
        config.use_cache = False
    auto = next(
        getattr(transformers, name)
        for name in _AUTO_CLASSES
        if name == "AutoModel" or type(config) in getattr(transformers, name)._model_mapping
    )
    with torch.device(device):
        model: nn.Module = auto.from_config(config)
    return model.train()


def example_batch(model: nn.Module, *, batch_size: int, sequence_length: int, device: str) -> dict[str, Tensor]:
    """Make inputs for a model of transformers.

    Args:
        model: The model.
        batch_size: B.
        sequence_length: T, for models of tokens.
        device: As for ``build``.

    Returns:
        Keyword arguments of its forward.

    Raises:
        UnsupportedModelError: It takes neither tokens nor images.
    """
    config: Any = model.config
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    name = getattr(model, "main_input_name", "input_ids")
    wanted = {name, "pixel_values"} if hasattr(config, "vision_config") else {name}
    batch: dict[str, Tensor] = {}
    if "input_ids" in wanted:
        ids_BT = torch.randint(3, text.vocab_size, (batch_size, sequence_length), device=device)
        batch["input_ids"] = ids_BT
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids_BT.flip(1)
    if "pixel_values" in wanted:
        size = getattr(vision, "image_size", 64)
        height, width = (size, size) if isinstance(size, int) else size
        batch["pixel_values"] = torch.randn(batch_size, vision.num_channels, height, width, device=device)
    if set(batch) < wanted:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {name!r}, for which no example can be made up. Write a function that "
            "returns (model, batch) and give it as path/to/file.py:factory."
        )
    return batch
