"""Noise: right moments and tails at every level, never the same twice, the same on resume."""

from __future__ import annotations

import io
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from ghostclip import kernels
from ghostclip.errors import FixedSeedWarning, InvalidOptionError, ResumeError
from ghostclip.noise import FastNoise, SecureNoise, continuous, make_noise_source

DRAWS = 200_000
LEVELS = ("fast", "secure")
"""Those of continuous noise."""


def seeded(number=11):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return FastNoise(seed=number)


def repeatable(level):
    """A source that draws the same in every run of the tests, so that a statistical bound cannot fail by chance."""
    source = make_noise_source(level=level)
    source.load_state_dict({**source.state_dict(), "key": "0123456789abcdef0123456789abcdef"})
    return source


def drawn(source, *shape, std=1.0, **options):
    tensor = torch.zeros(*shape, **options)
    source.add_(tensor, std)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_moments_and_shape_of_the_distribution(level, dtype, device):
    values = drawn(repeatable(level), DRAWS, std=3.0, dtype=dtype, device=device).double().cpu().numpy() / 3.0
    assert abs(values.mean()) < 4.5 / math.sqrt(DRAWS)
    assert abs(values.var() - 1) < 4.5 * math.sqrt(2 / DRAWS)
    assert abs((values**4).mean() - 3) < 4.5 * math.sqrt(96 / DRAWS)
    if dtype in {torch.float64, torch.float32}:
        assert stats.kstest(values, "norm").pvalue > 1e-4
        beyond_four = int((np.abs(values) > 4).sum())
        assert 1 <= beyond_four <= 35


def test_fast_noise_goes_beyond_the_cut_of_a_float32_generator(monkeypatch):
    """Conditioned on a state of the bit generator that leads into the far tail: chance would take 1e9 draws."""
    bits = np.random.SFC64(0)
    state = bits.state
    words = [14719570192965289060, 3727173880744262043, 7784108895711134484, 1]
    state["state"]["state"] = np.array(words, dtype=np.uint64)
    bits.state = state
    monkeypatch.setattr(continuous, "_generator", lambda key, block: np.random.Generator(bits))
    float32_cut = math.sqrt(2 * 24 * math.log(2))
    value = drawn(FastNoise(), 1).item()
    assert value == pytest.approx(-6.3297381)
    assert value < -float32_cut


@pytest.mark.parametrize("level", LEVELS)
def test_global_seeds_do_not_fix_it(level):
    values = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        before = torch.get_rng_state()
        values.append(drawn(make_noise_source(level=level), 100))
        assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(*values)


@pytest.mark.parametrize("level", LEVELS)
def test_resume_continues_exactly(level, device):
    source = make_noise_source(level=level)
    drawn(source, 1000, device=device)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    expected = [drawn(source, 777, device=device), drawn(source, 3, 5, device=device)]
    resumed = make_noise_source(level=level)
    for _ in range(3):
        drawn(resumed, 10, device=device)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for tensor in expected:
        assert torch.equal(drawn(resumed, *tensor.shape, device=device), tensor)


def test_an_explicit_seed_or_generator_repeats_and_warns(device):
    with pytest.warns(FixedSeedWarning, match="explicit seed"):
        source = FastNoise(seed=11)
    assert torch.equal(drawn(source, 9, device=device), drawn(seeded(11), 9, device=device))
    assert not torch.equal(drawn(seeded(11), 9, device=device), drawn(seeded(12), 9, device=device))
    with pytest.warns(FixedSeedWarning, match="explicit generator"):
        first, second = (make_noise_source(generator=torch.Generator(device).manual_seed(1)) for _ in range(2))
    assert torch.equal(drawn(first, 9), drawn(second, 9))


def following(generator):
    """A source that follows a generator; its warning is tested elsewhere."""
    with pytest.warns(FixedSeedWarning, match="explicit generator"):
        return make_noise_source(generator=generator)


