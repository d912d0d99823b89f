"""Kernels that do not repeat themselves, as on a GPU: what they return is off by another random share every time."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# Attention's backward adds up in no fixed order on a GPU, as does whatever adds rows where an index says.
ATTENTION = ("_scaled_dot_product",)
ATOMICS = ("scatter_add", "index_add", "index_put", "embedding_dense_backward", "scatter_reduce")
WIDTH, WORDS, LENGTH = 16, 23, 6


class Noise(TorchDispatchMode):
    """Multiplies what some kernels return by 1 + share · (standard normal), in backwards; or everywhere.

    Args:
        share: How much they are off by.
        seed: Of the noise; nothing else is drawn from its generator.
        of: What the names of the kernels begin with.
        forwards: Also kernels of forwards.
    """

    def __init__(self, share, *, seed=0, of=ATTENTION, forwards=False):
        super().__init__()
        self.share, self.of, self.forwards, self.met = share, of, forwards, 0
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run a kernel; return it as it may come out another time."""
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if not name.startswith(self.of) or not (self.forwards or "backward" in name):
            return result
        self.met += 1
        if isinstance(result, torch.Tensor):
            return self._off(result)
        return tuple(self._off(one) if isinstance(one, torch.Tensor) else one for one in result)

    def _off(self, value):
        if not value.is_floating_point():
            return value
        normal = torch.randn(value.shape, generator=self.generator)
        return value.mul_((1 + self.share * normal).to(value.dtype))


class LoRA(nn.Module):
    """A frozen linear layer beside a trained product of two small ones in float32, as peft has them."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x):
        """Map the last axis."""
        return self.base(x) + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(x.dtype)


class Block(nn.Module):
    """Attention and two layers, each a residual."""

    def __init__(self, between=None):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.between = between

    def forward(self, x):
        """Map the last axis."""
        h = self.first(x)
        heads = (one(h).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(h)
        if self.between is not None:
            x = self.between(x)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A small language model; the loss of each sample is the mean over its positions."""

    def __init__(self, depth=4, between=None):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(between if number == depth // 2 else None) for number in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        """Return logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_lora(model):
    """Return a model in bfloat16, frozen but for float32 adapters beside the layers of its attention."""
    model.bfloat16().requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value", "out"):
            setattr(block, name, LoRA(getattr(block, name)))
    return model


def losses_of(model, ids):
    """Return each sample's loss."""
    logits = model(ids)[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
