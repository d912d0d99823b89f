"""Noise by address: any part of a tensor gets its part of the noise, from key streams as their standards say."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from ghostclip.errors import InvalidOptionError
from ghostclip.noise import ExactNoise, SecureNoise, keyed, make_noise_source
from ghostclip.noise.keyed import BLOCK, MAX_BLOCKS, Block
from ghostclip.noise.keys import RandomKey

LEVELS = ("fast", "secure", "exact")


def zeros(level, *shape):
    return torch.zeros(*shape, dtype=torch.int64 if level == "exact" else torch.float64)


def twin(source):
    other = make_noise_source(level=source.level)
    other.load_state_dict(source.state_dict())
    return other


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cuts", [(0, 1), (BLOCK - 1, BLOCK, BLOCK + 3), (7, 7, 2 * BLOCK + 1)])
def test_shards_make_up_the_whole(level, cuts):
    total, source = 2 * BLOCK + 500, make_noise_source(level=level)
    copies = [twin(source) for _ in range(len(cuts) + 1)]
    whole = zeros(level, total)
    source.add_(whole, 9.0)
    following = zeros(level, 3)
    source.add_(following, 9.0)
    limits = [0, *cuts, total]
    for copy, start, stop in zip(copies, limits[:-1], limits[1:], strict=True):
        shard = zeros(level, stop - start)
        copy.add_shard_(shard, 9.0, offset=start, total=total)
        assert torch.equal(shard, whole[start:stop])
        after = zeros(level, 3)
        copy.add_(after, 9.0)
        assert torch.equal(after, following)


@pytest.mark.parametrize("level", LEVELS)
def test_skipping_and_renewing(level):
    source = make_noise_source(level=level)
    copy, branch = twin(source), twin(source)
    first, second, skipped, renewed = (zeros(level, 50) for _ in range(4))
    source.add_(first, 99.0)
    source.add_(second, 99.0)
    copy.skip()
    assert copy.fingerprint() != source.fingerprint()
    copy.add_(skipped, 99.0)
    assert copy.fingerprint() == source.fingerprint()
    assert torch.equal(skipped, second)
    branch.renew_key()
    branch.add_(renewed, 99.0)
    assert (renewed == first).sum() <= 3
    assert branch.fingerprint() != copy.fingerprint()
    assert source.state_dict()["key"] not in source.fingerprint()


def test_refuses_ranges():
    for offset, total in ((-1, 9), (5, 9), (0, 4)):
        with pytest.raises(InvalidOptionError, match="offset"):
            SecureNoise().add_shard_(torch.zeros(5), 1.0, offset=offset, total=total)


@pytest.fixture(params=["package", "twin"])
def maker(request, monkeypatch):
    """The key stream by the package and by its plain twin."""
    if request.param == "twin":
        monkeypatch.setattr(keyed, "_ciphers", lambda: None)
    else:
        pytest.importorskip("cryptography")


def test_key_stream_is_uniform_and_addressed(maker):
    key = RandomKey("test")
    key.load("00112233445566778899aabbccddeeff")

    def words(position, number, part, count):
        return keyed.words_of(key, Block(position, number, count), part=part, count=count)

    one = words(1, 2, 3, 20_000)
    assert one.flags.writeable
    assert (words(1, 2, 3, 5) == one[:5]).all()
    assert stats.kstest(one / 2.0**64, "uniform").pvalue > 1e-4
    bits = (one[:, None] >> torch.arange(64).numpy().astype("uint64")) & 1
    assert abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    for position, block, part in ((0, 2, 3), (1, 1, 3), (1, 2, 4), (1, 3, 2), (2**64 - 1, MAX_BLOCKS - 1, 255)):
        assert not set(words(position, block, part, 99).tolist()) & set(one[:99].tolist())
    with pytest.raises(InvalidOptionError, match="block"):
        words(0, MAX_BLOCKS, 0, 1)
    key.renew()
    assert (words(1, 2, 3, 9) != one[:9]).any()


@pytest.mark.parametrize("source_type", [SecureNoise, ExactNoise])
def test_noise_is_the_same_without_the_package(source_type, monkeypatch):
    """A run that begins on one machine goes on, bit for bit, on one without the package."""
    pytest.importorskip("cryptography")
    source = source_type()
    resumed, expected, values = twin(source), zeros(source.level, 40), zeros(source.level, 40)
    source.add_(expected, 5.0)
    monkeypatch.setattr(keyed, "_ciphers", lambda: None)
    resumed.add_(values, 5.0)
    assert torch.equal(values, expected)
