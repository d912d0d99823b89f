"""A GAN in Lightning whose discriminator alone sees records: that part is clipped exactly, the other left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.errors import DrawError, InvalidOptionError

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

C = 0.05
judge = nn.functional.binary_cross_entropy_with_logits


def _parts():
    torch.manual_seed(1)
    generator, discriminator = nn.Linear(2, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    return generator.double(), discriminator.double(), torch.randn(9, 5, dtype=torch.float64)


def _loss(discriminator, real, made):
    ones = torch.ones(len(real), 1, dtype=torch.float64)
    return (judge(discriminator(real), ones) + judge(discriminator(made), 0 * ones)) / 2


def _fit(order, *, sigma=0.0, **options):
    pl = pytest.importorskip("lightning.pytorch")
    from ghostclip.integrations.lightning import PrivacyCallback

    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator, self.data = _parts()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.generator, self.discriminator)]

        def training_step(self, batch, index):
            made = self.generator(torch.ones(len(batch[0]), 2, dtype=torch.float64))
            for part in order:
                optimizer = self.optimizers()[part == "discriminator"]
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                if part == "generator":
                    judged = self.discriminator(made)
                    self.manual_backward(judge(judged, torch.ones_like(judged)))
                else:
                    self.manual_backward(_loss(self.discriminator, batch[0], made.detach()))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    module = Gan()
    privacy = PrivacyCallback(noise_multiplier=sigma, target_delta=1e-3, max_grad_norm=C, **options)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[privacy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(module.data), batch_size=len(module.data)))
    return module, privacy


@pytest.mark.parametrize("order", [("generator", "discriminator"), ("discriminator", "generator")])
def test_the_discriminator_is_clipped_and_the_generator_trained_as_ever(order):
    module, privacy = _fit(order, sigma=1e-9, module="discriminator")
    generator, discriminator, data = _parts()
    made = generator(torch.ones(len(data), 2, dtype=torch.float64))
    wanted, answers = copy.deepcopy(discriminator), module.discriminator if order[0] == "discriminator" else None
    for record, answer in zip(data, made.detach(), strict=True):
        gradients = torch.autograd.grad(
            _loss(discriminator, record[None], answer[None]), list(discriminator.parameters())
        )
        factor = min(1.0, C / float(torch.cat([g.flatten() for g in gradients]).norm()))
        with torch.no_grad():
            for p, gradient in zip(wanted.parameters(), gradients, strict=True):
                p.sub_(factor * gradient / len(data))
    for p, other in zip(module.discriminator.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-7, atol=1e-10)
    judged = (answers or discriminator)(made)
    judge(judged, torch.ones_like(judged)).backward()
    for p, other in zip(module.generator.parameters(), generator.parameters(), strict=True):
        torch.testing.assert_close(p, other - other.grad)
    assert len(privacy.training.engine.accountant) == 1


def test_a_step_for_each_optimizer_is_refused_where_all_is_private():
    with pytest.raises(DrawError, match=r"a GAN's discriminator: PrivacyCallback\(module="):
        _fit(("generator", "discriminator"), sigma=1.0)


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidOptionError, match=r"module='critic'.*one of generator, discriminator"):
        _fit(("generator",), module="critic")
