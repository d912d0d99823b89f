"""Stops, checkpoints and learning rates in Lightning that follow a loss of private records are told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.integration]

DATA = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))


def _said(folder, *, stop=None, best=None, plateau=None):
    pl = pytest.importorskip("lightning.pytorch")
    from ghostclip.integrations.lightning import PrivacyCallback

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 3)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": plateau}
            return {"optimizer": optimizer, "lr_scheduler": schedule} if plateau else optimizer

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.body(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

    callbacks = [PrivacyCallback(noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=1.0)]
    callbacks += [pl.callbacks.EarlyStopping(stop)] if stop else []
    callbacks += [pl.callbacks.ModelCheckpoint(folder, monitor=best)] if best else []
    loaders = [DataLoader(DATA, batch_size=10) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=callbacks, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=best is not None,
        ).fit(Classifier(), *loaders)  # fmt: skip
    return [str(one.message).split(":")[0] for one in caught if "tells of them beyond ε" in str(one.message)]


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({"stop": "train_loss"}, "EarlyStopping(monitor='train_loss')"),
        ({"best": "train_loss_epoch"}, "ModelCheckpoint(monitor='train_loss_epoch')"),
        ({"plateau": "train_loss"}, "ReduceLROnPlateau(monitor='train_loss')"),
    ],
)
def test_what_follows_a_private_loss_is_told_once(tmp_path, options, who):
    assert _said(tmp_path, **options) == [who]


def test_values_of_other_records_and_epsilon_may_be_followed(tmp_path):
    assert _said(tmp_path, stop="val_loss", best="epsilon", plateau="val_loss") == []
