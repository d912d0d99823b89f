"""A residual network with batch norms on images like CIFAR-10's: `ModuleValidator.fix` makes it trainable."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.validation.fixers import ModuleValidator
from paper_repro.examples.data import textures
from paper_repro.examples.options import accuracy, options_of


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions find to what was there.

        Args:
            x: Features `[B, inputs, H, W]`.

        Returns:
            Features `[B, outputs, H / stride, W / stride]`.
        """
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet() -> nn.Sequential:
    """Make a residual network of seven layers, as one finds it: with batch norms.

    Returns:
        The model.
    """
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        BasicBlock(16, 32, 2),
        BasicBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    options = options_of(
        "cifar_resnet", __doc__, arguments, samples=4000, epochs=8, batch_size=256, lr=0.5, noise_multiplier=None
    )
    train_loader = DataLoader(textures(options.samples), batch_size=options.batch_size, shuffle=True)
    test_loader = DataLoader(textures(1000), batch_size=500)

    model = resnet()
    print("wrong with it:", *ModuleValidator.validate(model, strict=False)[:1], sep="\n  ")
    model = ModuleValidator.fix(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
    )
    print(f"σ = {optimizer.noise_multiplier:.2f} spends ε = {options.epsilon:g} in {options.epochs} epochs")
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, options.epochs + 1):
        model.train()
        losses = []
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=128, optimizer=optimizer
        ) as memory_safe_loader:
            for images, targets in memory_safe_loader:
                optimizer.zero_grad()
                loss = criterion(model(images), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        found = accuracy(model, test_loader)
        epsilon = privacy_engine.get_epsilon(options.delta)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, test accuracy {found:.1%}, ε = {epsilon:.2f}")
    return {"accuracy": found, "chance": 0.1, "epsilon": epsilon}


if __name__ == "__main__":
    main()
