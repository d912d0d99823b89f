"""Every clip policy in every strategy: its values against one-sample autograd, its bound by leaving samples out.

Shape suffixes: B samples, G clip groups.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping import policies
from ghostclip.clipping.bounds import PSAC, AutoS, Flat, Normalised, QuantileAdaptation
from ghostclip.errors import InvalidOptionError
from ghostclip.optim import DPOptimizer
from tests.cases import by_name
from tests.exactness import tolerances
from tests.exactness.runs import STRATEGIES, gradients
from tests.reference import per_sample_gradients, trainable, whole_norm

F32, F64 = torch.float32, torch.float64
CASES = ("linear_3d", "shared_tied_head", "conv2d_first_only")


def _halves(names):
    """Two named groups: what the first pattern does not take, the second does."""
    first = names[: max(1, len(names) // 2)]
    return {"first": first, "rest": [name for name in names if name not in first] or ["none"]}


# {name: (policy for the names of a model's parameters and a bound C, the coefficient by norm and C, its groups)}
POLICIES = {
    "flat": (lambda _, c: policies.flat(c), lambda n, c: min(1.0, c / n) if n else 1.0, "whole"),
    "automatic": (lambda _, c: policies.automatic(c, gamma=0.05), lambda n, c: c / (n + 0.05), "whole"),
    "normalised": (lambda _, c: policies.normalised(c), lambda n, c: c / n if n else 0.0, "whole"),
    "psac": (lambda _, c: policies.psac(c, r=0.2), lambda n, c: c / (n + 0.2 / (n + 0.2)), "whole"),
    "per_layer": (lambda _, c: policies.per_layer(c), lambda n, c: min(1.0, c / n) if n else 1.0, "each"),
    "per_layer_bounds": (
        lambda names, c: policies.per_layer([c * (1 + i) for i in range(len(names))]),
        lambda n, c: min(1.0, c / n) if n else 1.0,
        "each",
    ),
    "per_layer_automatic": (lambda _, c: policies.per_layer(c, rule=AutoS(0.05)), lambda n, c: c / (n + 0.05), "each"),
    "per_group": (
        lambda names, c: policies.per_group(_halves(names), [c, 2 * c]),
        lambda n, c: min(1.0, c / n) if n else 1.0,
        "halves",
    ),
    "adaptive": (
        lambda _, c: policies.adaptive(c, QuantileAdaptation(unclipped_num_std=1.0)),
        lambda n, c: min(1.0, c / n) if n else 1.0,
        "whole",
    ),
}
every_policy = pytest.mark.parametrize("name", POLICIES)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _groups(kind, names, bound, policy_name):
    """The groups as (names of parameters, C_l), written down a second time."""
    if kind == "whole":
        return [(names, bound)]
    if kind == "halves":
        halves = _halves(names)
        return [(halves["first"], bound), ([n for n in halves["rest"] if n in names], 2 * bound)]
    if policy_name == "per_layer_bounds":
        return [([name], bound * (1 + index)) for index, name in enumerate(names)]
    return [([name], bound / math.sqrt(len(names))) for name in names]


def _expected(per_sample, groups, coefficient):
    """Σ_b coefficient(‖g_bl‖, C_l)·g_bl, one sample and one group at a time."""
    total = {name: torch.zeros_like(value) for name, value in per_sample[0].items()}
    for gradient in per_sample:
        for names, bound in groups:
            if names:
                norm = whole_norm({name: gradient[name] for name in names}).item()
                for name in names:
                    total[name] += coefficient(norm, bound) * gradient[name]
    return total


def _attach(model, name, bound, strategy, **options):
    return GhostClipper(model, policy=POLICIES[name][0](list(trainable(model)), bound), strategy=strategy, **options)


def _relative(got, want):
    return (whole_norm({name: got[name] - want[name] for name in want}) / whole_norm(want)).item()


@pytest.fixture(scope="module")
def references():
    """Per-sample gradients of the cases, and a bound between their norms."""
    found = {}
    for name in CASES:
        case = by_name(name)
        gradients_B = per_sample_gradients(case.reference_model(), case.data(F64), case.losses, axes=case.axes)
        norms = sorted(whole_norm(gradient).item() for gradient in gradients_B)
        found[name] = gradients_B, 0.5 * (norms[0] + norms[-1])
    return found


@every_policy
@every_strategy
@pytest.mark.parametrize("case_name", CASES)
def test_sum_is_that_of_one_sample_at_a_time(name, strategy, case_name, references):
    case, (per_sample, bound) = by_name(case_name), references[case_name]
    model, batch = case.model(F64), case.data(F64)
    clipper = _attach(model, name, bound, strategy)
    clipper.backward(case.losses(model, batch))
    groups = _groups(POLICIES[name][2], list(trainable(model)), bound, name)
    want = _expected(per_sample, groups, POLICIES[name][1])
    assert _relative(gradients(model), want) <= 1e-10
    assert clipper.sensitivity() == pytest.approx(math.sqrt(sum(c**2 for names, c in groups if names)), rel=1e-12)
    assert clipper.group_norms.shape == (len(per_sample), len(groups))
    clipper.remove()


class Sequence(nn.Module):
    """An embedding under a linear layer, wide enough for Gram norms: the directions of a token can cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 24)
        self.mix = nn.Linear(24, 20)

    def forward(self, ids_BT, weight_BT):
        return (self.mix(self.embedding(ids_BT)) * weight_BT[:, :, None]).sum((1, 2))


