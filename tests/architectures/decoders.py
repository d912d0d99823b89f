"""Language models that read from left to right, dense and as mixtures of experts."""

from collections.abc import Mapping

from tests.architectures.table import Architecture, architecture, text

# Names for which a tiny configuration needs nothing of its own: `NameConfig` and `NameForCausalLM`.
_DENSE = [
    "Apertus",
    "Arcee",
    "BioGpt",
    "BitNet",
    "Bloom",
    "Cohere",
    "Cohere2",
    "CpmAnt",
    "Cwm",
    "Doge",
    "Ernie4_5",
    "Exaone4",
    "Falcon",
    "Flint",
    "Gemma",
    "Gemma2",
    "Glm",
    "Glm4",
    "GPTBigCode",
    "GPTNeoX",
    "GPTNeoXJapanese",
    "Granite",
    "GraniteSWA",
    "Helium",
    "HrmText",
    "HunYuanDenseV1",
    "Llama",
    "Ministral",
    "Mistral",
    "ModernBertDecoder",
    "Mpt",
    "NanoChat",
    "Nemotron",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "OPT",
    "Persimmon",
    "Phi",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "SeedOss",
    "SmolLM3",
    "StableLm",
    "Starcoder2",
    "VaultGemma",
    "XGLM",
]
_EXPERTS = [
    "Afmoe",
    "AriaText",
    "BailingHybrid",
    "Cohere2Moe",
    "DeepseekV4",
    "Ernie4_5_Moe",
    "ExaoneMoe",
    "FlexOlmo",
    "Glm4Moe",
    "GptOss",
    "GraniteMoe",
    "GraniteMoeShared",
    "Mixtral",
    "MiniMax",
    "MiniMaxM2",
    "Olmoe",
    "Phimoe",
    "Qwen2Moe",
    "Qwen3Moe",
]
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
_GIVEN: Mapping[str, Mapping[str, object]] = {
    "OPT": {"word_embed_proj_dim": 16},
    "Nemotron": {"num_key_value_heads": 2},
    "Phimoe": {"sliding_window": None},
}
_OTHERS = [
    ("decoder", "GPT2Config", "GPT2LMHeadModel", {}),
    ("decoder", "CTRLConfig", "CTRLLMHeadModel", {"dff": 24}),
    ("decoder", "GPTNeoConfig", "GPTNeoForCausalLM", {"attention_types": [[["global"], 1]], "window_size": 4}),
    ("decoder", "GPTJConfig", "GPTJForCausalLM", {"rotary_dim": 4}),
    ("decoder", "CodeGenConfig", "CodeGenForCausalLM", {"n_head": 4, "rotary_dim": 4}),
    ("decoder", "DiffLlamaConfig", "DiffLlamaForCausalLM", {"num_key_value_heads": 2}),
    ("decoder", "Gemma3TextConfig", "Gemma3ForCausalLM", {}),
    ("decoder", "BertConfig", "BertLMHeadModel", {"is_decoder": True}),
    ("decoder", "YoutuConfig", "YoutuForCausalLM", _LATENT),
    ("mixture of experts", "DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    ("mixture of experts", "DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    ("mixture of experts", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT),
    ("mixture of experts", "Llama4TextConfig", "Llama4ForCausalLM", {"intermediate_size_mlp": 24, "attn_scale": 0.1}),
    (
        "mixture of experts",
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {**_LATENT, "zero_expert_num": 1, "expert_ffn_hidden_size": 12, "ffn_hidden_size": 24, "moe_topk": 2},
    ),
]


ARCHITECTURES: list[Architecture] = [
    *(
        architecture(family, f"{name}Config", f"{name}ForCausalLM", inputs=text, given=_GIVEN.get(name))
        for family, names in (("decoder", _DENSE), ("mixture of experts", _EXPERTS))
        for name in names
    ),
    *(architecture(family, config, model, inputs=text, given=given) for family, config, model, given in _OTHERS),
    architecture("decoder", "XLNetConfig", "XLNetLMHeadModel", inputs=text, given={"d_inner": 24}),
]
