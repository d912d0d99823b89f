"""Graphs take over in a Trainer whose loss is a known one, and in no other."""

import pytest
import torch
import torch._dynamo

from tests.graph.at_once import at_once

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """Compile nothing, nor let accelerate do it, whose compiled model is unwrapped before it trains."""
    with torch._dynamo.config.patch(disable=True):
        yield at_once(monkeypatch.setattr)


def _trained(folder, kind=DPTrainer, steps=45, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    records = [{"input_ids": torch.randint(30, (7,)), "labels": int(torch.randint(3, ()))} for _ in range(60)]
    arguments = DPTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=6, target_delta=1e-3, noise_multiplier=1.0,
        max_grad_norm=0.5, reproducible_seed=4, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        **options,
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=records)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return trainer, weights


def test_graphs_compute_the_rest_of_a_training(tmp_path):
    trainer, weights = _trained(tmp_path)
    compiled = trainer.private_run.optimizer.compiled.known
    assert 16 < compiled.since < 45
    assert trainer._graph.graphs
    other, eager = _trained(tmp_path, compile=False)
    assert other._graph is None
    assert other.private_run.optimizer.compiled.known is None
    torch.testing.assert_close(weights, eager, rtol=1e-3, atol=1e-5)
    assert trainer.private_run.epsilon() == other.private_run.epsilon()


def test_the_trainers_own_option_asks_for_graphs_at_once(tmp_path):
    trainer, weights = _trained(tmp_path, steps=6, torch_compile=True)
    assert trainer.args.grad_sample_mode == "graph"
    assert trainer.private_run.optimizer.compiled.known.since == 0
    torch.testing.assert_close(weights, _trained(tmp_path, steps=6, compile=False)[1], rtol=1e-3, atol=1e-5)


def test_a_loss_of_the_users_own_stays_eager(tmp_path):
    class Own(DPTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    trainer, _ = _trained(tmp_path, kind=Own, steps=25)
    assert trainer._graph is None
    trainer, _ = _trained(tmp_path, steps=25, grad_sample_mode="bookkeeping")
    assert trainer._graph is None
