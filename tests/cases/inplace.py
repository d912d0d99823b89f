"""In-place activations and residuals, layers that are frozen, unused, or adapted by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.cases.linear import mlp
from tests.cases.table import ids_case, layer_case


class Residual(nn.Module):
    """`x += layer(x)` and `y += x`: both operands of an in-place sum are layer outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to itself."""
        y = self.first(x)
        y += x
        z = self.second(y.tanh())
        z += y
        z.mul_(0.5)
        return z


class InplaceFirst(nn.Module):
    """The first layer is followed by an in-place operation, so its output is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.LeakyReLU(0.1, inplace=True), nn.Linear(4, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 3)."""
        return self.layers(x)


class ScaledEmbedding(nn.Module):
    """An embedding whose output is scaled in place, Gemma style with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.register_buffer("scale", torch.tensor(2.2), persistent=False)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to (B, T, 3)."""
        return self.head(self.embedding(ids).mul_(self.scale))


class ConvNet(nn.Module):
    """A small torchvision-style residual network: in-place ReLU, GroupNorm, pooling, a linear head."""

    class _Block(nn.Module):
        def __init__(self, width_in: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
            self.norm1 = nn.GroupNorm(2, width)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norm2 = nn.GroupNorm(2, width)
            self.down = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.GroupNorm(2, width))

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
            out += self.down(x)
            return self.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(self._Block(4, 4, 1), self._Block(4, 6, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, 3)."""
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Lora(nn.Module):
    """A frozen Linear with a trainable low-rank update, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 6) to (..., 5)."""
        return self.base(x) + 2.0 * self.up(self.down(x))


class RawLora(nn.Module):
    """LoRA with raw factors beside the frozen layer, and IA3-style scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 6))
        self.lora_b = nn.Parameter(torch.randn(5, 2))
        self.ia3 = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 6) to (..., 5)."""
        return (self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()) * self.ia3


class UnusedLayer(nn.Module):
    """Holds a layer and a raw parameter that the forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 4)
        self.unused = nn.Linear(5, 4)
        self.unused_raw = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 4)."""
        return self.used(x)


def _frozen(build: Callable[[], nn.Module], keep: Callable[[str], bool]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        for name, p in model.named_parameters():
            p.requires_grad_(keep(name))
        return model

    return make


CASES = [
    layer_case("inplace_residual", Residual, 4, 3, 5, tags=("core",)),
    layer_case("inplace_first_relu", InplaceFirst, 4, 3, 5),
    layer_case("inplace_first_relu_2d", InplaceFirst, 4, 5),
    ids_case("inplace_scaled_embedding", ScaledEmbedding, 4, 6),
    layer_case("inplace_convnet", ConvNet, 4, 3, 8, 8),
    layer_case("frozen_first", _frozen(lambda: mlp(5, 6, 4), lambda name: name.startswith("2")), 4, 3, 5),
    layer_case("frozen_last", _frozen(lambda: mlp(5, 6, 4), lambda name: name.startswith("0")), 4, 3, 5),
    layer_case("frozen_weight_only", _frozen(lambda: mlp(5, 6, 4), lambda name: name.endswith("bias")), 4, 3, 5),
    layer_case("frozen_bias_only", _frozen(lambda: mlp(5, 6, 4), lambda name: name.endswith("weight")), 4, 3, 5),
    layer_case("frozen_bitfit_convnet", _frozen(ConvNet, lambda name: name.endswith("bias")), 4, 3, 8, 8),
    layer_case("frozen_lora", Lora, 4, 3, 6),
    layer_case("frozen_raw_lora", RawLora, 4, 3, 6),
    layer_case("unused_layer", UnusedLayer, 4, 3, 5),
]
