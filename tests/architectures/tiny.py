"""Tiny configurations of transformers models: every class of configuration takes from one table what it knows.

Nothing is loaded, from the network or from disk.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

VOCABULARY = 29

# One value for every name that configurations give to the same size.
_SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
    "num_labels": 3,
    "initializer_range": 0.05,
    "hidden_size": 16,
    "d_model": 16,
    "n_embd": 16,
    "dim": 16,
    "emb_dim": 16,
    "embed_dim": 16,
    "embedding_size": 16,
    "intermediate_size": 24,
    "n_inner": 24,
    "d_ff": 24,
    "ffn_dim": 24,
    "hidden_dim": 24,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dim_feedforward": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_layers": 1,
    "num_hidden_layers": 1,
    "n_layer": 1,
    "n_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_decoder_layers": 1,
    "num_encoder_layers": 1,
    "num_attention_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_heads": 2,
    "n_head": 2,
    "n_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 32,
    "n_positions": 32,
    "max_seq_len": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "sliding_window": 4,
    "type_vocab_size": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
# Names of probabilities: no mask is drawn, so that a sample's gradient is the same in every batch.
_RANDOM = (
    "dropout",
    "drop_path",
    "layerdrop",
    "drop_prob",
    "pdrop",
    "drop_rate",
    "mask_time_prob",
    "mask_feature_prob",
    "_prob_dropout",
    "emb_dropout",
)


def tiny(name: str, **given: object) -> Any:
    """Make a small configuration.

    Args:
        name: Name of the class in transformers.
        given: What the table does not say or this configuration needs otherwise; a mapping under the name of a
            configuration inside it is given to that one.

    Returns:
        The configuration.
    """
    import transformers

    return _configuration(getattr(transformers, name), given)


def _configuration(kind: type, given: Mapping[str, object]) -> Any:
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    options = {key: value for key, value in _SIZES.items() if key in fields}
    options |= {
        key: 0.0
        for key, default in fields.items()
        if isinstance(default, float) and any(word in key for word in _RANDOM)
    }
    for key, inner in getattr(kind, "sub_configs", {}).items():
        own = given.get(key, {})
        if isinstance(own, Mapping) and dataclasses.is_dataclass(inner) and inner.__name__ != "AutoConfig":
            options[key] = _configuration(inner, own)
    return kind(
        **options
        | {key: value for key, value in given.items() if key not in options or not hasattr(options[key], "sub_configs")}
    )


def make(model: str, config: Any) -> nn.Module:
    """Build a model, its experts written in operations that have a float64 kernel.

    Args:
        model: Name of the class in transformers.
        config: Its configuration.

    Returns:
        The model, its weights random.
    """
    import transformers

    return getattr(transformers, model)._from_config(config, experts_implementation="eager")
