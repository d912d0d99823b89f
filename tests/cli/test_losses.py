"""A sample's loss is its own: no other sample and no padding moves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ghostclip.finetune.models import held_out_quality, make_model, sample_losses
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.samples import Sample, SampleDataset, byte_tokens
from ghostclip.finetune.training import learning_rate_at

WINDOWS = [[1, 5, 9, 4, 7], [1, 8], [1, 6, 6], [1, 200, 3, 77, 258, 31, 90]]


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    options = FinetuneOptions(toy=request.param, layers=1, hidden_size=18, heads=3, context_length=9)
    return make_model(options, byte_tokens(), seed=1)


def dataset(windows, width=9):
    samples = [Sample(np.array(window, dtype=np.int32), 1) for window in windows]
    return SampleDataset(samples, pad_id=0, width=width, classes=False)


def losses(model, windows):
    return sample_losses(model, default_collate(list(dataset(windows))), "float32")[0]


def test_loss_of_a_passage_is_that_of_the_passage_alone(model):
    for window, loss in zip(WINDOWS, losses(model, WINDOWS), strict=True):
        alone = model(input_ids=torch.tensor([window]), labels=torch.tensor([window])).loss
        torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-6)


def test_passage_without_a_token_to_predict_costs_nothing(model):
    losses_B = losses(model, [[1], *WINDOWS])
    assert losses_B[0] == 0
    assert losses_B.isfinite().all()


def test_perplexity_weighs_tokens_and_restores_the_mode(model):
    found = held_out_quality(model, dataset(WINDOWS), FinetuneOptions(eval_samples=3))
    expected = float((losses(model, WINDOWS[:3]).detach() * torch.tensor([4, 1, 2])).sum()) / 7
    assert found.accuracy is None
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_embeddings_stay_tied(model):
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_same_seed_same_weights_whatever_the_global_generator_says():
    options = FinetuneOptions(layers=1, hidden_size=18, heads=3, context_length=9)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_model(options, byte_tokens(), seed=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = make_model(options, byte_tokens(), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_learning_rate_rises_falls_and_never_vanishes(steps):
    rates = [learning_rate_at(step, steps=steps, peak=0.5) for step in range(steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
    assert max(rates) == pytest.approx(0.5)
    assert rates[rates.index(max(rates)) :] == sorted(rates[rates.index(max(rates)) :], reverse=True)
