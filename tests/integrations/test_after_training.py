"""What trainers leave behind: a model that trains on, in public or private again, and callbacks that can be copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ghostclip.errors import NotOfferedError

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def stage(tmp_path):
    """Returns a private trainer of two steps for a model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    numbers = torch.Generator().manual_seed(2)
    ids = [torch.randint(30, (9,), generator=numbers) for _ in range(24)]

    def make(model=None):
        config = transformers.GPT2Config(vocab_size=30, n_positions=9, n_embd=12, n_layer=1, n_head=2)
        options = DPTrainingArguments(
            output_dir=str(tmp_path), noise_multiplier=0.7, target_delta=1e-3, max_grad_norm=0.1, max_steps=2,
            per_device_train_batch_size=6, reproducible_seed=3, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        records = [{"input_ids": row, "labels": row} for row in ids]
        return DPTrainer(model or transformers.GPT2LMHeadModel(config), options, train_dataset=records)

    return make


def test_a_model_is_free_after_its_training(stage):
    trainer = stage()
    trainer.train()
    model, ids = trainer.model, torch.randint(30, (4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model)
    model.train(False)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    before.train(False)
    loss = before(input_ids=ids, labels=ids).loss
    grads = torch.autograd.grad(loss, list(before.parameters()))
    for own, old, grad in zip(model.parameters(), before.parameters(), grads, strict=True):
        torch.testing.assert_close(own, old - 0.1 * grad)
    second = stage(model)
    second.train()
    assert len(second.privacy_engine.accountant) == 2


def test_a_trainer_that_trains_further_goes_on_with_its_account(stage):
    trainer = stage()
    trainer.train()
    first = trainer.privacy_engine.get_epsilon(1e-3)
    state = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert len(trainer.privacy_engine.accountant) == 4
    assert trainer.privacy_engine.get_epsilon(1e-3) > first
    assert any(not torch.equal(old, own) for old, own in zip(state, trainer.model.parameters(), strict=True))


def test_a_draw_without_records_is_logged_as_no_small_loss(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=30, n_positions=9, n_embd=12, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ))  # fmt: skip
    row = torch.arange(9)
    loss = float(model(input_ids=row[None], labels=row[None]).loss)
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path), noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=0.1, max_steps=20,
        expected_batch_size=1, per_device_train_batch_size=2, reproducible_seed=3, save_strategy="no", logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=0.0,
    )  # fmt: skip
    trainer = DPTrainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    assert not next(iter(trainer.get_train_dataloader()))
    assert trainer.data_collator([trainer.train_dataset[0]])["input_ids"].tolist() == [row.tolist()]
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    first = next(step for step, value in enumerate(logged) if value)
    assert len(logged) == 20
    assert logged[first:] == pytest.approx([loss] * (20 - first), rel=1e-3)


def test_a_callback_is_copied_before_its_training():
    pytest.importorskip("lightning")
    from ghostclip.integrations.lightning import PrivacyCallback

    callback = PrivacyCallback(max_grad_norm=0.5, noise_multiplier=2.0, target_delta=1e-3, clipping="per_layer")
    for made in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert isinstance(made, type(callback))
        assert made.training.options == callback.training.options
        assert made.training is not callback.training
    callback.training.optimizer = object()
    with pytest.raises(NotOfferedError, match="a training has begun"):
        pickle.dumps(callback)


def test_values_are_reduced_again_after_a_part_that_raised(tmp_path):
    """Whoever looks at a training that has failed, a callback that comes first, finds Lightning's own reduction."""
    lightning = pytest.importorskip("lightning")
    from ghostclip.integrations.lightning import PrivacyCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def training_step(self, batch, _):
            self.trainer.strategy.reduce(batch[0])
            raise ValueError("a part of the first draw")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Last(lightning.Callback):
        def on_exception(self, trainer, pl_module, exception):
            trainer.strategy.reduce(asked)

    reduced, asked = [], torch.zeros(())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accumulate_grad_batches=2,
        callbacks=[Last(), PrivacyCallback(noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=1.0)],
    )  # fmt: skip
    trainer.strategy.reduce = lambda value, *_, **__: reduced.append(value) or value
    records = torch.utils.data.TensorDataset(torch.randn(24, 3))
    with pytest.raises(ValueError, match="a part of the first draw"):
        trainer.fit(Model(), torch.utils.data.DataLoader(records, batch_size=12))
    assert reduced[-1] is asked
