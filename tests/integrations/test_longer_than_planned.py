"""Trainings that go on beyond their plan: at the same noise within a larger ε, or refused with that remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.errors import BudgetExceededError, ResumeError

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

DATA = TensorDataset(torch.randn(60, 7), torch.randint(0, 3, (60,)))


class _Trainer:
    """Classes of transformers' Trainer, trained for some epochs from a checkpoint or from the beginning."""

    def __init__(self, folder):
        self._folder = folder

    def train(self, epochs, *, resume=False, **options):
        transformers = pytest.importorskip("transformers")
        from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

        config = transformers.BertConfig(
            vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
        arguments = DPTrainingArguments(
            output_dir=str(self._folder), target_delta=5e-4, max_grad_norm=1.0, per_device_train_batch_size=20,
            num_train_epochs=epochs, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="epoch", **options,
        )  # fmt: skip
        records = [{"input_ids": [1, 2, 3 + n % 9], "labels": n % 2} for n in range(60)]
        model = transformers.BertForSequenceClassification(config)
        trainer = DPTrainer(model=model, args=arguments, train_dataset=records)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.privacy_engine


class _Module:
    """A LightningModule, trained for some epochs from a checkpoint or from the beginning."""

    def __init__(self, folder):
        self._place = str(folder / "run.ckpt")

    def train(self, epochs, *, resume=False, **options):
        pl = pytest.importorskip("lightning.pytorch")
        from ghostclip.integrations.lightning import PrivacyCallback

        class Classifier(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.network = nn.Linear(7, 3)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def training_step(self, batch, index):
                return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        privacy = PrivacyCallback(target_delta=5e-4, max_grad_norm=1.0, **options)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=epochs, callbacks=[privacy], logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(
            Classifier(), DataLoader(DATA, batch_size=20), ckpt_path=self._place if resume else None, weights_only=False
        )
        trainer.save_checkpoint(self._place)
        return privacy.training.engine


@pytest.mark.parametrize("host", [_Trainer, _Module])
def test_more_epochs_are_refused_with_the_noise_that_goes_on(host, tmp_path):
    kept = host(tmp_path)
    kept.train(2, target_epsilon=3.0)
    with pytest.raises(ResumeError, match=r"saved noise_multiplier beside a larger target_epsilon") as refused:
        kept.train(3, resume=True, target_epsilon=3.0)
    noise = float(re.search(r"saved ([0-9.]+),", str(refused.value)).group(1))
    with pytest.raises(BudgetExceededError, match=rf"noise_multiplier={noise!r}"):
        kept.train(3, resume=True, target_epsilon=3.0, noise_multiplier=noise)
    engine = kept.train(3, resume=True, target_epsilon=4.0, noise_multiplier=noise)
    assert [tuple(entry)[2] for entry in engine.accountant.history] == [9]
    assert 3.0 < engine.get_epsilon(5e-4) < 4.0


@pytest.mark.parametrize("host", [_Trainer, _Module])
def test_epochs_that_were_planned_follow_at_the_same_noise(host, tmp_path):
    kept = host(tmp_path)
    begun = kept.train(2, target_epsilon=3.0, planned_epochs=3).get_epsilon(5e-4)
    engine = kept.train(3, resume=True, target_epsilon=3.0, planned_epochs=3)
    assert [tuple(entry)[2] for entry in engine.accountant.history] == [9]
    assert begun < 2.8
    assert 2.95 < engine.get_epsilon(5e-4) <= 3.0
