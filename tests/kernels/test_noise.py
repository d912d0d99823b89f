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


def _arguments(count, *, offset=0, total=None, block=32, dtype=torch.float32, rounds=20, divisor=3.0):
    state = noise.chacha_state(KEY, 2**40 + 3)
    return torch.randn(count).to(dtype), state, (2.0, divisor), (offset, total or count), (block, rounds)


@pytest.mark.parametrize(
    ("key", "nonce", "counter", "expected"),
    [
        # Section 2.3.2.
        (
            bytes(range(32)),
            "000000090000004a00000000",
            1,
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        ),
        # Appendix A.1, vectors 1 and 5.
        (
            bytes(32),
            "000000000000000000000000",
            0,
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
        (
            bytes(32),
            "000000000000000000000002",
            0,
            "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
            "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
        ),
    ],
)
def test_key_streams_of_the_standard(key, nonce, counter, expected):
    """RFC 8439; each is one of two streams that are made at once."""
    given = bytes.fromhex(nonce)
    state = noise.chacha_state(key, 0)
    first, *middle = (int.from_bytes(given[start : start + 4], "little") for start in (8, 0, 4))
    state[13:15] = middle
    words = noise.chacha_words(state, streams=[first ^ 5, first], count=8 * (counter + 1), device=CPU)
    got = words[1, 8 * counter :].view(torch.uint8).numpy().tobytes()
    assert got == bytes.fromhex(expected)


def test_twin_draws_the_noise_of_level_secure():
    from ghostclip.noise import SecureNoise

    source = SecureNoise()
    expected = torch.randn(noise.BLOCK + 77)
    got = expected.clone()
    source.add_(torch.zeros(1), 1.0)
    position = source.state_dict()["position"]
    key = hashlib.shake_256(b"chacha20 noise key" + bytes.fromhex(source.state_dict()["key"])).digest(32)
    source.release_all_([expected], 1.5, 7.3)
    _add(got, key=key, position=position, scales=(1.5, 7.3))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("count", "dtype", "options"),
    [
        (0, torch.float32, {}),
        (1, torch.float32, {}),
        (81, torch.float32, {}),
        (63, torch.float64, {}),
        (112, torch.float32, {"rounds": 8}),
        (48, torch.float32, {"divisor": 1.0, "rounds": 8}),
    ],
    ids=str,
)
def test_kernel_draws_the_noise_of_the_twin(fast, count, dtype, options):
    arguments = _arguments(count, dtype=dtype, **options)
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
