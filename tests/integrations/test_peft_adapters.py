"""Adapters of peft that form their weights past torch's operations: exact once they do so by these, else refused."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import UncoveredParameterError
from ghostclip.integrations import peft as adapters
from tests.reference import clip_and_sum, per_sample_gradients

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

# Read while tests are collected, which is before any of them runs.
SHIPPED = [
    (function, "apply", function.apply)
    for function in (getattr(importlib.import_module(place), name) for place, name in adapters._FUNCTIONS)
]
SHIRA = importlib.import_module("peft.tuners.shira.layer").Linear
SHIPPED.append((SHIRA, "get_delta_weight", SHIRA.get_delta_weight))
TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoHa": lambda: peft.LoHaConfig(r=2, **TARGETS),
    "RandLora": lambda: peft.RandLoraConfig(r=4, **TARGETS),
    "C3A": lambda: peft.C3AConfig(block_size=4, **TARGETS),
    "SHiRA": lambda: peft.ShiraConfig(r=2, **TARGETS),
}


def _losses(model, batch):
    logits = model(input_ids=batch["ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.mT, batch["ids"][:, 1:], reduction="none").mean(1)


def _adapted(config):
    torch.manual_seed(0)
    base = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=19,
    )  # fmt: skip
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(base), config).double()
    for p in model.parameters():
        if p.requires_grad:
            # An adapter that starts as zero hides gradients.
            p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.fixture(autouse=True)
def peft_as_it_is(monkeypatch):
    """Compute as peft ships for a test, whatever a `DPTrainer` of this process has changed before it."""
    for owner, name, shipped in SHIPPED:
        monkeypatch.setattr(owner, name, shipped)
    return adapters.use_plain_operations


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_refused_with_the_line_that_makes_them_exact(name, peft_as_it_is):
    model, batch = _adapted(ADAPTERS[name]()), {"ids": torch.randint(0, 19, (5, 6))}
    wanted = clip_and_sum(per_sample_gradients(model, batch, _losses, axes={}))
    with (
        ghostclip.GhostClipper(model, max_grad_norm=wanted.max_grad_norm) as clipper,
        pytest.raises(UncoveredParameterError, match=rf"{name}.* are exact after ghostclip.*use_plain_operations"),
    ):
        clipper.backward(_losses(model, batch))
    peft_as_it_is()
    with ghostclip.GhostClipper(model, max_grad_norm=wanted.max_grad_norm) as clipper:
        clipper.backward(_losses(model, batch))
        # C3A computes in 32 bits whatever the model's are.
        tolerance = 1e-5 if name == "C3A" else 1e-10
        for key, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(p.grad, wanted.clipped[key], rtol=tolerance, atol=tolerance / 100)
