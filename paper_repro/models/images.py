"""Small convolutional networks on images of 32 x 32."""

from __future__ import annotations

from torch import Tensor, nn


def _block(inputs: int, outputs: int, pool: nn.Module | None) -> list[nn.Module]:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()]
    return [*layers, pool] if pool else layers


class OpacusCifarCNN(nn.Sequential):
    """The CIFAR-10 network of the Opacus paper (Yousefpour et al., 2021, Figure 1), 605,226 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *_block(3, 32, nn.AvgPool2d(2)),
            *_block(32, 64, nn.AvgPool2d(2)),
            *_block(64, 128, nn.AvgPool2d(2)),
            nn.Conv2d(128, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 10, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits: the mean over height and width of ten channels."""
        return super().forward(x).mean(dim=(2, 3))


class SmallCifarCNN(nn.Sequential):
    """The CIFAR-10 network of Bu, Mao and Xu (2022, Table 4), which took it from Papernot et al. (2021): 550,570."""

    def __init__(self) -> None:
        super().__init__(
            *_block(3, 32, nn.MaxPool2d(2)),
            *_block(32, 64, nn.MaxPool2d(2)),
            *_block(64, 128, nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
