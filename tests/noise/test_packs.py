"""Noise for many tensors at once: each element has its own, by any threads; what changed `add_` is not passed over."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from ghostclip.noise import FastNoise, make_noise_source
from ghostclip.noise.keyed import BLOCK, add_noise_, draws_at_once

SHAPES = ((), (3,), (BLOCK - 1,), (5, 7), (2, 0), (BLOCK,), (2 * BLOCK + 3,), (63, 61), (1,))


def twin(source):
    other = make_noise_source(level=source.level)
    other.load_state_dict(source.state_dict())
    return other


def zeros(dtype=torch.float64):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("level", ["fast", "secure"])
def test_no_element_goes_without_noise_or_shares_it(level):
    source, values = make_noise_source(level=level), []
    for _ in range(2):
        tensors = zeros()
        source.release_all_(tensors, 2.0)
        assert [t.shape for t in tensors] == [torch.Size(shape) for shape in SHAPES]
        values += [t.flatten() for t in tensors]
    drawn = torch.cat(values)
    assert (drawn != 0).all()
    assert drawn.unique().numel() == drawn.numel()
    assert drawn.std().item() == pytest.approx(2.0, rel=0.02)
    small = torch.stack([torch.cat(values[9 * call : 9 * call + 4])[: BLOCK - 100] for call in (0, 1)])
    assert abs((small[0] * small[1]).mean()) < 6 * 4 / BLOCK**0.5


def test_noise_is_added_in_place_in_any_layout_and_type():
    source = make_noise_source()
    copy = twin(source)
    base = torch.arange(12.0).view(3, 4)
    mixed = [base.t(), torch.full((5,), 7.0, dtype=torch.float64), torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)]
    noise = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in mixed]
    before = [t.clone() for t in mixed]
    copy.release_all_(noise, 0.5)
    source.release_all_(mixed, 0.5)
    for got, start, added in zip(mixed, before, noise, strict=True):
        torch.testing.assert_close(got, start + added)
    assert not torch.equal(base, torch.arange(12.0).view(3, 4))


class Doubled(FastNoise):
    """Knows of `add_` alone."""

    def add_(self, tensor, std):
        super().add_(tensor, 2 * std)


class Both(Doubled):
    """Says what both do."""

    add_ = Doubled.add_

    def release_all_(self, tensors, std, divisor=1.0):
        super().release_all_(tensors, 3 * std, divisor)


def test_what_replaces_add_is_not_passed_over(monkeypatch):
    for level in ("fast", "secure", "exact"):
        assert draws_at_once(make_noise_source(level=level))
    assert not draws_at_once(Doubled())
    assert draws_at_once(Both())
    with mock.patch.object(FastNoise, "add_", autospec=True):
        assert not draws_at_once(FastNoise())
    source, asked = FastNoise(), []
    monkeypatch.setattr(source, "add_", lambda tensor, std: asked.append((tensor.numel(), std)))
    add_noise_(source, [torch.zeros(3), torch.zeros(2)], 1.5)
    assert asked == [(3, 1.5), (2, 1.5)]
    wide = [torch.zeros(4000), torch.zeros(4000)]
    add_noise_(Doubled(), wide, 1.0)
    assert torch.cat(wide).std().item() == pytest.approx(2.0, rel=0.05)


def sums():
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [*made, torch.randn(70, 900, generator=generator).t()]


@pytest.mark.parametrize("std", [0.0, 0.7])
@pytest.mark.parametrize("level", ["fast", "secure"])
def test_division_rounds_the_noisy_sum(level, std):
    source = make_noise_source(level=level)
    copy = twin(source)
    at_once, one_by_one = sums(), sums()
    add_noise_(source, at_once, std, 7.3)
    copy.release_all_(one_by_one, std)
    assert all(torch.equal(a, b / 7.3) for a, b in zip(at_once, one_by_one, strict=True))
    assert source.fingerprint() == copy.fingerprint()


def test_any_number_of_threads_draws_the_same(monkeypatch):
    source = FastNoise()
    copy = twin(source)
    seen, add, second = set(), copy._add, threading.Event()

    def watched(*arguments):
        seen.add(threading.get_ident())
        if len(seen) > 1:
            second.set()
        # A quick thread could do it all before another has started.
        second.wait(60)
        assert not torch.is_grad_enabled()
        add(*arguments)

    monkeypatch.setattr(copy, "_workers", lambda tensors: 3)
    monkeypatch.setattr(copy, "_add", watched)
    alone, together = sums(), sums()
    before = threading.active_count()
    source.release_all_(alone, 1.3, 7.3)
    copy.release_all_(together, 1.3, 7.3)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert len(seen) > 1
    assert threading.active_count() == before
    assert source.fingerprint() == copy.fingerprint()
