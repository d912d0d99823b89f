"""Noise for many tensors at once: every element has its own, and nothing that changed `add_` is passed over."""

from __future__ import annotations

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
