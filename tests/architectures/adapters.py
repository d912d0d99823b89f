"""Adapters of peft on small transformers: only what they add, or name, is trained and clipped.

Shape suffix: B samples.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from tests.architectures.table import Architecture, text
from tests.architectures.tiny import make, tiny
from tests.cases import Case
from tests.cases.table import probe_loss

_LORA = {"r": 2, "lora_alpha": 4}
# name: (configuration of peft, its options)
_CAUSAL: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "LoRA": ("LoraConfig", {**_LORA, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "LoRA on everything, biases too": ("LoraConfig", {**_LORA, "target_modules": "all-linear", "bias": "all"}),
    "rsLoRA": ("LoraConfig", {**_LORA, "use_rslora": True, "target_modules": ["q_proj", "o_proj"]}),
    "DoRA": ("LoraConfig", {**_LORA, "use_dora": True, "target_modules": ["q_proj", "v_proj"]}),
    "LoRA on embeddings": ("LoraConfig", {**_LORA, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA with modules to save": (
        "LoraConfig",
        {**_LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj", "o_proj"]}),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 3, "target_r": 2, "total_step": 10, "target_modules": ["q_proj", "v_proj"]},
    ),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
}


def _adapted(kind: str, options: Mapping[str, object]) -> nn.Module:
    import peft

    model = make("LlamaForCausalLM", tiny("LlamaConfig", num_key_value_heads=2))
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def _last_tokens(model: nn.Module, batch: dict) -> Tensor:
    """Probe the places of the batch's own tokens: virtual ones may come before them."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return probe_loss(logits[:, -batch["input_ids"].shape[1] :])


# name: (what the error says, why)
_REFUSED: Mapping[str, tuple[str, str]] = {
    "LoHa": (
        "custom autograd.Function",
        "its weights are multiplied in a custom autograd.Function, which cannot be looked into",
    )
}


def _row(name: str, kind: str, options: Mapping[str, object]) -> Architecture:
    refused, reason = _REFUSED.get(name, ("", ""))
    tags = frozenset({"transformers", "float32_inside"})
    case = Case(name, lambda: _adapted(kind, options), text, _last_tokens, tags=tags, refused=refused)
    return Architecture("adapter", case, reason)


ARCHITECTURES: list[Architecture] = [_row(name, kind, options) for name, (kind, options) in _CAUSAL.items()]
