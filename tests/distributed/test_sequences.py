"""Sequences that are split over ranks are clipped as in one process: by samples, whose parts are brought together."""

from __future__ import annotations

import pytest
import torch

from tests import reference
from tests.distributed import sequences
from tests.distributed.spawned import found_by_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def found(request, tmp_path_factory):
    """What the ranks found; four of them are two halves of the samples, each with two halves of the positions."""
    return found_by_ranks(sequences.find, request.param, tmp_path_factory.mktemp("ranks"), request.param)


def _summed(results):
    return {key: sum(result["sums"][key] for result in results) for key in results[0]["sums"]}


def _alone():
    inputs = dict(zip(("ids", "labels"), sequences.batch(), strict=True))
    each = reference.per_sample_gradients(sequences.whole_model(), inputs, sequences.losses, axes={})
    return reference.clip_and_sum(each, sequences.BOUND)


def test_clipped_sums_are_those_of_one_process(found):
    alone = _alone()
    norms = torch.cat([rank["whole"]["norms"] for rank in found])
    torch.testing.assert_close(norms, alone.norms_B, rtol=1e-12, atol=0)
    assert (norms > sequences.BOUND).all()
    sums = _summed([rank["whole"] for rank in found])
    for key, value in alone.clipped.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-11, atol=1e-14)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("sigma", sequences.SIGMAS)
def test_a_training_by_the_engine_is_that_of_one_process(found, sigma):
    """Draws, clipped sums, noise and account: ranks that share sequences draw the same records."""
    first = found[0]["engine"][sigma]
    alone = sequences.engine_trained(sequences.whole_model(), mesh=None, sigma=sigma, states=first["states"])
    for rank in found:
        assert rank["engine"][sigma]["steps"] == alone["steps"] == (4 if sigma else 1)
        for key, value in alone["weights"].items():
            torch.testing.assert_close(rank["engine"][sigma]["weights"][key], value, rtol=1e-9, atol=1e-11)


def test_an_adaptive_bound_is_that_of_one_process(found):
    """Each sample is counted once, on its rank: not in a place that stands for none."""
    first, options = found[0]["adaptive"], {"mesh": None, "sigma": sequences.SIGMAS[1], "clipping": "adaptive"}
    alone = sequences.engine_trained(sequences.whole_model(), states=first["states"], **options)
    assert [rank["adaptive"]["bound"] for rank in found] == [pytest.approx(alone["bound"], rel=1e-12)] * len(found)
    assert alone["bound"] != pytest.approx(sequences.BOUND, rel=1e-3)


def test_a_record_moves_the_release_of_the_engine_by_c_at_most(found):
    for rank in found:
        whole = rank["engine"][0.0]["released"]
        for less in rank["engine without one"]:
            moved = torch.cat([(whole[key] - less[key]).flatten() for key in whole]).norm()
            assert 0.99 * sequences.BOUND < moved <= sequences.BOUND * (1 + 1e-9)


def test_context_parallel_is_exact_with_sequences_and_refused_without(found):
    """The batch is split there, whatever attention then does; positions come in another order on each rank."""
    inputs = dict(zip(("ids", "labels"), sequences.batch(), strict=True))
    each = reference.per_sample_gradients(sequences.ring(0), inputs, sequences.losses, axes={})
    alone = reference.clip_and_sum(each, sequences.BOUND)
    sums = _summed([rank["ring"] for rank in found])
    for key, value in alone.clipped.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-11, atol=1e-14)
    for rank in found:
        assert "Ring was called inside context_parallel" in rank["ring"]["refused"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("samples", "samples of a batch, and sizes"),
        ("positions", "samples of a batch, and sizes"),
        ("axis", "name the one axis of the mesh"),
        ("ghost", "brought together by book-keeping alone"),
        ("tiles", "compute the loss from logits"),
        ("engine's mesh", "ranks of a training are to be on it"),
        ("engine's level", "noise_level='exact' with sequences that are split over ranks"),
        ("engine's strategy", "brought together by book-keeping alone"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(found, case, words):
    for rank in found:
        assert words in rank["refused"][case]


def test_exchange_of_records_is_refused(found):
    """Experts spread over ranks: rows of other ranks' records come in."""
    for rank in found:
        assert "in its forward (all-to-all)" in rank["exchanged"]
