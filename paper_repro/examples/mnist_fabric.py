"""The network of `mnist` through Lightning's Fabric: make_private, then `fabric.setup`."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, optim
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from paper_repro.examples.data import digits
from paper_repro.examples.mnist import SampleConvNet
from paper_repro.examples.options import accuracy, options_of


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    from lightning.fabric import Fabric

    options = options_of(
        "mnist_fabric", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )
    fabric, privacy_engine, criterion = Fabric(accelerator="cpu", devices=1), PrivacyEngine(), nn.CrossEntropyLoss()
    fabric.launch()
    network = SampleConvNet()
    model, optimizer, loader = privacy_engine.make_private(
        module=network,
        optimizer=optim.SGD(network.parameters(), lr=options.lr),
        data_loader=DataLoader(digits(options.samples), batch_size=options.batch_size),
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, targets in loader:
            optimizer.zero_grad()
            fabric.backward(criterion(model(images), targets))
            optimizer.step()
        found = accuracy(network, DataLoader(digits(1000), batch_size=500))
        epsilon = privacy_engine.get_epsilon(options.delta)
        print(f"epoch {epoch}: test accuracy {found:.1%}, ε = {epsilon:.2f}")
    return {"accuracy": found, "chance": 0.1, "epsilon": epsilon}


if __name__ == "__main__":
    main()
