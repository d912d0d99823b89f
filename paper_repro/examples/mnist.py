"""A convolutional network on digits like MNIST's, which are drawn here."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from paper_repro.examples.data import digits
from paper_repro.examples.options import accuracy, options_of


class SampleConvNet(nn.Module):
    """Two convolutions and two linear layers, 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the digits.

        Args:
            x: Images `[B, 1, 28, 28]`.

        Returns:
            Scores `[B, 10]`.
        """
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    options = options_of(
        "mnist", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )
    train_loader = DataLoader(digits(options.samples), batch_size=options.batch_size, shuffle=True)
    test_loader = DataLoader(digits(1000), batch_size=500)

    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, options.epochs + 1):
        model.train()
        losses = []
        for images, targets in train_loader:
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
