"""The data module for Lightning, with the library where it is installed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.data import DPDataLoader
from ghostclip.integrations.lightning import DPLightningDataModule


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["lightning.pytorch", "pytorch_lightning"])
def test_trainer_makes_private_steps(library):
    from ghostclip import PrivacyEngine

    pl = pytest.importorskip(library, reason="Lightning is an extra of its own")

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 2)
            self.engine = PrivacyEngine(accountant="rdp")

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, _index):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            # As Opacus's guide has it: the whole module is wrapped, and the wrapper kept where torch does not look.
            self.trainer.fit_loop.setup_data()
            wrapped, optimizer, _ = self.engine.make_private(
                module=self,
                optimizer=torch.optim.SGD(self.parameters(), lr=0.1),
                data_loader=self.trainer.train_dataloader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=isinstance(self.trainer.train_dataloader, DPDataLoader),
            )
            self.dp = {"model": wrapped}
            return optimizer

    class Users(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,))), batch_size=4)

    model = Model()
    before = model.layer.weight.detach().clone()
    quiet = {
        "enable_progress_bar": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, limit_val_batches=0, **quiet)
    trainer.fit(model, DPLightningDataModule(Users()))
    assert len(model.engine.accountant) == 20
    assert not torch.equal(before, model.layer.weight)
