"""Real transformers models from tiny configs; nothing is loaded, from the network or from disk."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.table import Case, next_token_loss, probe_loss

_VOCABULARY = 19
_COMMON = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LLAMA = {
    **_COMMON,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_MIXTRAL = {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
_GPT2 = {
    **_COMMON,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

# name: (config class, model class, options of the config)
_CAUSAL: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "gpt2_tied": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2_untied": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "gpt2_eager": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "attn_implementation": "eager"}),
    "llama_untied": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _LLAMA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _LLAMA),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _LLAMA),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_LLAMA, "query_pre_attn_scalar": 4}),
    "phi": (
        "PhiConfig",
        "PhiForCausalLM",
        {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"num_key_value_heads": 2},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_MIXTRAL, "experts_implementation": "eager"}),
    "mixtral_batched": ("MixtralConfig", "MixtralForCausalLM", {**_MIXTRAL, "experts_implementation": "batched_mm"}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {key: value for key, value in _LLAMA.items() if key not in ("head_dim", "num_key_value_heads")},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **_COMMON,
            "pad_token_id": 2,
            "hidden_size": 8,
            "ffn_dim": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "word_embed_proj_dim": 8,
            "dropout": 0.0,
        },
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_COMMON, "hidden_size": 8, "n_layer": 1, "n_head": 2}),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {**_COMMON, "pad_token_id": 0, "hidden_size": 8, "state_size": 3, "num_hidden_layers": 1, "time_step_rank": 2},
    ),
}
_GROUPED = ("MixtralConfig", "MixtralForCausalLM", {**_MIXTRAL, "experts_implementation": "grouped_mm"})
_ENCODERS: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "bert_masked_lm": ("BertConfig", "BertForMaskedLM", _BERT),
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", {**_BERT, "num_labels": 3}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_BERT, "max_position_embeddings": 18, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            "vocab_size": _VOCABULARY,
            "dim": 8,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 12,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 16,
        },
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_BERT, "embedding_size": 6}),
}
_PIXELS = {**_BERT, "image_size": 8, "patch_size": 4, "num_labels": 3}
_PIXELS.pop("vocab_size")
_PIXELS.pop("max_position_embeddings")
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def _make(config_name: str, model_name: str, options: Mapping[str, object]) -> nn.Module:
    transformers = pytest.importorskip("transformers")

    implementation = {"attn_implementation": options.get("attn_implementation", "sdpa")}
    if "experts_implementation" in options:
        implementation["experts_implementation"] = options["experts_implementation"]
    plain = {key: value for key, value in options.items() if key not in implementation}
    config = getattr(transformers, config_name)(**plain)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = getattr(transformers, model_name)
    if not getattr(model_class, "_supports_sdpa", False) and implementation["attn_implementation"] == "sdpa":
        implementation["attn_implementation"] = "eager"
    return model_class._from_config(config, **implementation)


def _ids() -> dict:
    return {"ids": torch.randint(3, _VOCABULARY, (3, 7))}


def _padded_ids() -> dict:
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    return {**_ids(), "mask": mask}


def _causal_loss(model: nn.Module, batch: dict) -> Tensor:
    return next_token_loss(model(input_ids=batch["ids"]).logits, batch["ids"])


def _ids_and_positions() -> dict:
    return {**_ids(), "positions": torch.arange(2, 9)[None]}


def _positions_loss(model: nn.Module, batch: dict) -> Tensor:
    """Give the position ids by hand, once for all samples: shape (1, T)."""
    return next_token_loss(model(input_ids=batch["ids"], position_ids=batch["positions"]).logits, batch["ids"])


def _masked_loss(model: nn.Module, batch: dict) -> Tensor:
    return probe_loss(model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits)


def _padded_causal_loss(model: nn.Module, batch: dict) -> Tensor:
    """Average over each sample's own tokens, padding left out."""
    logits_BTV = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)[:, 1:]
    per_token = functional.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), labels, reduction="none")
    return per_token.sum(1) / (labels != -100).sum(1)


def _t5_loss(model: nn.Module, batch: dict) -> Tensor:
    logits = model(input_ids=batch["ids"], labels=batch["labels"]).logits
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


def _own_loss(model: nn.Module, batch: dict) -> Tensor:
    """Let the model compute its logits beside its own loss, as scripts that pass labels do."""
    return next_token_loss(model(input_ids=batch["ids"], labels=batch["ids"]).logits, batch["ids"])


def _checkpointed(reentrant: bool) -> nn.Module:
    model = _make(*_CAUSAL["gpt2_tied"])
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model


def _case(name: str, spec: tuple, batch: object, loss: object) -> Case:
    tags = frozenset({"transformers", "float32_inside"})
    return Case(f"hf_{name}", lambda: _make(*spec), batch, loss, tags=tags)


def _vision(name: str, config: str, model: str) -> Case:
    def batch() -> dict:
        return {"pixels": torch.randn(3, 3, 8, 8)}

    return _case(name, (config, model, _PIXELS), batch, lambda m, b: probe_loss(m(pixel_values=b["pixels"]).logits))


_GPT2_CASE = _case("gpt2_padded", _CAUSAL["gpt2_tied"], _padded_ids, _padded_causal_loss)

CASES = [
    *(_case(name, spec, _ids, _causal_loss) for name, spec in _CAUSAL.items()),
    # torch's grouped matrix product, the default for experts, has no float64 kernel.
    replace(
        _case("mixtral_grouped", _GROUPED, _ids, _causal_loss),
        dtypes=(torch.float32,),
        reference_build=lambda: _make(*_CAUSAL["mixtral"]),
    ),
    *(_case(name, spec, _padded_ids, _masked_loss) for name, spec in _ENCODERS.items()),
    _GPT2_CASE,
    replace(
        _case("gpt2_position_ids_given", _CAUSAL["gpt2_tied"], _ids_and_positions, _positions_loss),
        axes={"positions": None},
    ),
    _case("gpt2_own_loss", _CAUSAL["gpt2_tied"], _ids, _own_loss),
    replace(
        _GPT2_CASE,
        name="hf_gpt2_dropout",
        build=lambda: _make("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1}),
        reference="batched_graph",
        tags=_GPT2_CASE.tags | {"random"},
    ),
    replace(
        _GPT2_CASE,
        name="hf_gpt2_checkpoint_reentrant",
        build=lambda: _checkpointed(True),
        tags=_GPT2_CASE.tags | {"checkpoint", "reentrant"},
    ),
    replace(
        _GPT2_CASE,
        name="hf_gpt2_checkpoint_not_reentrant",
        build=lambda: _checkpointed(False),
        tags=_GPT2_CASE.tags | {"checkpoint"},
    ),
    replace(
        _case("gpt2_samples_equal_tokens", _CAUSAL["gpt2_tied"], _ids, _causal_loss),
        batch=lambda: {"ids": torch.randint(3, _VOCABULARY, (5, 5))},
    ),
    *(
        _case(
            name,
            ("T5Config", "T5ForConditionalGeneration", {**_T5, **options}),
            lambda: {**_ids(), "labels": torch.randint(3, _VOCABULARY, (3, 5))},
            _t5_loss,
        )
        for name, options in {
            "t5": {},
            "t5_gated_untied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        }.items()
    ),
    _vision("vit", "ViTConfig", "ViTForImageClassification"),
    _vision("deit", "DeiTConfig", "DeiTForImageClassification"),
]
