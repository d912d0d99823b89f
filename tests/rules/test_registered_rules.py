"""Rules and samplers that users register: what they cover, and what is said when they are wrong."""

import pytest
import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.errors import UncoveredParameterError, UnsupportedModelError
from ghostclip.factors import Dense
from ghostclip.rules import Captured, register_rule, registry
from ghostclip.rules.registry import register_grad_sampler, register_norm_sampler
from tests.cases.registered import Around, ByBoth, ByGradients, ByNorms, affine_gradients, affine_norms
from tests.exactness.runs import STRATEGIES, engine
from tests.reference import clip_and_sum, per_sample_gradients

# Not `torch.library.custom_op`, whose first call loads the compiler (10 s).
LIBRARY = torch.library.Library("ghostclip_tests", "DEF")
LIBRARY.define("scale(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("scale", lambda x, weight: x * weight, "CompositeImplicitAutograd")
scale = torch.ops.ghostclip_tests.scale


class Scaled(nn.Module):
    """A layer whose operation only a user knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to itself."""
        return scale(self.first(x), self.weight)


@pytest.fixture
def tables(monkeypatch):
    """Let a test register what it likes."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    for name in ("GRAD_SAMPLERS", "NORM_SAMPLERS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def _scale_rule(call):
    x = call.values["input"]
    num_batch_dims = x.dim() - 1

    def factors(saved, grad, split):
        return {"weight": Dense((split(saved[0], num_batch_dims) * split(grad, num_batch_dims)).sum(1))}

    return Captured((x,), x, num_batch_dims, factors, "mine")


def _losses(model, batch):
    return model(batch["x"]).square().mean((1, 2)) * batch["weight"]


def _batch():
    torch.manual_seed(0)
    return {"x": torch.randn(4, 3, 5, dtype=torch.float64), "weight": torch.linspace(0.4, 1.9, 4, dtype=torch.float64)}


def _compare(model, strategy):
    """Assert that the clipped sums are those of one sample at a time; returns the clipper."""
    batch = _batch()
    wanted = clip_and_sum(per_sample_gradients(model, batch, _losses, axes={}))
    clipper = engine(strategy)(model, wanted.max_grad_norm)
    clipper.backward(_losses(model, batch))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.clipped[name], rtol=1e-10, atol=1e-12)
    return clipper


@pytest.mark.parametrize("named", [scale, "ghostclip_tests::scale", scale.default])
def test_rule_for_an_operator_of_a_library(tables, named):
    register_rule(named, arguments="input weight")(_scale_rule)
    clipper = _compare(Scaled().double(), "bookkeeping")
    assert {row.name: row.handled for row in clipper.coverage()}["weight"] == "ghostclip_tests::scale: mine"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operator_without_a_rule_is_exact_as_well(strategy):
    _compare(Scaled().double(), strategy)


def test_wrong_rule_shows(tables):
    def doubled(call):
        captured = _scale_rule(call)
        return Captured(
            captured.saved,
            captured.rows,
            captured.num_batch_dims,
            lambda *given: {"weight": Dense(2 * captured.factors(*given)["weight"].grad_BP)},
            "mine",
        )

    register_rule(scale, arguments="input weight")(doubled)
    with pytest.raises(AssertionError, match="not close"):
        _compare(Scaled().double(), "bookkeeping")


class Unregistered(ByGradients):
    """A subclass, for which nothing is registered."""


def test_custom_autograd_function_without_a_sampler_is_refused():
    model = Around(Unregistered).double()
    with pytest.raises(UncoveredParameterError, match=r"layer\.weight"):
        _compare(model, "bookkeeping")


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda module, a, g: {module.weight: torch.zeros(4, 5, 5)}, "NoneType for parameter 'bias'"),
        (lambda module, a, g: {module.weight: torch.zeros(5, 5)}, r"shape \(5, 5\) for parameter 'weight', not"),
        (lambda module, a, g: {module.weight: 1.0}, "float for parameter 'weight'"),
        (lambda module, a, g: {module.weight: torch.zeros(4, 5, 5), module.bias: g.sum(1)[:2]}, r"shape \(2, 5\)"),
    ],
)
def test_wrong_sampler_is_named(tables, sampler, said):
    register_grad_sampler(Unregistered)(sampler)
    with pytest.raises(UnsupportedModelError, match=rf"(?s)layer \(Unregistered\).*{said}"):
        _compare(Around(Unregistered).double(), "bookkeeping")


def _too_small(sampler):
    return lambda module, a, g: {p: 0.1 * values for p, values in sampler(module, a, g).items()}


@pytest.mark.parametrize(
    ("register", "sampler"), [(register_grad_sampler, affine_gradients), (register_norm_sampler, affine_norms)]
)
def test_sampler_that_returns_too_little_is_refused_in_its_first_backward(tables, register, sampler):
    """Samples would be clipped at a tenth of their norm, and nothing else would tell."""
    register(Unregistered)(_too_small(sampler))
    with pytest.raises(UnsupportedModelError, match=r"layer \(Unregistered\).*is not autograd's.*layer_check"):
        _compare(Around(Unregistered).double(), "bookkeeping")


def test_sampler_of_a_random_layer_cannot_be_compared_and_the_log_says_so(tables, caplog):
    class Random(ByGradients):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5))

    register_grad_sampler(Random)(affine_gradients)
    clipper = engine("bookkeeping")(Around(Random).double(), 1.0)
    for _ in range(2):
        clipper.backward(_losses(clipper.model, _batch()))
    assert caplog.text.count("not compared with autograd") == 1


@pytest.mark.parametrize("kind", [ByNorms, ByBoth])
def test_a_sample_that_is_not_finite_leaves_what_norm_samplers_sum_of_the_others(kind):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    sums = []
    for batch in (x[:3], torch.cat([x[:3], x[3:] * torch.nan])):
        model = Around(kind).double()
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        clipper = GhostClipper(model, max_grad_norm=0.5, loss_reduction="sum")
        clipper.backward(model(batch).square().sum((1, 2)))
        sums.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert clipper.non_finite_samples == 1
    torch.testing.assert_close(sums[1], sums[0])
