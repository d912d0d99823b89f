"""Whole trainings on a device: without noise they are those of the CPU, and every release is that of one at a time."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import BatchMemoryManager, PrivacyEngine
from tests.cases.table import CPU
from tests.engine.training import clipped_sum, parameters_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*this integration was tested with:UserWarning"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:.*(generator|seed).*:UserWarning"),
]
RECORDS, BATCH, BOUND = 48, 8, 0.5
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


def data():
    generator = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(RECORDS, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.randint(0, 3, (RECORDS,), generator=generator))


def small_model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def private(model, **options):
    loader = DataLoader(data(), batch_size=BATCH, generator=torch.Generator().manual_seed(3))
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        data_loader=loader,
        **{"noise_multiplier": 0.0, "max_grad_norm": BOUND, **options},
    )


def in_a_loop(device, *, physical=None, **options):
    model, optimizer, *_, loader = private(small_model().to(device), **options)
    with contextlib.ExitStack() as stack:
        if physical:
            manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
            loader = stack.enter_context(manager)
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device), reduction="none")
            optimizer.clipper.backward(losses)
            optimizer.step()
    return model


def with_accelerate(device):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=device.type == "cpu")
    model, optimizer, *_, loader = private(small_model())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    return model


class Classifier(nn.Module):
    """What a trainer of transformers wants of a model."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()

    def forward(self, features, labels):
        logits = self.inner(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_a_trainer(device, folder):
    pytest.importorskip("transformers")
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    arguments = DPTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        max_steps=4,
        use_cpu=device.type == "cpu",
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        report_to=[],
        save_strategy="no",
        seed=4,
        reproducible_seed=4,
        target_delta=1e-3,
    )
    records = [{"features": features, "labels": label} for features, label in data()]
    trainer = DPTrainer(Classifier(), arguments, train_dataset=records)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert {p.device.type for p in trainer.model.parameters()} == {device.type}
    return trainer.model


def same(one, other):
    torch.testing.assert_close(parameters_of(one).cpu(), parameters_of(other).cpu(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        *({"grad_sample_mode": strategy} for strategy in STRATEGIES),
        {"clipping": "per_layer"},
        {"clipping": "adaptive"},
        {"physical": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_loop_is_that_of_the_cpu(options, device):
    same(in_a_loop(device, **options), in_a_loop(CPU, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_release_is_that_of_one_sample_at_a_time(strategy, device):
    model, optimizer, *_, loader = private(small_model().to(device), grad_sample_mode=strategy)
    for inputs, targets in loader:
        batch = [inputs.to(device), targets.to(device)]
        wanted = clipped_sum(model._module if hasattr(model, "_module") else model, batch, BOUND)
        optimizer.zero_grad()
        optimizer.clipper.backward(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        optimizer.step()
        found = torch.cat([p.grad.flatten() for p in model.parameters()]) * BATCH
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["fast", "secure"])
def test_noise_of_releases_is_that_of_the_multiplier(level, device):
    """Of a gradient that vanishes: what is released is noise."""
    model = nn.Linear(200, 50, bias=False).to(device)
    loader = DataLoader(TensorDataset(torch.zeros(40, 200)), batch_size=8)
    model, optimizer, *_, loader = PrivacyEngine(noise_level=level).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=loader,
        noise_multiplier=2.0,
        max_grad_norm=BOUND,
    )
    for (inputs,) in loader:
        optimizer.zero_grad()
        optimizer.clipper.backward(model(inputs.to(device)).sum(1))
        optimizer.step()
        (released,) = (p.grad.double() * 8 / (2.0 * BOUND) for p in model.parameters())
        # Within five deviations of 10,000 values.
        assert abs(released.mean()) < 0.05
        assert abs(released.std() - 1) < 0.036


@pytest.mark.integration
def test_accelerate_is_as_on_the_cpu(device):
    same(with_accelerate(device), in_a_loop(CPU))


@pytest.mark.integration
def test_a_trainer_is_as_on_the_cpu(device, tmp_path):
    same(with_a_trainer(device, tmp_path / "there"), with_a_trainer(CPU, tmp_path / "here"))
