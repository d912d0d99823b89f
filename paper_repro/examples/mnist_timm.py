"""One of timm's networks on drawn digits: its batch norms replaced, and checked before it is trained."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import DataLoader

import ghostclip
from paper_repro.examples.data import CLASSES, digits
from paper_repro.examples.options import accuracy, options_of


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    import timm

    options = options_of(
        "mnist_timm", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )
    criterion = nn.CrossEntropyLoss()
    train_loader = DataLoader(digits(options.samples), batch_size=options.batch_size, shuffle=True)
    # BatchNormAct2d, a batch norm with its activation inside, becomes a group norm with that activation.
    model = ghostclip.ModuleValidator.fix(timm.create_model("test_byobnet", num_classes=CLASSES, in_chans=1))
    images, targets = next(iter(train_loader))
    print(ghostclip.check(model, (images[:4], targets[:4]), criterion))
    engine = ghostclip.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5),
        data_loader=train_loader,
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    for epoch in range(1, options.epochs + 1):
        model.train()
        for inputs, labels in loader:
            criterion(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        found, epsilon = accuracy(model, DataLoader(digits(1000), batch_size=500)), engine.get_epsilon(options.delta)
        print(f"epoch {epoch}: test accuracy {found:.1%}, ε = {epsilon:.2f}")
    return {"accuracy": found, "chance": 1 / CLASSES, "epsilon": epsilon}


if __name__ == "__main__":
    main()
