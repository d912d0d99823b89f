"""A loss of one's own beside activation checkpointing: its halves are compared, though parts of the model run again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip.errors import LossReductionError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


class _Net(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
        self.block = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


def _collated(records):
    return {name: torch.stack([record[name] for record in records]) for name in ("x", "labels")}


def _losses(model, inputs):
    return nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def _apart(model, inputs):
    return _losses(model, inputs).mean()


def _weighted(model, inputs):
    losses = _losses(model, inputs)
    return (losses * losses.detach().softmax(0)).sum()


def _trained(loss, folder, *, reentrant):
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    class Own(DPTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model, inputs)

    torch.manual_seed(2)
    arguments = DPTrainingArguments(
        output_dir=str(folder), noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=0.5, max_steps=2,
        per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no", remove_unused_columns=False,
        disable_tqdm=True,
    )  # fmt: skip
    records = [{"x": torch.randn(4), "labels": torch.tensor(place % 3)} for place in range(64)]
    trainer = Own(_Net(reentrant=reentrant), arguments, train_dataset=records, data_collator=_collated)
    trainer.train()
    return trainer.privacy_engine


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_over_the_batch_are_refused(tmp_path, reentrant):
    with pytest.raises(LossReductionError, match="losses of its two halves"):
        _trained(_weighted, tmp_path, reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_keeps_records_apart_is_checked(tmp_path, reentrant):
    engine = _trained(_apart, tmp_path, reentrant=reentrant)
    assert len(engine.accountant) == 2
    assert "not checked" not in engine.summary(delta=1e-3)
