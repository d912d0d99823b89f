"""Convolutional networks as torchvision writes them, with GroupNorm: in-place activations, concatenation, attention.

Shape suffixes: B samples, C channels, H height, W width, T places of a window, D heads.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.architectures.table import Architecture
from tests.cases.table import layer_case


def _conv(inner: int, outer: int, *, stride: int = 1, kernel: int = 3, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)


class _Residual(nn.Module):
    """ResNet's basic block: the sum is made, and rectified, in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inner, outer, stride=stride), nn.GroupNorm(2, outer)
        self.conv2, self.norm2 = _conv(outer, outer), nn.GroupNorm(2, outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(_conv(inner, outer, stride=stride, kernel=1), nn.GroupNorm(2, outer))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x_BCHW)))))
        out += self.downsample(x_BCHW)
        return self.relu(out)


def _resnet() -> nn.Module:
    stem = [_conv(3, 4, kernel=7, stride=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [_Residual(4, 4, 1), _Residual(4, 6, 2), _Residual(6, 8, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class _LayerNorm2d(nn.LayerNorm):
    def forward(self, x_BCHW: Tensor) -> Tensor:
        return super().forward(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    """Depthwise convolution and a perceptron over channels last, scaled; whole samples dropped out."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.dropped = dropped

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x_BCHW).permute(0, 2, 3, 1))
        inner = self.layer_scale * self.down(functional.gelu(self.up(inner))).permute(0, 3, 1, 2)
        if self.dropped:
            kept = torch.rand(len(x_BCHW), 1, 1, 1, dtype=inner.dtype) >= self.dropped
            inner = inner * kept / (1 - self.dropped)
        return x_BCHW + inner


def _convnext(dropped: float) -> nn.Module:
    first = [nn.Conv2d(3, 4, 2, 2), _LayerNorm2d(4), _ConvNeXtBlock(4, dropped)]
    second = [_LayerNorm2d(4), nn.Conv2d(4, 6, 2, 2), _ConvNeXtBlock(6, dropped)]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 3))


class _SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        inner = functional.silu(self.squeeze(functional.adaptive_avg_pool2d(x_BCHW, 1)), inplace=True)
        return torch.sigmoid(self.excite(inner)) * x_BCHW


class _InvertedResidual(nn.Module):
    """MobileNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inner
        self.kept = stride == 1 and inner == outer
        self.body = nn.Sequential(
            *(_conv(inner, wide, kernel=1), nn.GroupNorm(2, wide), nn.Hardswish(inplace=True)),
            *(_conv(wide, wide, stride=stride, groups=wide), nn.GroupNorm(2, wide), nn.ReLU6(inplace=True)),
            *(_SqueezeExcite(wide), _conv(wide, outer, kernel=1), nn.GroupNorm(2, outer)),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.body(x_BCHW) if self.kept else self.body(x_BCHW)


def _mobilenet() -> nn.Module:
    blocks = [_InvertedResidual(4, 4, 1), _InvertedResidual(4, 6, 2)]
    return nn.Sequential(_conv(3, 4, stride=2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


class _Dense(nn.Module):
    """DenseNet's block: each layer reads all before it."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(1, width + i * growth), nn.ReLU(inplace=True), _conv(width + i * growth, growth))
            for i in range(layers)
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        seen = [x_BCHW]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


def _densenet() -> nn.Module:
    return nn.Sequential(_conv(3, 4), _Dense(4, 3, 3), nn.AvgPool2d(2), _conv(13, 3, kernel=1), nn.Flatten())


class _UNet(nn.Module):
    """Down by pooling, up by transposed convolution, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(3, 4), self._pair(4, 6)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.join, self.head = self._pair(8, 4), nn.Conv2d(4, 2, 1)

    @staticmethod
    def _pair(inner: int, outer: int) -> nn.Module:
        ends = [_conv(outer, outer), nn.InstanceNorm2d(outer, affine=True), nn.LeakyReLU(0.1, inplace=True)]
        return nn.Sequential(_conv(inner, outer), nn.GroupNorm(2, outer), nn.ReLU(inplace=True), *ends)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        first = self.down1(x_BCHW)
        second = self.down2(functional.max_pool2d(first, 2))
        return self.head(self.join(torch.cat([first, self.up(second)], 1)))


class _SwinBlock(nn.Module):
    """Attention in shifted windows, with a table of relative positions."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + window - 1
        self.register_buffer("index_TT", apart[0] * (2 * window - 1) + apart[1])

    def _attend(self, x_BHWC: Tensor) -> Tensor:
        size, w = x_BHWC.shape, self.window
        folded = x_BHWC.view(size[0], size[1] // w, w, size[2] // w, w, size[3])
        rows = folded.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, size[3])
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias_DTT = self.table[self.index_TT.view(-1)].view(w * w, w * w, -1).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) + bias_DTT.unsqueeze(0)).softmax(-1)
        rows = self.out((weights @ v).transpose(1, 2).flatten(2))
        back = rows.view(size[0], size[1] // w, size[2] // w, w, w, size[3])
        return back.permute(0, 1, 3, 2, 4, 5).reshape(size)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        moved = torch.roll(self.norm1(x_BHWC), (-self.shift, -self.shift), (1, 2))
        x_BHWC = x_BHWC + torch.roll(self._attend(moved), (self.shift, self.shift), (1, 2))
        return x_BHWC + self.mlp(self.norm2(x_BHWC))


class _Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(_SwinBlock(8, 2, 2, 0), _SwinBlock(8, 2, 2, 1))
        self.merge, self.head = nn.Linear(32, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = self.blocks(self.patches(x_BCHW).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.merge(x).mean((1, 2)))


_DROPPING = layer_case("ConvNeXt with stochastic depth", lambda: _convnext(0.4), 3, 3, 8, 8, tags=("random",))
_CASES = [
    layer_case("ResNet with GroupNorm", _resnet, 3, 3, 16, 16),
    layer_case("ConvNeXt", lambda: _convnext(0.0), 3, 3, 8, 8),
    replace(_DROPPING, reference="batched_graph"),
    layer_case("Swin", _Swin, 3, 3, 16, 16),
    layer_case("MobileNet with squeeze and excitation", _mobilenet, 3, 3, 8, 8),
    layer_case("UNet", _UNet, 3, 3, 8, 8),
    layer_case("DenseNet", _densenet, 3, 3, 8, 8),
]
ARCHITECTURES = [Architecture("convolutional", case) for case in _CASES]
