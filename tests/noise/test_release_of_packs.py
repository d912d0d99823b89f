"""Noise and division in one go: the same numbers as one after the other, by one thread or by several."""

from __future__ import annotations

import threading

import pytest
import torch

from ghostclip.noise import FastNoise, make_noise_source
from ghostclip.noise.keyed import BLOCK, add_noise_

SHAPES = ((7, 5), (BLOCK,), (2 * BLOCK + 3,), (), (BLOCK - 1,), (2, 0), (3 * BLOCK, 2), (11,))


def twin(source):
    other = make_noise_source(level=source.level)
    other.load_state_dict(source.state_dict())
    return other


def sums(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [*made, torch.randn(70, 900, generator=generator, dtype=dtype).t()]


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
