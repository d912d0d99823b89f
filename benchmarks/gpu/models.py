"""The large models, written in plain torch as transformers writes them: nothing is loaded, nothing but torch is needed.

GPT-2 has its products as `addmm` on weights of shape (inputs, outputs); Llama has its norm in float32 and its keys
repeated for several heads. Embedding and head are not tied, and position ids are given for every sample: both so that
Opacus can take part.

Shape suffixes: B samples, T positions, I features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tasks import Task, token_batch

LENGTH = 1024
SAMPLES = 8


class Conv1D(nn.Module):
    """A linear layer as GPT-2's checkpoints have it: the weight of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map the last axis."""
        shape = (*x_BTI.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x_BTI.reshape(-1, x_BTI.shape[-1]), self.weight).view(shape)


class GPT2Block(nn.Module):
    """Attention, then two layers, each after a layer norm and as a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = Conv1D(width, 3 * width), Conv1D(width, width)
        self.mlp_in, self.mlp_out = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Attend to earlier positions, then transform each one."""
        parts = self.attention_in(self.attention_norm(x_BTI)).split(x_BTI.shape[2], dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed_BHTI = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTI = x_BTI + self.attention_out(mixed_BHTI.transpose(1, 2).flatten(2))
        return x_BTI + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTI)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with an untied head; takes ids and gives logits."""

    def __init__(self, *, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for layer in (self.token, self.position, self.head):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, `[B, T, vocabulary]`."""
        x_BTI = self.token(ids_BT) + self.position(_places(ids_BT))
        for block in self.blocks:
            x_BTI = block(x_BTI)
        return self.head(self.norm(x_BTI))


class RMSNorm(nn.Module):
    """Llama's norm: in float32 whatever the type of the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Scale every position to mean square one, then by the weight."""
        wide = x_BTI.float() if x_BTI.dtype is not torch.float64 else x_BTI
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x_BTI.dtype)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then a gated layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, max(1, heads // 4), width // heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.groups * self.size, bias=False)
        self.value = nn.Linear(width, self.groups * self.size, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTI: Tensor, turn_BTI: tuple[Tensor, Tensor]) -> Tensor:
        """Attend to earlier positions, then transform each one; `turn_BTI` are cosines and sines."""
        normal = self.attention_norm(x_BTI)
        query, key, value = (
            layer(normal).unflatten(2, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = _turned(query, turn_BTI), _turned(key, turn_BTI)
        key, value = (_repeated(part, self.heads // self.groups) for part in (key, value))
        mixed_BHTI = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTI = x_BTI + self.attention_out(mixed_BHTI.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(x_BTI)
        return x_BTI + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """Llama with an untied head; takes ids and gives logits."""

    def __init__(self, *, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        del length
        self.size = width // heads
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for layer in (self.token, self.head):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the next token at every position, `[B, T, vocabulary]`."""
        x_BTI = self.token(ids_BT)
        rate_I = 5e5 ** -(torch.arange(0, self.size, 2, device=ids_BT.device) / self.size)
        angle_BTI = (_places(ids_BT)[..., None] * rate_I).repeat(1, 1, 2)
        turn_BTI = angle_BTI.cos().to(x_BTI.dtype), angle_BTI.sin().to(x_BTI.dtype)
        for block in self.blocks:
            x_BTI = block(x_BTI, turn_BTI)
        return self.head(self.norm(x_BTI))


def _places(ids_BT: Tensor) -> Tensor:
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(ids_BT.shape[0], 1)


def _turned(x_BHTI: Tensor, turn_BTI: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.unsqueeze(1) for part in turn_BTI)
    first, second = x_BHTI.chunk(2, dim=-1)
    return x_BHTI * cosine + torch.cat([-second, first], dim=-1) * sine


def _repeated(x_BHTI: Tensor, times: int) -> Tensor:
    samples, heads, length, size = x_BHTI.shape
    wide = x_BHTI[:, :, None].expand(samples, heads, times, length, size)
    return wide.reshape(samples, heads * times, length, size)


@dataclass(frozen=True)
class Large:
    """A large model, in bfloat16, with a small one of the same class in float32, for correctness."""

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


def _case(name: str, title: str, make: Callable[..., nn.Module], sizes: dict[str, int]) -> Large:
    few = {"width": 32, "layers": 2, "heads": 4, "vocabulary": 97, "length": 24}
    large = partial(_in_dtype, partial(make, length=LENGTH, **sizes), torch.bfloat16)
    return Large(
        name,
        Task(name, f"{title}, bf16, T {LENGTH}", SAMPLES, large, token_batch(sizes["vocabulary"], LENGTH)),
        Task(f"{name}-small", f"{title}, small", 3, partial(make, **few), token_batch(97, 24)),
    )


def large_models(layers: int | None = None) -> list[Large]:
    """The cases."""
    gpt2 = {"width": 1280, "layers": layers or 36, "heads": 20, "vocabulary": 50257}
    llama = {"width": 2048, "layers": layers or 16, "heads": 32, "vocabulary": 128256}
    return [_case("gpt2-large", "GPT-2 large", GPT2, gpt2), _case("llama-1b", "Llama 1B", Llama, llama)]


def large_model(name: str, layers: int | None = None) -> Large:
    """The case of a name."""
    return next(case for case in large_models(layers) if case.name == name)