def _adversaries(dtype):
    """One ordinary sample and, after it, all that could break a bound; scales by sample, ids and token weights."""
    ids_BT = torch.tensor([[0, 1, 2]] * 8)
    weight_BT = torch.ones(8, 3, dtype=dtype)
    ids_BT[1] = torch.tensor([3, 3, 0])
    weight_BT[1] = torch.tensor([1.0, -1.0, 1e-7])
    scale_B = torch.tensor([1.0, 1e4, 1e-20, 1e-9, 1e12, math.nan, math.inf, -math.inf], dtype=dtype)
    return ids_BT, weight_BT, scale_B


@every_policy
@every_strategy
@pytest.mark.parametrize("dtype", [F32, F64])
def test_no_sample_moves_the_sum_by_more_than_the_sensitivity(name, strategy, dtype):
    model = Sequence().to(dtype)
    ids_BT, weight_BT, scale_B = _adversaries(dtype)
    clipper = _attach(model, name, 0.3, strategy)
    clipper.withhold_gradients()

    def summed(rows, scale_B=scale_B):
        clipper.reset()
        clipper.backward(model(ids_BT[rows], weight_BT[rows]) * scale_B[rows])
        return {key: clipper.summed_gradient(p).double().clone() for key, p in model.named_parameters()}

    limit = clipper.sensitivity() * (1 + tolerances.SENSITIVITY[dtype])
    whole = summed(list(range(8)))
    assert all(bool(value.isfinite().all()) for value in whole.values())
    assert clipper.non_finite_samples == 3
    for sample in range(8):
        rest = summed([row for row in range(8) if row != sample])
        moved = whole_norm({key: whole[key] - rest[key] for key in whole}).item()
        assert moved <= limit, f"sample {sample}"
        if sample >= 5:
            # Zeroed out, not left out: with a row less the others may be added up in another order.
            zeroed = summed(list(range(8)), scale_B.index_fill(0, torch.tensor(sample), 0.0))
            assert all(torch.equal(whole[key], zeroed[key]) for key in whole), f"sample {sample} contributes"
        alone = whole_norm(summed([sample])).item()
        assert alone <= limit
    assert clipper.non_finite_total > 3
    clipper.remove()


@every_policy
@every_strategy
def test_empty_batch_adds_nothing(name, strategy):
    model = Sequence()
    clipper = _attach(model, name, 1.0, strategy)
    clipper.withhold_gradients()
    clipper.backward(model(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3)))
    assert clipper.has_clipped_sum
    assert clipper.per_sample_norms.shape == (0,)
    for p in model.parameters():
        kept = clipper.summed_gradient(p)
        assert kept is None or not bool(kept.any())


RULES = [Flat(), AutoS(0.01), Normalised(), PSAC(0.1)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@every_rule
@pytest.mark.parametrize("dtype", [F32, F64])
def test_table_of_edge_cases(rule, dtype):
    limits = torch.finfo(dtype)
    norm_B = torch.tensor([0.0, limits.tiny, 1e-13, 1e-3, 1.0, 7.0, limits.max, math.inf, math.nan], dtype=dtype)
    for bound in (1e-30, 1e-3, 1.0, 1e6, 1e30, 1e300):
        coef_B = rule.coefficients(norm_B, bound)
        assert coef_B.dtype == dtype
        assert bool(coef_B.isfinite().all())
        assert bool((coef_B >= 0).all())
        assert coef_B[-2:].tolist() == [0.0, 0.0]
        kept_B = norm_B[:-2].double() * coef_B[:-2].double()
        # A bound is compared in the norms' dtype, which may round it up by half a unit.
        assert bool((kept_B <= bound * (1 + limits.eps)).all()), f"C = {bound}: {kept_B}"
        if rule.name == "flat" and bound >= 1e-12:
            assert coef_B[0] == 1.0
            assert bool((coef_B[:-2][norm_B[:-2] <= bound] == 1.0).all())


def test_infinite_bound_clips_nothing_and_is_for_flat_clipping_only():
    norm_B = torch.tensor([0.0, 1.0, 1e30, math.inf])
    assert policies.flat(math.inf).coefficients([norm_B], [math.inf])[0].tolist() == [1.0, 1.0, 1.0, 0.0]
    for make in (policies.automatic, policies.normalised, policies.psac, policies.per_layer):
        with pytest.raises(InvalidOptionError, match="finite"):
            make(math.inf)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, "1", None, True])
def test_bounds_out_of_range_are_refused(bound):
    for make in (policies.flat, policies.automatic, policies.normalised, policies.psac, policies.per_layer):
        with pytest.raises(InvalidOptionError, match="max_grad_norm"):
            make(bound)
    with pytest.raises(InvalidOptionError, match="max_grad_norm"):
        policies.per_layer([1.0, bound])
    policy = policies.flat(1.0)
    with pytest.raises(InvalidOptionError, match="max_grad_norm"):
        policy.max_grad_norm = bound
    assert policy.max_grad_norm == 1.0