def test_a_generator_that_is_seeded_later_is_followed():
    generator = torch.Generator().manual_seed(1)
    source = following(generator)
    untouched = drawn(source, 9)
    for seed in (2, 3):
        generator.manual_seed(seed)
        found = [drawn(source, 9), drawn(source, 4)]
        other = following(torch.Generator().manual_seed(seed))
        assert torch.equal(found[0], drawn(other, 9))
        assert torch.equal(found[1], drawn(other, 4))
        assert not torch.equal(found[0], untouched)
    # Whoever draws from it changes it too.
    torch.rand(1, generator=generator)
    assert source.fingerprint() != other.fingerprint()


def test_a_generator_put_back_repeats_noise_and_warns():
    generator = torch.Generator().manual_seed(1)
    source = following(generator)
    first = drawn(source, 9)
    generator.manual_seed(1)
    with pytest.warns(FixedSeedWarning, match="their difference has none"):
        assert torch.equal(drawn(source, 9), first)


@pytest.mark.parametrize(
    "draw",
    [
        lambda source, tensors: source.release_all_(tensors, 1.0, 2.0),
        lambda source, tensors: source.release_all_(tensors, 1.0),
        lambda source, tensors: [source.add_shard_(one, 1.0, offset=0, total=one.numel()) for one in tensors],
        lambda source, tensors: (source.skip(), source.add_(tensors[0], 1.0)),
    ],
)
def test_every_way_to_draw_follows_the_generator(draw):
    generator = torch.Generator()
    source = following(generator)
    generator.manual_seed(1)
    found = []
    for one in (source, following(torch.Generator().manual_seed(1))):
        tensors = [torch.zeros(7), torch.zeros(40_000)]
        draw(one, tensors)
        found.append(torch.cat(tensors))
    assert torch.equal(*found)


def test_a_16_bit_sum_is_rounded_once():
    tensor = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    exact = torch.full((1000,), 1.0, dtype=torch.float64)
    seeded().add_(tensor, 0.3)
    seeded().add_(exact, 0.3)
    assert torch.equal(tensor, exact.to(torch.bfloat16))


def test_refuses_what_cannot_be_noised_or_resumed():
    with pytest.raises(InvalidOptionError, match="int64"):
        FastNoise().add_(torch.zeros(3, dtype=torch.int64), 1.0)
    with pytest.raises(InvalidOptionError, match="'fast', 'secure', 'exact'"):
        make_noise_source(level="sure")
    with pytest.raises(InvalidOptionError, match="predictable"):
        make_noise_source(level="secure", seed=1)
    with pytest.raises(ResumeError, match="level 'fast' was saved"):
        SecureNoise().load_state_dict(FastNoise().state_dict())
    with pytest.raises(ResumeError, match="missing key, position"):
        FastNoise().load_state_dict({"level": "fast"})
    with pytest.raises(ResumeError, match="'key' has 2 bytes, not 16"):
        FastNoise().load_state_dict({**FastNoise().state_dict(), "key": "0102"})
    with pytest.raises(InvalidOptionError, match="offset=3: 3 elements from there are not among 5"):
        FastNoise().add_shard_(torch.zeros(3), 1.0, offset=3, total=5)


def test_a_damaged_state_of_a_generator_is_refused_and_changes_nothing():
    source = following(torch.Generator().manual_seed(1))
    before = source.state_dict()
    damaged = {**before, "key": "00" * 16, "position": 7, "generator": "ff" * (len(before["generator"]) // 2)}
    with pytest.raises(ResumeError, match=r"noise state: .*pass what state_dict"):
        source.load_state_dict(damaged)
    assert source.state_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_billion_draws_have_gaussian_tails(level):
    source, values, far = repeatable(level), torch.empty(2**21, dtype=torch.float64), []
    for _ in range(2**9):
        source.add_(values.zero_(), 1.0)
        far.append(values[values.abs() > 5.0].abs())
    found = torch.cat(far)
    for threshold in (5.0, 5.5, 5.768, 5.8, 6.0, 6.2):
        count, expected = int((found > threshold).sum()), 2**30 * 2 * stats.norm.sf(threshold)
        below, above = stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)
        assert 2 * min(below, above) > 1e-4, threshold
    assert (found > 5.8).any()


def test_the_state_says_where_noise_on_a_gpu_comes_from(monkeypatch):
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
