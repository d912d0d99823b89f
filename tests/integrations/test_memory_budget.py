"""`memory_budget` below 1 in trainers and on the command line: blocks run again, and the training is the same."""

import pytest
import torch

from ghostclip.errors import InvalidOptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration

from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments  # noqa: E402

V = 61


def _gpt2():
    config = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=3, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _bert():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=V, **sizes))


def _trained(tmp_path, make, **given):
    torch.manual_seed(0)
    model = make()
    records = [{"input_ids": torch.randint(V, (9,)), "labels": torch.randint(V, (9,))} for _ in range(12)]
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path), noise_multiplier=0.0, target_delta=1e-3, max_grad_norm=0.5, max_steps=3,
        per_device_train_batch_size=6, report_to=[], use_cpu=True, save_strategy="no", reproducible_seed=5,
        learning_rate=0.05, optim="sgd", disable_tqdm=True, **given,
    )  # fmt: skip
    trainer = DPTrainer(model=model, args=arguments, train_dataset=records)
    torch.manual_seed(1)
    trainer.train()
    clipper = trainer.private_run.optimizer.clipper
    return torch.cat([p.detach().flatten() for p in model.parameters()]), clipper.coverage()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_gpt2, _bert])
def test_a_trainer_keeps_a_budget_and_trains_the_same(tmp_path, make):
    wanted, ordinary = _trained(tmp_path / "ordinary", make)
    found, reduced = _trained(tmp_path / "reduced", make, memory_budget=0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert ordinary.expected_share is None
    assert reduced.expected_share < 1
    assert any("block run again" in row.plan for row in reduced)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_budget": 0.0}, "memory_budget"),
        ({"memory_budget": 0.5, "grad_sample_mode": "hooks"}, "below 1 every layer gets one backward or two"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path, given, said):
    with pytest.raises(InvalidOptionError, match=said):
        _trained(tmp_path, _gpt2, **given)
