"""A check that was switched off or could not run says so: in the coverage table, the summary and one log line."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.checks.unchecked import BEHIND, FEWER, LOSSES, REPLACED, ROWS

ALL = (ROWS, REPLACED, FEWER, BEHIND, LOSSES)


def _forward(model, sizes, *, probe=True):
    """Return what is not checked after backwards with so many samples."""
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=probe) as clipper:
        for size in sizes:
            clipper.backward(model(torch.randn(size, 3)).square().flatten(1).sum(1))
        table = str(clipper.coverage())
        assert clipper.coverage().as_dict()["unchecked"] == str(clipper.unchecked)
        assert str(clipper.unchecked) in table
        return str(clipper.unchecked)


class _Fixed(nn.Linear):
    """Takes batches of five samples only."""

    def forward(self, x):
        assert len(x) == 5
        return super().forward(x)


def test_the_first_batch_of_several_is_proved_whatever_its_number():
    assert not _forward(nn.Linear(3, 4), [1, 1, 5])
    mixes = nn.Linear(3, 4)
    mixes.forward = lambda x, own=mixes.forward: own(x) / len(x)
    with pytest.raises(ghostclip.errors.SampleMixingError):
        _forward(mixes, [1, 1, 5])


def test_a_plain_backward_after_a_lone_sample_does_not_keep_its_reason():
    model = nn.Linear(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        for size in (1, 5):
            model(torch.randn(size, 3)).square().sum(1).mean().backward()
        assert not str(clipper.unchecked)


class _Noisy(nn.Module):
    def forward(self, x):
        # An order has no numbers of each sample that the others could meet as well.
        return x + torch.randperm(x.numel()).view_as(x)


class _Differentiates(nn.Linear):
    """Needs gradients in its forward."""

    def forward(self, x):
        inputs = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inputs.square().sum(), inputs)
        return super().forward(slope)


def _dropping(*others):
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(), *others)


@pytest.mark.parametrize(
    ("make", "sizes", "said"),
    [
        (lambda: nn.Linear(3, 4), [5], ""),
        (_dropping, [5], ""),
        (lambda: _Differentiates(3, 4), [5], ""),
        (lambda: nn.Linear(3, 4), [1, 0, 1], f"{', '.join(ALL)}: every batch so far had fewer than two samples"),
        (lambda: _dropping(_Noisy()), [5], f"{FEWER}: random numbers are drawn"),
        (lambda: _Fixed(3, 4), [5], f"{FEWER}: the model raised AssertionError on another batch"),
    ],
)
def test_what_could_not_run_is_said_and_why(make, sizes, said):
    assert _forward(make(), sizes) == (said and f"not checked: {said}")


def test_switched_off():
    assert _forward(nn.Linear(3, 4), [5], probe=False) == f"not checked: {', '.join(ALL)}: probe=False"


@pytest.mark.parametrize("probe", [True, False])
def test_summary_names_what_was_not_checked(probe):
    engine, model = ghostclip.PrivacyEngine(), nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        probe=probe,
    )
    for x, y in loader:
        optimizer.zero_grad()
        private.clipper.backward(nn.functional.cross_entropy(private(x), y, reduction="none"))
        optimizer.step()
    assert ("not checked: " in engine.summary(1e-5)) is not probe
    assert ("probe=False" in engine.summary(1e-5)) is not probe


class _Centres(nn.Linear):
    """Subtracts the share of samples with like signs, which no gradient tells, nor larger copies or negative ones."""

    def forward(self, x):
        return super().forward(x - (x * x.roll(1, 1) > 0).to(x).mean(0))


@pytest.mark.parametrize("copies", [1, 3])
def test_forwards_of_copies_are_asked_and_prove_nothing(copies):
    """However many come first, the first one of several records is proved."""
    with ghostclip.GhostClipper(_Centres(3, 4), max_grad_norm=0.1) as clipper:
        clipper.note_copies(lambda size: 1)
        for _ in range(copies):
            x = torch.randn(1, 3).expand(5, 3).clone()
            clipper.backward(clipper.model(x).square().sum(1))
        assert str(clipper.unchecked) == f"not checked: {', '.join(ALL)}: every batch so far had fewer than two samples"
        clipper.note_copies(None)
        with pytest.raises(ghostclip.errors.SampleMixingError, match="half of the samples were replaced"):
            clipper.model(torch.randn(5, 3))
