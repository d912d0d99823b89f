"""State-space models, linear attention, gated delta rules, and hybrids of these with attention."""

from functools import partial

from tests.architectures.table import Architecture, architecture, text

_state = partial(architecture, "state space and linear attention", inputs=text)
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_JAMBA = {"use_mamba_kernels": False, "mamba_d_state": 3, "mamba_dt_rank": 2, "num_hidden_layers": 2}
_DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


ARCHITECTURES: list[Architecture] = [
    _state("MambaConfig", "MambaForCausalLM", given={"state_size": 3, "time_step_rank": 2}),
    _state(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        given={"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4},
    ),
    _state("FalconMambaConfig", "FalconMambaForCausalLM", given={"state_size": 3, "time_step_rank": 2}),
    _state(
        "RwkvConfig",
        "RwkvForCausalLM",
        given={"attention_hidden_size": 16, "context_length": 16, "num_hidden_layers": 2},
    ),
    _state("JambaConfig", "JambaForCausalLM", given={**_JAMBA, "attn_layer_period": 2, "attn_layer_offset": 1}),
    _state(
        "ZambaConfig",
        "ZambaForCausalLM",
        given={
            **_JAMBA,
            "attention_head_dim": 16,
            "attention_hidden_size": 32,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
        },
    ),
    _state(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        given={
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "mamba_headdim": 8,
            "chunk_size": 4,
            "use_mamba_kernels": False,
            "num_hidden_layers": 2,
            "layers_block_type": ["mamba", "hybrid"],
            "num_key_value_heads": 2,
            "adapter_rank": 4,
        },
    ),
    _state("BambaConfig", "BambaForCausalLM", given={**_MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    _state("FalconH1Config", "FalconH1ForCausalLM", given={**_MAMBA2, "mamba_d_ssm": 32}),
    _state(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        given={
            **_MAMBA2,
            "shared_intermediate_size": 24,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
        },
    ),
    _state(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        given={
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "use_mamba_kernels": False,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 12,
        },
    ),
    _state("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", given={"num_hidden_layers": 3, "lru_width": 16}),
    _state("Qwen3NextConfig", "Qwen3NextForCausalLM", given=_DELTA),
    _state("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", given=_DELTA),
    _state(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        given={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_multiple_of": 4},
    ),
    _state(
        "xLSTMConfig",
        "xLSTMForCausalLM",
        given={"num_blocks": 1, "chunk_size": 7, "ffn_round_up_to_multiple_of": 8, "mode": "train"},
    ),
]
