"""What one step releases, in which order, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.clipping.policies import QuantileAdaptation, adaptive
from ghostclip.errors import CopyError, InvalidOptionError, MissingGradientError, UncoveredParameterError
from ghostclip.optim import DPOptimizer
from tests.engine.training import Training, batch_of, clipped_sum, parameters_of, small_data, small_model

DATA = small_data()
NO_NOISE = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


@NO_NOISE
@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 4.5), ("sum", 1.0)])
def test_step_without_noise_applies_the_clipped_sum(reduction, divisor):
    training = Training(sigma=0.0, bound=0.7, expected=4.5, reduction=reduction)
    before, batch = parameters_of(training.model), batch_of(DATA, start=0, stop=6)
    expected = clipped_sum(training.model, batch, 0.7) / divisor
    training.step(batch)
    moved = before - parameters_of(training.model)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-4, atol=1e-6)


def test_every_parameter_gets_noise_of_the_right_size():
    class Partly(nn.Module):
        """Its second layer takes no part in the forward."""

        def __init__(self):
            super().__init__()
            self.used = nn.Linear(5, 400)
            self.unused = nn.Linear(50, 400)

        def forward(self, x):
            return self.used(x)

    training = Training(model=Partly(), sigma=3.0, bound=0.5, expected=10.0)
    before, batch = copy.deepcopy(training.model), batch_of(DATA, start=0, stop=1)
    training.step([batch[0], torch.zeros(1, dtype=torch.long)])
    expected = 3.0 * 0.5 / 10.0
    for (name, old), new in zip(before.named_parameters(), training.model.parameters(), strict=True):
        spread = (old - new).detach().std().item()
        # Six standard errors of a standard deviation measured on that many values; the noise has no fixed seed.
        assert spread == pytest.approx(expected, rel=6 / math.sqrt(2 * old.numel())), name
    assert training.noise.stds == [1.5] * 4


def test_half_precision_sum_and_noise_are_formed_in_float32():
    training = Training(model=small_model().bfloat16(), sigma=1.0)
    seen = []
    training.noise.add_ = lambda tensor, std: seen.append(tensor.dtype)
    inputs, targets = batch_of(DATA, start=0, stop=3)
    training.step([inputs.bfloat16(), targets])
    assert set(seen) == {torch.float32}
    assert {p.grad.dtype for p in training.model.parameters()} == {torch.bfloat16}


def test_no_noise_warns_once():
    training = Training(sigma=0.0)
    with pytest.warns(UserWarning, match="not differentially private"):
        training.step(batch_of(DATA, start=0, stop=2))
    training.step(batch_of(DATA, start=0, stop=2))


def test_step_before_any_backward_is_refused():
    with pytest.raises(MissingGradientError, match="without a clipped gradient"):
        Training().optimizer.step()


def test_gradient_cleared_before_step_is_refused():
    training = Training()
    training.backward(batch_of(DATA, start=0, stop=2))
    training.optimizer.zero_grad()
    with pytest.raises(MissingGradientError):
        training.optimizer.step()


@NO_NOISE
def test_forgotten_zero_grad_does_not_add_released_gradients_again():
    training, twin = Training(sigma=0.0), Training(sigma=0.0)
    twin.model.load_state_dict(training.model.state_dict())
    for start in (0, 3):
        batch = batch_of(DATA, start=start, stop=start + 3)
        training.step(batch)
        twin.backward(batch)
        twin.optimizer.step()
    assert torch.equal(parameters_of(training.model), parameters_of(twin.model))


def test_parameter_frozen_after_backward_keeps_no_unprotected_gradient():
    training = Training(sigma=1.0)
    training.backward(batch_of(DATA, start=0, stop=2))
    frozen = training.model[0].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    training.optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen.grad is None


def test_optimizer_with_a_strange_parameter_is_refused():
    model, strange = small_model(), nn.Linear(2, 2)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    inner = torch.optim.SGD([*model.parameters(), *strange.parameters()], lr=0.1)
    with pytest.raises(UncoveredParameterError, match="outside the model"):
        DPOptimizer(inner, noise_multiplier=1.0, expected_batch_size=1, clipper=clipper, noise_source=None)


def test_a_parameter_put_past_the_private_optimizer_is_refused_at_the_step():
    training = Training()
    training.optimizer.original_optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    training.backward(batch_of(DATA, start=0, stop=2))
    with pytest.raises(UncoveredParameterError, match=r"shape \(2,\) outside the model"):
        training.optimizer.step()
    assert training.releases == 0


def test_parameter_group_that_is_not_clipped_is_refused():
    training, strange = Training(), nn.Linear(2, 2)
    with pytest.raises(UncoveredParameterError):
        training.optimizer.add_param_group({"params": strange.parameters()})
    assert len(training.optimizer.param_groups) == 1


def test_optimizer_over_a_part_of_the_model_warns_and_protects_that_part():
    model = small_model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    with pytest.warns(UserWarning, match="2 trainable parameter"):
        optimizer = DPOptimizer(
            torch.optim.SGD(model[2].parameters(), lr=1.0),
            noise_multiplier=1.0,
            expected_batch_size=1,
            clipper=clipper,
            noise_source=Training().noise,
        )
    before = copy.deepcopy(model)
    inputs, targets = batch_of(DATA, start=0, stop=2)
    clipper.backward(nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
    optimizer.step()
    assert torch.equal(before[0].weight, model[0].weight)
    assert not torch.equal(before[2].weight, model[2].weight)
    assert model[0].weight.grad is None


def test_closure_is_run_once_and_its_loss_returned():
    training, calls = Training(), []

    def closure():
        calls.append(1)
        training.optimizer.zero_grad()
        training.backward(batch_of(DATA, start=0, stop=2))
        return 17.0

    assert training.optimizer.step(closure) == 17.0
    assert len(calls) == training.releases == 1


class _Sharpness(torch.optim.SGD):
    """Has a gradient at the weights, and another one near them, in every step."""

    def first_step(self):
        raise NotImplementedError

    def second_step(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, _Sharpness])
def test_an_optimizer_that_no_release_fits_is_refused(kind):
    model = small_model()
    engine, loader = ghostclip.PrivacyEngine(), DataLoader(TensorDataset(torch.randn(4, 2)))
    several = [kind([model[0].weight]), torch.optim.SGD([model[0].bias], lr=0.1)]
    with pytest.raises(InvalidOptionError, match=kind.__name__):
        engine.make_private(
            module=model, optimizer=several, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    with pytest.raises(InvalidOptionError, match=kind.__name__):
        DPOptimizer(
            kind(model.parameters()), noise_multiplier=1.0, expected_batch_size=1, clipper=clipper, noise_source=None
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("nan")),
        ("noise_multiplier", None),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", [1.0, 2.0]),
        ("expected_batch_size", 0),
        ("expected_batch_size", None),
        ("loss_reduction", "none"),
        ("loss_reduction", "sum"),
    ],
)
def test_options_out_of_range_are_refused(option, value):
    model = small_model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 4, "max_grad_norm": None, "loss_reduction": "mean"}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidOptionError, match=option):
        DPOptimizer(inner, **{**options, option: value}, clipper=clipper, noise_source=None)


def test_unbounded_sensitivity_with_noise_is_refused():
    with pytest.raises(InvalidOptionError, match="unbounded"):
        Training(sigma=1.0, bound=float("inf"))
    training = Training(sigma=0.0, bound=float("inf"))
    before = parameters_of(training.model)
    with pytest.warns(UserWarning, match="not differentially private"):
        training.step(batch_of(DATA, start=0, stop=2))
    assert bool((parameters_of(training.model) != before).any())
    training.optimizer.noise_multiplier = 1.0
    with pytest.raises(InvalidOptionError, match="unbounded"):
        training.step(batch_of(DATA, start=0, stop=2))


def test_bound_cannot_change_between_backward_and_step():
    training = Training()
    training.backward(batch_of(DATA, start=0, stop=2))
    with pytest.raises(InvalidOptionError, match="already clipped"):
        training.optimizer.max_grad_norm = 5.0


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copier):
    with pytest.raises(CopyError, match="state_dict"):
        copier(Training().optimizer)


def test_an_optimizer_of_a_module_that_came_in_later_and_was_called_by_itself_is_refused() -> None:
    """No forward of the private model has met its parameters, whose gradients nobody clips."""
    model = nn.Sequential(nn.Linear(3, 2))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    private = DPOptimizer(inner, noise_multiplier=0.0, expected_batch_size=4, clipper=clipper)
    model.add_module("late", nn.Linear(3, 2))
    model.late(torch.ones(4, 3)).sum().backward()
    assert model.late.weight.grad is not None
    with pytest.raises(UncoveredParameterError, match="another optimizer releases"):
        torch.optim.SGD(model.late.parameters(), lr=0.1).step()
    assert private.releases == 0


def test_what_is_no_torch_optimizer_or_contradicts_the_source_of_noise_is_refused():
    training = Training()
    clipper, inner = training.optimizer.clipper, torch.optim.SGD(training.model.parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 4, "clipper": clipper}
    with pytest.raises(InvalidOptionError, match="got list"):
        DPOptimizer([inner], **options)
    with pytest.raises(InvalidOptionError, match="noise_source with generator"):
        DPOptimizer(inner, **options, noise_source=training.noise, generator=torch.Generator())
    with pytest.raises(InvalidOptionError, match="holds one of these parameters already"):
        training.optimizer.add_param_group({"params": training.model[0].weight})


def test_an_adaptive_bound_asks_for_a_batch_size_whatever_the_loss():
    model = small_model()
    clipper = ghostclip.GhostClipper(
        model, policy=adaptive(1.0, QuantileAdaptation(unclipped_num_std=1.0)), loss_reduction="sum"
    )
    with pytest.raises(InvalidOptionError, match="expected_batch_size"):
        DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, expected_batch_size=None,
            loss_reduction="sum", clipper=clipper,
        )  # fmt: skip


def test_a_closure_of_a_step_in_parts_is_evaluated_once():
    training, calls = Training(), []

    def closure():
        calls.append(1)
        training.backward(batch_of(DATA, start=0, stop=2))

    assert training.optimizer.pre_step(closure)
    assert calls == [1]
    assert all(p.grad is not None for p in training.model.parameters())


def test_state_without_an_engine_is_the_inner_optimizers():
    first, second = Training(), Training()
    first.optimizer.param_groups = [group | {"lr": 0.25} for group in first.optimizer.param_groups]
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert second.optimizer.original_optimizer.param_groups[0]["lr"] == 0.25
