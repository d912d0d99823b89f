"""The large models, from transformers' own classes with random weights: nothing is loaded from a network or a disk.

Embedding and head are not tied, and position ids are given for every sample: both so that Opacus can take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.tasks import Task, token_batch

LENGTH = 1024


class Logits(nn.Module):
    """A causal language model that takes ids and gives logits.

    Args:
        model: Of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, `[B, T, vocabulary]`."""
        position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(ids_BT.shape[0], 1)
        return self.model(input_ids=ids_BT, position_ids=position_BT, use_cache=False).logits


def _gpt2(*, width: int, layers: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_positions=length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                tie_word_embeddings=False,
            )
        )
    )


def _llama(*, width: int, layers: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Logits(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 4,
                max_position_embeddings=length,
                tie_word_embeddings=False,
            )
        )
    )


@dataclass(frozen=True)
class Large:
    """A large model with a small one of the same class.

    Attributes:
        name: Short name.
        task: What is measured, in bfloat16 where it is large.
        small: What correctness is checked on, in float32.
    """

    name: str
    task: Task
    small: Task

    @property
    def quick(self) -> Task:
        """The small model in the type of the large one: what stands for that one in a quick run."""
        return replace(self.small, make_model=partial(_in_dtype, self.small.make_model, torch.bfloat16))


def _in_dtype(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make().to(dtype)
    finally:
        torch.set_default_dtype(before)


def _case(name: str, title: str, make: Callable[..., nn.Module], sizes: dict[str, int], batch: int) -> Large:
    few = {"width": 32, "layers": 2, "heads": 4, "vocabulary": 97, "length": 24}
    large = partial(_in_dtype, partial(make, length=LENGTH, **sizes), torch.bfloat16)
    return Large(
        name,
        Task(name, f"{title}, bf16, T {LENGTH}", batch, large, token_batch(sizes["vocabulary"], LENGTH)),
        Task(f"{name}-small", f"{title}, small", 3, partial(make, **few), token_batch(97, 24)),
    )


def large_models() -> list[Large]:
    """The cases.

    Returns:
        A GPT-2 of 36 layers (838 million parameters) and a Llama of 16 (1.5 billion).
    """
    gpt2 = {"width": 1280, "layers": 36, "heads": 20, "vocabulary": 50257}
    llama = {"width": 2048, "layers": 16, "heads": 32, "vocabulary": 128256}
    return [
        _case("gpt2-large", "GPT-2 large", _gpt2, gpt2, 4),
        _case("llama-1b", "Llama 1B", _llama, llama, 4),
    ]
