"""A model whose stages lie on several ranks is clipped as in one process, under every schedule of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import add_noise_
from tests import reference
from tests.distributed import pipelines
from tests.distributed.spawned import found_by_ranks
from tests.process_group import start_ranks

pytestmark = pytest.mark.distributed
SCHEDULES = (*pipelines.SINGLE, *pipelines.SEVERAL)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def found(request, tmp_path_factory):
    """What the ranks found, in the order of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return found_by_ranks(pipelines.find, request.param, folder, request.param, str(folder))


def _alone(blocks):
    inputs, labels = pipelines.batch()

    def losses(model, batch):
        logits = model(batch["inputs"])
        each = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return each.view(batch["labels"].shape).mean(1)

    model = pipelines.whole_model(blocks)
    each = reference.per_sample_gradients(model, {"inputs": inputs, "labels": labels}, losses, axes={})
    return reference.clip_and_sum(each, pipelines.BOUND)


@pytest.mark.parametrize("name", SCHEDULES)
def test_clipped_sums_are_those_of_one_process(found, name):
    """Over stages and microbatches, against one sample at a time in float64; a step counts as one backward."""
    alone = _alone(max(2, (2 * len(found) if name in pipelines.SEVERAL else len(found)) - 2))
    sums = {key: value for rank in found for key, value in rank[name]["sums"].items()}
    for rank in found:
        torch.testing.assert_close(rank[name]["norms"], alone.norms_B, rtol=1e-12, atol=0)
        assert set(rank[name]["passes"]) == {1}
        # torch's look for the shapes that stages exchange is none of them.
        assert set(rank[name]["forwards"]) == {2 * pipelines.MICROBATCHES}
    assert sums.keys() == alone.clipped.keys()
    for key, value in alone.clipped.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", pipelines.ENGINE)
