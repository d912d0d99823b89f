"""A `compute_loss` of one's own in a `DPTrainer` with bf16: its halves are compared up to the rounding of 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


class _Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def _collated(records):
    return {name: torch.stack([record[name] for record in records]) for name in ("x", "labels")}


def test_own_loss_in_16_bits(tmp_path):
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    class Own(DPTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"])

    torch.manual_seed(2)
    model = _Net(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path), noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=0.5, max_steps=2, bf16=True,
        per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no", remove_unused_columns=False,
        disable_tqdm=True,
    )  # fmt: skip
    records = [{"x": torch.randn(16), "labels": torch.tensor(place % 5)} for place in range(64)]
    trainer = Own(model, arguments, train_dataset=records, data_collator=_collated)
    trainer.train()
    assert len(trainer.privacy_engine.accountant) == 2
