"""What noise costs on a GPU: launches and bytes a value, counted without one, and no copies from or to the host."""

from __future__ import annotations

import pytest
import torch

from ghostclip import kernels
from ghostclip.kernels.noise import FAST_ROUNDS, SECURE_ROUNDS
from ghostclip.noise import FastNoise, SecureNoise, continuous
from ghostclip.noise.keyed import add_noise_
from tests.traffic import GPU, counted

MATRICES = [(1280, 5120), (5120, 1280), (1280, 3840), (50257, 1280)]
VECTORS = [(1280,), (5120,), (3840,)] * 4


@pytest.fixture(autouse=True)
def no_generator(monkeypatch):
    """A generator of a GPU cannot be made without one."""
    monkeypatch.setattr(continuous, "_device_generator", lambda device, seed: None)


def _sums(dtype=torch.float32):
    sums = [torch.empty(shape, device=GPU, dtype=dtype) for shape in (*MATRICES, *VECTORS)]
    return sums, sum(tensor.numel() for tensor in sums)


def test_plain_fast_noise_moves_half_of_what_it_did():
    """Four read and write in float64, and a block takes one generation, one sum, one divisor and one division."""
    source = FastNoise()
    with counted() as traffic:
        sums, values = _sums()
        add_noise_(source, sums, 1.0, 64.0)
    assert traffic.bytes / values < 32.5
    assert traffic.peak <= 8 * continuous.GPU_BLOCK
    assert traffic.launches <= 4 * (values // continuous.GPU_BLOCK + len(MATRICES) + 1) + 3
    assert not traffic.reads


@pytest.fixture
def launched(monkeypatch):
    """Kernels are switched on, and noted where they would start; their one read and write is counted as a sum's."""
    found = []

    def kernel(part_N, state, scales, extent, stream):
        found.append((part_N.numel(), extent, stream))
        return part_N.add_(1.0)

    monkeypatch.setattr(kernels.Twins, "pick", lambda self, *tensors, **options: kernel)
    monkeypatch.setattr(continuous.runtime, "installed", lambda: True)
    with kernels.using("on"):
        yield found


@pytest.mark.parametrize(("kind", "rounds"), [(FastNoise, FAST_ROUNDS), (SecureNoise, SECURE_ROUNDS)])
def test_the_kernel_reads_and_writes_every_value_once(launched, kind, rounds):
    source = kind()
    with counted() as traffic:
        sums, values = _sums()
        add_noise_(source, sums, 1.0, 64.0)
    assert sum(count for count, *_ in launched) == values
    assert len(launched) <= len(sums)
    assert {stream[1] for *_, stream in launched} == {rounds}
    # Small ones are put together before, and taken apart after it.
    assert traffic.bytes / values < 8.1
    assert traffic.launches <= len(sums)
    assert not traffic.reads


def test_the_state_says_where_noise_comes_from(monkeypatch):
    monkeypatch.setattr(continuous.runtime, "installed", lambda: True)
    with kernels.using("off"):
        plain = FastNoise()
    with kernels.using("auto"):
        source = FastNoise()
        before = source.fingerprint()
        source.load_state_dict(plain.state_dict())
    assert plain.state_dict()["stream"] == "device"
    assert source.state_dict() == plain.state_dict()
    assert before != source.fingerprint()
    state = plain.state_dict()
    del state["stream"]
    source.load_state_dict(state)
    assert source.state_dict()["stream"] == "device"
    with pytest.raises(continuous.ResumeError, match="stream 'other'"):
        source.load_state_dict({**state, "stream": "other"})
