"""Noise by address: any part of a tensor gets its part of the noise, from key streams as their standards say."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from scipy import stats

from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.noise import ExactNoise, RandomKey, SecureNoise, make_noise_source
from ghostclip.noise.keyed import BLOCK
from ghostclip.noise.keystream import KEYSTREAMS, MAX_BLOCKS, make_keystream

LEVELS = ("fast", "secure", "exact")


def zeros(level, *shape):
    return torch.zeros(*shape, dtype=torch.int64 if level == "exact" else torch.float64)


def twin(source):
    other = make_noise_source(level=source.level)
    other.load_state_dict(source.state_dict())
    return other


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "cuts", [(0, 1), (1,), (BLOCK - 1, BLOCK, BLOCK + 3), (7, 7, 2 * BLOCK + 1), (2 * BLOCK + 500,)]
)
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
def test_blocks_and_calls_share_no_noise(level):
    source = make_noise_source(level=level)
    calls = [zeros(level, 3 * BLOCK) for _ in range(2)]
    for call in calls:
        source.add_(call, 2.0**30)
    blocks = torch.cat(calls).view(-1, BLOCK).double() / 2.0**30
    correlation = (blocks @ blocks.T / BLOCK - torch.eye(6)).abs()
    assert correlation.max() < 6 * (2 / BLOCK) ** 0.5
    assert blocks.unique().numel() > 0.999 * blocks.numel()


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


def test_chacha20_is_the_standard_one():
    """RFC 8439, 2.3.2: key 00..1f, nonce 000000090000004a00000000, the block with counter 1."""
    stream = make_keystream("chacha20", RandomKey("test"))
    stream._cipher_key = bytes(range(32))
    position = int.from_bytes(bytes.fromhex("000000090000004a"), "little")
    words = stream.words(position, block=0, part=0, count=16)
    assert words.tobytes()[64:].hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("name", KEYSTREAMS)
def test_key_streams_are_uniform_and_addressed(name):
    key = RandomKey("test")
    key.load("00112233445566778899aabbccddeeff")
    stream = make_keystream(name, key)
    one = stream.words(1, block=2, part=3, count=20_000)
    assert one.flags.writeable
    assert (stream.words(1, block=2, part=3, count=5) == one[:5]).all()
    assert stats.kstest(one / 2.0**64, "uniform").pvalue > 1e-4
    bits = (one[:, None] >> torch.arange(64).numpy().astype("uint64")) & 1
    assert abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    for position, block, part in ((0, 2, 3), (1, 1, 3), (1, 2, 4), (1, 3, 2), (2**64 - 1, MAX_BLOCKS - 1, 255)):
        assert not set(stream.words(position, block=block, part=part, count=99).tolist()) & set(one[:99].tolist())
    with pytest.raises(InvalidOptionError, match="block"):
        stream.words(0, block=MAX_BLOCKS, part=0, count=1)
    other = make_keystream(name, RandomKey("test"))
    assert (other.words(1, block=2, part=3, count=9) != one[:9]).any()


@pytest.mark.parametrize("source_type", [SecureNoise, ExactNoise])
def test_without_the_package_noise_comes_from_shake(source_type, monkeypatch):
    saved = source_type().state_dict()
    assert saved["keystream"] == "chacha20"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plain = source_type()
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["keystream"] == "shake128"
    with pytest.raises(ResumeError, match=r"ghostclip\[secure\]"):
        plain.load_state_dict(saved)
    expected = zeros(plain.level, 40)
    plain.add_(expected, 5.0)
    monkeypatch.undo()
    resumed, values = source_type(), zeros(plain.level, 40)
    resumed.load_state_dict(state)
    resumed.add_(values, 5.0)
    assert torch.equal(values, expected)
