"""VGG networks (Simonyan and Zisserman, 2015): the small ones for images of 32 x 32, and VGG11 as published."""

from __future__ import annotations

from torch import nn

# Channels of the convolutions; 0 halves height and width.
PLANS = {
    11: (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    16: (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
}
GROUPS = 32


def _features(depth: int, *, norms: bool, divide: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs = 3
    for planned in PLANS[depth]:
        if not planned:
            layers.append(nn.MaxPool2d(2))
            continue
        outputs = planned // divide
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        if norms:
            layers.append(nn.GroupNorm(min(GROUPS, outputs), outputs))
        layers.append(nn.ReLU())
        inputs = outputs
    return layers


def cifar_vgg(depth: int, *, divide: int = 1) -> nn.Sequential:
    """VGG with group norms and one linear layer, for ten classes of small images.

    Args:
        depth: 11 (9,231,114 parameters) or 16 (14,728,266).
        divide: All widths are divided by it.

    Returns:
        The model.
    """
    return nn.Sequential(*_features(depth, norms=True, divide=divide), nn.Flatten(), nn.Linear(512 // divide, 10))


def imagenet_vgg11(*, divide: int = 1) -> nn.Sequential:
    """VGG11 for a thousand classes and images of any size from 32 x 32 on, 132,863,336 parameters.

    Args:
        divide: All widths are divided by it.

    Returns:
        The model; its dropout is left out, so that one sample alone gives the gradient it has in a batch.
    """
    hidden = 4096 // divide
    return nn.Sequential(
        *_features(11, norms=False, divide=divide),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 // divide * 49, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1000),
    )
