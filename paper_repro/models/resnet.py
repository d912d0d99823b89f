"""Residual networks (He et al., 2016) for images of 32 x 32, with group norms where batch norms would mix samples."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(GROUPS, channels), channels)


class _Residual(nn.Module):
    """Layers beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), _norm(outputs))


def _basic(inputs: int, width: int, stride: int) -> _Residual:
    layers = nn.Sequential(
        _convolution(inputs, width, 3, stride),
        _norm(width),
        nn.ReLU(),
        _convolution(width, width, 3),
        _norm(width),
    )
    return _Residual(layers, _shortcut(inputs, width, stride))


def _bottleneck(inputs: int, width: int, stride: int) -> _Residual:
    outputs = 4 * width
    layers = nn.Sequential(
        _convolution(inputs, width, 1),
        _norm(width),
        nn.ReLU(),
        _convolution(width, width, 3, stride),
        _norm(width),
        nn.ReLU(),
        _convolution(width, outputs, 1),
        _norm(outputs),
    )
    return _Residual(layers, _shortcut(inputs, outputs, stride))


def _resnet(
    block: Callable[[int, int, int], _Residual], expansion: int, depths: tuple[int, ...], divide: int
) -> nn.Sequential:
    first = STAGES[0][0] // divide
    layers: list[nn.Module] = [_convolution(3, first, 3), _norm(first), nn.ReLU()]
    inputs = first
    for (width, stride), depth in zip(STAGES, depths, strict=True):
        for index in range(depth):
            layers.append(block(inputs, width // divide, stride if index == 0 else 1))
            inputs = expansion * width // divide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def resnet18(*, divide: int = 1) -> nn.Sequential:
    """ResNet-18 for ten classes, 11,173,962 parameters.

    Args:
        divide: All widths are divided by it.

    Returns:
        The model.
    """
    return _resnet(_basic, 1, (2, 2, 2, 2), divide)


def resnet50(*, divide: int = 1) -> nn.Sequential:
    """ResNet-50 for ten classes, 23,520,842 parameters.

    Args:
        divide: All widths are divided by it.

    Returns:
        The model.
    """
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), divide)
