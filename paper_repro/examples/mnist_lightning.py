"""The network of `mnist` trained by Lightning, whose trainer is handed a private optimizer and Poisson batches."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, optim
from torch.nn import functional as F
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
    import lightning.pytorch as pl

    from ghostclip.integrations.lightning import DPLightningDataModule

    options = options_of(
        "mnist_lightning", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )

    class Digits(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(digits(options.samples), batch_size=options.batch_size, shuffle=True)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(digits(1000), batch_size=500)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = SampleConvNet()
            self.privacy_engine = PrivacyEngine()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def configure_optimizers(self) -> optim.Optimizer:
            optimizer = optim.SGD(self.parameters(), lr=options.lr)
            self.trainer.fit_loop.setup_data()
            _, optimizer, _ = self.privacy_engine.make_private(
                module=self,
                optimizer=optimizer,
                data_loader=self.trainer.train_dataloader,
                noise_multiplier=options.sigma,
                max_grad_norm=options.max_grad_norm,
                wrap_model=False,
            )
            return optimizer

        def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
            images, targets = batch
            loss = F.cross_entropy(self(images), targets)
            self.log("loss", loss, batch_size=len(images))
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
            images, targets = batch
            self.log("accuracy", (self(images).argmax(-1) == targets).float().mean())

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                found, epsilon = self.trainer.callback_metrics, self.privacy_engine.get_epsilon(options.delta)
                print(f"epoch {self.current_epoch + 1}: test accuracy {found['accuracy']:.1%}, ε = {epsilon:.2f}")

    model = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=options.epochs, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DPLightningDataModule(Digits()))
    found = accuracy(model, DataLoader(digits(1000), batch_size=500))
    epsilon = model.privacy_engine.get_epsilon(options.delta)
    print(f"in the end: test accuracy {found:.1%}, ε = {epsilon:.2f}")
    return {"accuracy": found, "chance": 0.1, "epsilon": epsilon}


if __name__ == "__main__":
    main()
