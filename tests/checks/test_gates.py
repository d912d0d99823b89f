"""Samples that are mixed behind a factor that is zero at first: refused before the factor is anything else."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.checks.independence import OpenGates
from ghostclip.errors import BatchAxisError, SampleMixingError


class _Gated(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(3, 4), nn.Linear(4, 2), way
        self.gate = nn.Parameter(torch.zeros(()))
        self.ones = nn.Parameter(torch.ones(()))
        self.projection = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.projection.weight)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(()))
        self.plain, self.number = torch.zeros(()), 0.0

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(self.way(self, h, h.mean(0, keepdim=True)))


MIXING = {
    "gate": lambda m, h, mean: h + m.gate * (h - mean),
    "gate at one": lambda m, h, mean: h + (1 - m.ones) * (h - mean),
    "gate without gradient": lambda m, h, mean: h + m.gate * (h - mean.detach()),
    "projection": lambda m, h, mean: h + m.projection(mean.expand_as(h)),
    "buffer": lambda m, h, mean: h + m.scale * mean,
    "buffer as a switch": lambda m, h, mean: torch.where(m.scale > 0, h - mean, h),
    "tensor": lambda m, h, mean: h + m.plain * mean,
    "number": lambda m, h, mean: h + m.number * mean,
    "number without gradient": lambda m, h, mean: h - m.number * mean.detach(),
    "one less a number": lambda m, h, mean: (1.0 - m.number) * h + m.number * mean,
    "weight of a mean": lambda m, h, mean: torch.lerp(h, mean.expand_as(h), m.number),
    "alpha": lambda m, h, mean: torch.add(h, mean, alpha=m.number),
    "second after first": lambda m, h, mean: h + m.gate * h[0].detach() * torch.eye(len(h))[:, 1:2].to(h),
    "mixup": lambda m, h, mean: (1.0 - m.number) * h + m.number * h.roll(1, 0),
    "new tensor": lambda m, h, mean: h + torch.tensor(m.number, dtype=h.dtype) * mean,
}
APART = {
    "gate": lambda m, h, mean: h + m.gate * h.mean(1, keepdim=True),
    "projection": lambda m, h, mean: h + m.projection(h),
    "number": lambda m, h, mean: h + m.number * h.mean(1, keepdim=True),
    "a zero of its kind": lambda m, h, mean: h + mean.sum() * 0,
    "beta of what was never set": lambda m, h, mean: torch.addmm(
        torch.full_like(h, float("nan")), h, torch.eye(4, dtype=h.dtype), beta=0.0
    ),
    "written": lambda m, h, mean: h + m.seen.add_(1) * 0 + m.scale.mul_(2),
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, torch.float32) for way in MIXING.values()),
        *((MIXING[name], dtype) for name in ("gate", "number") for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_mixing_behind_a_closed_gate_is_refused_in_the_first_forward(way, dtype):
    model = _Gated(way).to(dtype)
    with (
        ghostclip.GhostClipper(model, max_grad_norm=0.1),
        # Rows that are rolled are followed, whatever they are multiplied by.
        pytest.raises((SampleMixingError, BatchAxisError), match=r"every gate was open|in another order"),
    ):
        model(torch.randn(5, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("way", APART.values(), ids=APART)
def test_samples_apart_behind_one_are_not(way, dtype):
    model = _Gated(way).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward(model(torch.randn(5, 3, dtype=dtype)).square().sum(1))
        assert not str(clipper.unchecked)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


class _Scaled(nn.Module):
    def __init__(self, way, takes):
        super().__init__()
        self.first = nn.Embedding(11, 6) if takes == "ids" else nn.Linear(6, 6)
        self.last, self.way = nn.Linear(6, 2), way
        if takes == "ids":
            nn.init.constant_(self.first.weight[0], 3.0)

    def forward(self, x):
        return self.last(self.way(self.first(x))).mean(1)


# What only the largest value of the batch decides: here no batch tells it, as each sample has the largest one, or none
# is large enough.
BY_THE_LARGEST = {
    "one scale": lambda h: h / h.detach().abs().amax(),
    "one range": lambda h: torch.fake_quantize_per_tensor_affine(h, float(h.detach().abs().max()) / 127, 0, -128, 127),
    "a threshold": lambda h: h / 2 if h.detach().abs().max() > 5 else h,
}
BY_ITSELF = {
    "its own scale": lambda h: h / h.detach().abs().amax((1, 2), keepdim=True),
    "its own threshold": lambda h: torch.where(h.detach().abs().amax((1, 2), keepdim=True) > 5, h / 2, h),
    "its own scale, where all are small": lambda h: _small(h) / h.detach().abs().amax((1, 2), keepdim=True),
}


def _small(h):
    assert h.abs().max() < 5
    return h


def _of(takes):
    if takes == "values":
        return torch.rand(6, 4, 6).clamp(max=0.5) + torch.tensor([0.5, 0, 0, 0, 0, 0])
    ids = torch.randint(1, 11, (6, 4))
    ids[:, 0] = 0
    return ids


@pytest.mark.parametrize("takes", ["ids", "values"])
@pytest.mark.parametrize("way", BY_THE_LARGEST.values(), ids=BY_THE_LARGEST)
def test_what_the_largest_value_of_a_batch_decides_is_refused_in_the_first_forward(way, takes):
    model = _Scaled(way, takes)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError):
        model(_of(takes))


@pytest.mark.parametrize("takes", ["ids", "values"])
@pytest.mark.parametrize("way", BY_ITSELF.values(), ids=BY_ITSELF)
def test_what_the_largest_value_of_a_sample_decides_is_not(way, takes):
    model = _Scaled(way, takes)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward(model(_of(takes)).square().sum(1))
        assert not str(clipper.unchecked)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_numbers_that_all_samples_share_are_not_taken_for_those_of_a_few(count):
    class Weighed(nn.Linear):
        def forward(self, x, weights):
            return super().forward(x) * weights

    model = Weighed(6, count)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward(model(torch.randn(8, 6), torch.arange(1.0, count + 1)).square().sum(1))
        assert not str(clipper.unchecked)


def test_a_model_that_cannot_run_with_other_values_says_so():
    def strict(m, h, mean):
        assert float(m.scale) == 0
        return h + m.scale * h

    model = _Gated(strict)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward(model(torch.randn(5, 3)).square().sum(1))
        assert "batch independence (behind closed gates): the model raised AssertionError" in str(clipper.unchecked)
    assert float(model.scale) == 0


def test_gates_are_closed_again_and_graphs_do_not_notice():
    model = _Gated(APART["gate"])
    x = torch.randn(5, 3)
    loss = model(x).sum()
    held = {
        name: (tensor.detach().clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    with OpenGates(model):
        assert float(model.gate.detach()) != 0
        assert float(model.ones.detach()) > 1
        assert float(model.projection.weight.detach().std()) > 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(held[name][0], tensor)
        assert held[name][1] == tensor._version
    loss.backward()
