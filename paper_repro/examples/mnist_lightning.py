"""The network of `mnist` trained by Lightning: one callback makes an ordinary script private."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

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
    import lightning.pytorch as pl

    from ghostclip.integrations.lightning import PrivacyCallback

    options = options_of(
        "mnist_lightning", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = SampleConvNet()

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), lr=options.lr)

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    privacy = PrivacyCallback(
        noise_multiplier=options.sigma, target_delta=options.delta, max_grad_norm=options.max_grad_norm
    )
    trainer = pl.Trainer(accelerator="cpu", max_epochs=options.epochs, logger=False, callbacks=[privacy],
                         enable_progress_bar=False, enable_checkpointing=False)  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(digits(options.samples), batch_size=options.batch_size, shuffle=True))
    found = accuracy(model.network, DataLoader(digits(1000), batch_size=500))
    print(f"in the end: test accuracy {found:.1%}, ε = {privacy.epsilon:.2f}")
    return {"accuracy": found, "chance": 0.1, "epsilon": privacy.epsilon}


if __name__ == "__main__":
    main()