def test_sums_of_several_steps_of_a_schedule_add_up(found, name):
    """A schedule divides what it finds in ``.grad`` by its number of microbatches, that of the steps before as well."""
    for rank in found:
        assert rank["added up"][name]["passes"] == [2] * len(rank["added up"][name]["passes"])
        for key, value in rank["added up"][name]["sums"].items():
            torch.testing.assert_close(value, 2 * rank[name]["sums"][key], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", pipelines.ENGINE)
def test_optimizers_of_stages_release_what_one_process_does(found, name):
    """Each stage by an optimizer of its own, with its part of one draw of noise."""
    alone = _alone(max(2, (2 * len(found) if name in pipelines.SEVERAL else len(found)) - 2))
    source = make_noise_source(level="secure")
    source.load_state_dict(found[0]["by stage"][name]["noise"])
    for number in range(2):
        released = {key: value for rank in found for key, value in rank["by stage"][name]["released"][number].items()}
        assert released.keys() == alone.clipped.keys()
        noisy = {key: alone.clipped[key].clone() for key in released}
        add_noise_(source, [noisy[key] for key in alone.clipped], 0.5 * pipelines.BOUND)
        for key, value in released.items():
            torch.testing.assert_close(value, noisy[key] / pipelines.SAMPLES, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("name", [*pipelines.ENGINE, "copies", "resumed"])
def test_a_training_by_the_engine_is_that_of_one_process(found, name):
    """Draws, batches in parts with empty places, clipped sums, noise and account, also resumed from one file."""
    if name == "copies" and len(found) == 2:
        pytest.skip("two copies of two stages take four ranks")
    of_rank = [rank[name] if name == "resumed" else rank["engine"][name] for rank in found]
    schedule = name if name in pipelines.ENGINE else "1F1B"
    alone = pipelines.engine_trained(
        -1, len(found), name=schedule, copies=2 if name == "copies" else 1, states=of_rank[0]["states"]
    )
    assert {rank["steps"] for rank in of_rank} == {alone["steps"]} == {4}
    weights = {key: value for rank in of_rank for key, value in rank["weights"].items()}
    assert weights.keys() == alone["weights"].keys()
    for key, value in alone["weights"].items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-11)


def test_a_record_moves_the_release_of_the_engine_by_c_at_most(found):
    whole, *less = [
        {key: value for rank in found for key, value in rank["engine without one"][number]["released"].items()}
        for number in range(3)
    ]
    for without in less:
        moved = torch.cat([(whole[key] - without[key]).flatten() for key in whole]).norm()
        assert 0.99 * pipelines.BOUND < moved <= pipelines.BOUND * (1 + 1e-9)


def test_batches_without_records_are_released(found):
    sizes = found[0]["empty"]
    assert 0 in sizes
    assert any(sizes)
    assert all(rank["empty"] == sizes for rank in found)


def test_the_ledger_tells_releases_of_other_stages_apart(found):
    """Rank 0 writes it, and what stages on other ranks release is part of what a step is recognised by."""
    for rank in found:
        lines, (first, again, other) = rank["ledger"]
        assert lines > 1
        assert first == again != other
        assert rank["ledger"] == found[0]["ledger"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("mixing", "SampleMixingError", "depends on the whole batch"),
        ("mixing after copies", "SampleMixingError", "half of the samples were replaced"),
        ("positions first", "BatchAxisError", "samples lie along axis 1, and the next stage takes them along axis 0"),
        ("loss", "ValueError", "no labels of 3 in 3"),
    ],
)
def test_a_rank_that_leaves_the_schedule_says_why(tmp_path, case, kind, words):
    """The other one hears of it as soon as its process has ended, and raises the same, long before its timeout.

    Copies of one record, with which empty places are filled, may show a stage that mixes samples beside larger ones.
    """
    start_ranks(pipelines.left, 2, str(tmp_path), case)
    leaves = 0 if case == "positions first" else 1
    own, other = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (leaves, 1 - leaves)]
    assert own[0] == kind
    assert words in own[1]
    assert other[0] == ("InvalidOptionError" if case == "loss" else kind)
    assert other[1] == f"rank {leaves} was refused, and no rank goes on without it: {own[1]}"
    assert max(own[2], other[2]) < pipelines.TIMEOUT / 4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mesh", "Every stage of one pipeline must be given"),
        ("twice", "is one of stage"),
        ("neighbours", "sends from one to the other over gloo"),
        ("wrapped", "wrapped in DistributedDataParallel"),
        ("builder", "has a dw_builder"),
        ("copies", "sums of copies of a pipeline are not added up"),
        ("frozen", "trains no parameter"),
        ("disagree", "max_grad_norm and loss_reduction of rank 1 is"),
        ("no backward", "no backward ran in this step"),
        ("exact", "stages of a pipeline have no integer sums"),
        ("two passes", "grad_sample_mode='ghost' with a Pipeline"),
        ("criterion", "the schedule has its loss_fn"),
        ("batch second", "batch_first=False with a Pipeline"),
        ("small memory", "memory_budget=0.9 with a Pipeline"),
        ("head", "vocabulary_head='auto' with a Pipeline"),
        ("layers", "stages tell each other the norms of whole gradients"),
        ("adaptive", "stages tell each other the norms of whole gradients"),
        ("level", "grad_sample_mode='hooks' with a Pipeline"),
        ("places", "a step of the schedule has 4 microbatches of one size"),
        ("other places", "pipeline's places of rank 1 is 4, of rank 0 8"),
        ("other microbatches", "pipeline's number of microbatches of rank 1 is 8, of rank 0 4"),
        ("other reduction", "pipeline's loss_reduction of rank 1 is 'mean', of rank 0 'sum'"),
        ("other order", "optimizer's parameters, in order, of rank 1 is ['0."),
        ("other inputs", "work on the same samples, and pipeline.step was given other inputs or targets there"),
        ("other labels", "work on the same samples, and pipeline.step was given other inputs or targets there"),
        ("other fewer", "work on the same samples, and pipeline.step was given other inputs or targets there"),
        ("other none", "work on the same samples, and pipeline.step was given other inputs or targets there"),
        ("no rows: table", "a tensor of shape (13, 2) beside 12 records"),
        ("no rows: number", "a tensor of shape () beside 12 records"),
        ("other noise", "Set σ and C"),
        ("axis", "name the one axis of the mesh whose ranks have stages of one model"),
        ("forward", "call pipeline.step(inputs, target=...)"),
        ("not private", "the pipeline is not private"),
        ("other stages", "checkpoint with stages 7 of the ranks"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(found, case, words):
    for rank in found:
        assert words in rank["refused"][case]
