"""Noise of the kernel and of its twin: the published key stream, addresses, tails, and agreement of both."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from ghostclip import kernels
from ghostclip.errors import InvalidOptionError
from ghostclip.kernels import noise

KEY = bytes(range(32))
CPU = torch.device("cpu")
# Words of radii whose values lie far out, and in the middle: uniform of 2^-64, of 2^-63·1.5, of about 2^-25, of 1/2, 1.
TAIL_WORDS = [0, 1, 2**38, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1, 5]


def _add(part, **options):
    given = {"key": KEY, "position": 7, "scales": (1.0, 1.0), **options}
    return kernels.add_noise_(part, **given)


def _arguments(count, *, offset=0, total=None, block=32, dtype=torch.float32):
    state = noise.chacha_state(KEY, 2**40 + 3)
    return torch.randn(count).to(dtype), state, (2.0, 3.0), (offset, total or count), block


def test_key_stream_of_the_standard():
    """RFC 8439, section 2.3.2."""
    state = noise.chacha_state(KEY, 0)
    state[13:15] = [0x09000000, 0x4A000000]
    words = noise.chacha_words(state, stream=0, count=16, device=CPU)
    expected = "10f1e7e4 d13b5915 500fdd1f a32071c4 c7d1f4c7 33c06803 0422aa9a c3d46c4e"
    expected += " d2826446 079faa09 14c2d705 d98b02a2 b5129cd1 de164eb9 cbd083e8 a2503c4e"
    want = [int.from_bytes(bytes.fromhex(word), "little") for word in expected.split()]
    got = words[8:].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    assert got.tolist() == want


def test_twin_draws_the_noise_of_level_secure():
    from ghostclip.noise import SecureNoise

    source = SecureNoise()
    expected = torch.randn(noise.BLOCK + 77)
    got = expected.clone()
    source.add_(torch.zeros(1), 1.0)
    position = source.state_dict()["position"]
    key = hashlib.shake_256(b"chacha20 noise key" + bytes.fromhex(source.state_dict()["key"])).digest(32)
    source.add_(expected, 1.5)
    _add(got, key=key, position=position, scales=(1.5, 1.0))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, torch.float32), (1, torch.float32), (81, torch.float32), (63, torch.float64)], ids=str
)
def test_kernel_draws_the_noise_of_the_twin(fast, count, dtype):
    arguments = _arguments(count, dtype=dtype)
    expected = noise._naive(arguments[0].clone(), *arguments[1:])
    got = fast("add_noise_", *arguments)
    assert got.dtype == dtype
    # Both round once from float64 values that differ by a few of its last places.
    torch.testing.assert_close(got, expected, rtol=1e-13 if dtype == torch.float64 else 1e-7, atol=0)


@pytest.mark.parametrize(("offset", "count"), [(30, 50), (79, 1)])
def test_kernel_draws_a_part(fast, offset, count):
    arguments = _arguments(count, offset=offset, total=80)
    expected = noise._naive(arguments[0].clone(), *arguments[1:])
    torch.testing.assert_close(fast("add_noise_", *arguments), expected, rtol=1e-7, atol=0)


def test_parts_make_the_whole():
    whole = _add(torch.zeros(100_000))
    parts = [
        _add(torch.zeros(stop - start), extent=(start, 100_000))
        for start, stop in ((0, 10), (10, 40_000), (40_000, 100_000))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_every_address_has_its_own_noise():
    drawn = [
        _add(torch.zeros(2000), position=1),
        _add(torch.zeros(2000), position=2),
        _add(torch.zeros(2000), position=1 + 2**32),
        _add(torch.zeros(2000), key=bytes(32), position=1),
        _add(torch.zeros(2000), position=1, extent=(noise.BLOCK, noise.BLOCK + 2000)),
    ]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(5)
    assert correlation.abs().max() < 5 / math.sqrt(2000)


def test_sum_noise_and_divisor():
    given = torch.randn(50_001)
    noisy = _add(given.clone(), scales=(2.0, 1.0))
    standard = (noisy - given) / 2
    assert abs(standard.mean().item()) < 5 / math.sqrt(50_001)
    assert abs(standard.square().mean().item() - 1) < 5 * math.sqrt(2 / 50_001)
    torch.testing.assert_close(_add(given.clone(), scales=(2.0, 4.0)), noisy / 4)
    torch.testing.assert_close(_add(given.clone(), scales=(0.0, 4.0)), given / 4)


def _tails(pair):
    radius = torch.tensor(TAIL_WORDS)
    angle = torch.arange(8) * 2**60 - 2**62
    cosine, sine = pair(radius, angle)
    length = (cosine.square() + sine.square()).sqrt()
    uniform = [((word % 2**63) + 0.5) / 2**63 for word in TAIL_WORDS]
    expected = torch.tensor([math.sqrt(-2 * math.log(u)) if u < 1 else 0.0 for u in uniform], dtype=torch.float64)
    torch.testing.assert_close(length, expected, rtol=1e-12, atol=1e-9)
    assert length.max() > 9.4
    turn = torch.atan2(sine, cosine)[:4]
    torch.testing.assert_close(turn, (angle[:4].double() * (math.pi * 2.0**-63)))


def test_tails_of_the_twin():
    """No cut at 5.77, where a 24-bit uniform ends: the smallest uniforms give 9.4."""
    _tails(noise.normal_pairs)


def test_tails_of_the_kernel(fast):
    _tails(lambda radius, angle: fast("normal_pair", radius, angle))


@pytest.mark.parametrize("scale", [1.0, 4.0, 5.0])
def test_share_beyond_a_threshold(scale):
    """Radii beyond the thresholds occur as often as they should, from stratified words."""
    count = 2**20
    radius = torch.arange(count) * (2**63 // count) + 2**62 // count
    cosine, sine = noise.normal_pairs(radius, torch.zeros_like(radius))
    share = ((cosine.square() + sine.square()).sqrt() > scale).double().mean().item()
    assert share == pytest.approx(math.exp(-scale * scale / 2), abs=2 / count)


@pytest.mark.parametrize(
    ("part", "options", "match"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "int64"),
        (torch.zeros(3, 3).t()[:2], {}, "contiguous"),
        (torch.zeros(3), {"key": b"short"}, "5 bytes"),
        (torch.zeros(3), {"position": -1}, "position=-1"),
        (torch.zeros(3), {"extent": (1, 3)}, "offset=1"),
        (torch.zeros(3), {"scales": (-1.0, 1.0)}, "std"),
        (torch.zeros(3), {"scales": (1.0, 0.0)}, "divisor"),
    ],
)
def test_wrong_input(part, options, match):
    with pytest.raises(InvalidOptionError, match=match):
        _add(part, **options)
