"""The network of `mnist` through accelerate; the same script runs on several processes (`accelerate launch`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, optim
from torch.utils.data import DataLoader

from ghostclip import PhysicalBatches, PrivacyEngine
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
    from accelerate import Accelerator

    options = options_of(
        "mnist_accelerate", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )
    accelerator, privacy_engine, criterion = Accelerator(cpu=True), PrivacyEngine(), nn.CrossEntropyLoss()
    network = SampleConvNet()
    model, optimizer, loader = privacy_engine.make_private(
        module=network,
        optimizer=optim.SGD(network.parameters(), lr=options.lr),
        data_loader=DataLoader(digits(options.samples), batch_size=options.batch_size),
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    # Not needed where a whole batch fits in memory: computes as much of it at once as does.
    parts = PhysicalBatches(optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for batch in loader:
            parts.run(batch, lambda part: accelerator.backward(criterion(model(part[0]), part[1])))
            optimizer.step()
            optimizer.zero_grad()
        found = accuracy(network, DataLoader(digits(1000), batch_size=500))
        epsilon = privacy_engine.get_epsilon(options.delta)
        accelerator.print(f"epoch {epoch}: test accuracy {found:.1%}, ε = {epsilon:.2f}")
    return {"accuracy": found, "chance": 0.1, "epsilon": epsilon}


if __name__ == "__main__":
    main()