def test_sensitivity_follows_the_relation():
    policy = policies.per_layer([3.0, 4.0])
    assert [policy.sensitivity(r) for r in ("zero_out", "add_remove", "replace_one")] == [5.0, 5.0, 10.0]
    with pytest.raises(InvalidOptionError, match="relation"):
        policy.sensitivity("neighbours")
    clipper = GhostClipper(nn.Linear(2, 2), policy=policy, relation="replace_one")
    assert clipper.sensitivity() == 10.0


def test_bounds_and_groups_must_fit():
    with pytest.raises(InvalidOptionError, match="3 bounds for 2 groups"):
        GhostClipper(nn.Linear(2, 2), policy=policies.per_layer([1.0, 1.0, 1.0]))
    with pytest.raises(InvalidOptionError, match="exactly one of"):
        GhostClipper(nn.Linear(2, 2), policy=policies.flat(1.0), max_grad_norm=1.0)
    with pytest.raises(InvalidOptionError, match="exactly one of"):
        GhostClipper(nn.Linear(2, 2))


@pytest.mark.parametrize("groups", [{"w": ["weight"]}, {"w": ["*"], "v": ["bi*"]}, {"w": []}, {}])
def test_parameters_in_no_or_several_groups_are_refused(groups):
    with pytest.raises(InvalidOptionError, match="group"):
        GhostClipper(nn.Linear(2, 2), policy=policies.per_group(groups, 1.0))


def test_full_names_count_before_patterns():
    clipper = GhostClipper(nn.Linear(2, 2), policy=policies.per_group({"rest": ["*"], "w": ["weight"]}, [3.0, 4.0]))
    clipper.backward(clipper.model(torch.ones(1, 2)).mul(100).sum())
    norms = {name: float(parameter.grad.norm()) for name, parameter in clipper.model.named_parameters()}
    assert norms == pytest.approx({"weight": 4.0, "bias": 3.0}, rel=1e-3)


@pytest.mark.parametrize("constant", [0.0, -0.01, math.nan, math.inf])
def test_constants_that_would_not_bound_a_contribution_are_refused(constant):
    # C / (norm + γ) is more than C / norm for a negative γ.
    with pytest.raises(InvalidOptionError, match="gamma"):
        policies.automatic(1.0, gamma=constant)
    with pytest.raises(InvalidOptionError, match="r="):
        policies.psac(1.0, r=constant)


def test_samples_of_sums_that_were_dropped_are_not_counted():
    clipper = GhostClipper(nn.Linear(2, 1), policy=policies.adaptive(1e6, QuantileAdaptation(unclipped_num_std=1.0)))
    for rows in (5, 3):
        clipper.reset()
        clipper.backward(clipper.model(torch.ones(rows, 2)).sum())
    assert clipper.policy.adaptation.take_count() == 1.5


@pytest.mark.parametrize(("relation", "factor"), [("zero_out", 1.0), ("replace_one", 2.0)])
def test_adaptive_step_splits_its_noise_and_moves_the_bound(relation, factor):
    class Noise:
        """Adds 1 to a count, nothing to a sum, and notes what it was asked for."""

        level = "fast"

        def __init__(self):
            self.asked = []

        def add_(self, tensor, std):
            self.asked.append((tensor.numel(), std))
            tensor.add_(1.0 if tensor.dim() == 1 and tensor.numel() == 1 else 0.0)

    model, noise = nn.Linear(3, 2), Noise()
    adaptation = QuantileAdaptation(unclipped_num_std=2.5, target_unclipped_quantile=0.7)
    clipper = GhostClipper(model, policy=policies.adaptive(0.6, adaptation), relation=relation)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=2.0,
        expected_batch_size=8.0,
        clipper=clipper,
        noise_source=noise,
    )
    for _ in range(2):
        bound = clipper.max_grad_norm
        clipper.backward(model(torch.randn(6, 3)).square().sum(1))
        unclipped = int((clipper.per_sample_norms <= bound).sum())
        optimizer.step()
        left = (2.0**-2 - 5.0**-2) ** -0.5
        assert noise.asked == [
            (6, pytest.approx(left * bound * factor)),
            (2, pytest.approx(left * bound * factor)),
            (1, 2.5 * factor),
        ]
        share = 0.5 + (unclipped - 3 + 1.0) / 8.0
        assert clipper.max_grad_norm == pytest.approx(bound * math.exp(-0.2 * (share - 0.7)), rel=1e-12)
        noise.asked.clear()


def test_noise_of_sum_and_count_cost_together_what_the_step_costs():
    adaptation = QuantileAdaptation(unclipped_num_std=1.5)
    rest = adaptation.gradient_noise_multiplier(2.0)
    assert rest**-2 + (2 * 1.5) ** -2 == pytest.approx(2.0**-2, rel=1e-12)
    with pytest.raises(InvalidOptionError, match="unclipped_num_std"):
        adaptation.gradient_noise_multiplier(3.0)
