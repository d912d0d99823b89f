"""One training on two ranks has one ledger: rank 0 writes it, both go by it, and what stops one stops both."""

from __future__ import annotations

import pytest
import torch

from ghostclip.accounting import create_accountant
from ghostclip.privacy.checkpoints import load
from ghostclip.privacy.ledger_file import LedgerFile
from tests.distributed.ledgers import BATCH, DELTA, FAILURES, SIGMA, prepare, run
from tests.distributed.loops import RECORDS
from tests.process_group import start_ranks

pytestmark = pytest.mark.distributed
RANKS, RATE = 2, BATCH / RECORDS
GOES = {"made again"}
REFUSED = {
    "held by another training": ("ResumeError", "is writing to this ledger"),
    "damaged": ("ResumeError", "line 3: the ledger is damaged"),
    "damaged first": ("ResumeError", "line 3: the ledger is damaged"),
    "loaded before": ("ResumeError", "rank 1 has accounted for releases"),
    "folder": ("InvalidOptionError", "a ledger must be a regular file"),
    "another path": ("InvalidOptionError", "ledger of rank 1 is"),
    "on one only": ("InvalidOptionError", "of rank 0 None"),
    "made again otherwise": ("ResumeError", "was made before the interruption with other values"),
    "alone afterwards": ("InvalidOptionError", "a ledger, of its own for what a rank trains by itself"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks have trained."""
    return tmp_path_factory.mktemp("ledgers")


@pytest.fixture(scope="module")
def found(folder):
    """What the ranks found, in the order of the ranks."""
    with prepare(folder):
        start_ranks(run, RANKS, str(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def _require_equal(one, two):
    for name in ("epsilon", "history", "place"):
        assert one[name] == two[name]
    for name, p in one["parameters"].items():
        assert torch.equal(p, two["parameters"][name])


def _epsilon_of(steps):
    accountant = create_accountant("rdp")
    accountant.history = [(SIGMA, RATE, steps)]
    return accountant.get_epsilon(DELTA)


def test_each_release_is_in_the_file_once_and_counts_on_both_ranks(found, folder):
    one, two = (rank["trained"] for rank in found)
    _require_equal(one, two)
    assert one["history"] == [(SIGMA, RATE, 3)]
    assert one["epsilon"] == _epsilon_of(3)
    ledger = LedgerFile(folder / "ledger")
    assert [entry.number for entry in ledger.entries] == [0, 1, 2, 3]
    assert len({entry.run for entry in ledger.entries}) == 1
    assert len(ledger.mechanisms) == 1
    ledger.require(one["place"])


def test_a_training_goes_on_from_any_ranks_checkpoint_on_both(found, folder):
    one, two = (rank["resumed"] for rank in found)
    assert one["at once"] == two["at once"] == [(SIGMA, RATE, 3)]
    for when in ("again", "after"):
        _require_equal(one[when], two[when])
    _require_same_parameters(one["again"], found[0]["trained"])
    assert one["again"]["history"] == [(SIGMA, RATE, 3)]
    assert one["after"]["history"] == [(SIGMA, RATE, 4)]
    assert one["after"]["place"] == LedgerFile(folder / "ledger").position()


def test_ranks_may_save_to_one_place_at_once(found, folder):
    del found
    assert load(folder / "checkpoint of both", {})["ghostclip_ledger"]
    assert not list(folder.glob("*unfinished*"))


def _require_same_parameters(one, two):
    for name, p in one["parameters"].items():
        assert torch.equal(p, two["parameters"][name])


def test_what_was_released_before_there_was_a_ledger_is_written_once(found, folder):
    one, two = (rank["taken over"] for rank in found)
    _require_equal(one, two)
    assert one["history"] == [(SIGMA, RATE, 3)]
    before, after = LedgerFile(folder / "taken over").entries
    assert before.events == ((SIGMA, RATE, 2),)
    assert after.events == ((SIGMA, RATE, 1),)


def test_an_engine_that_is_older_than_the_group_shares_its_ledger(found, folder):
    _require_equal(*(rank["early"] for rank in found))
    assert len(LedgerFile(folder / "early").entries) == 2


@pytest.mark.parametrize("name", ["elsewhere", "damaged second"])
def test_what_rank_0_has_read_counts_where_the_path_leads_to_another_file(found, folder, name):
    one, two = (rank[name] for rank in found)
    _require_equal(one, two)
    assert one["history"] == [(SIGMA, RATE, 3)]
    path = {"elsewhere": "apart"}.get(name, name)
    assert one["place"] == LedgerFile(folder / "at0" / path).position()


@pytest.mark.parametrize("name", FAILURES)
def test_a_release_that_fails_on_one_rank_leaves_neither(found, folder, name):
    _, failing, error = FAILURES[name]
    for rank, results in enumerate(found):
        kind, message = results["failures"][name]["told"]
        assert kind == (type(error).__name__ if rank == failing else "InvalidOptionError")
        assert str(error) in message
        assert results["failures"][name]["held"] == [(SIGMA, RATE, 1)]
    one, two = (results["failures"][name]["after"] for results in found)
    _require_equal(one, two)
    assert one["history"] == [(SIGMA, RATE, 2)]
    # A line whose release did not follow over-counts.
    assert len(LedgerFile(folder / name).entries) == (3 if failing else 2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_both_ranks(found, name):
    kind, message = REFUSED[name]
    for rank in found:
        assert rank["refused"][name][0] == kind
        assert message in rank["refused"][name][1]


@pytest.mark.parametrize("name", sorted(GOES))
def test_goes_through(found, name):
    assert [rank["refused"][name] for rank in found] == [("", "")] * RANKS


def test_ranks_that_train_apart_are_two_trainings(found):
    assert found[0]["refused"]["two trainings"] == ("", "")
    assert found[1]["refused"]["two trainings"][0] == "ResumeError"
    assert "is writing to this ledger" in found[1]["refused"]["two trainings"][1]


def test_a_ledger_is_not_written_without_its_group(found):
    assert found[0]["group is gone"] == ""
    assert "process group that is no more" in found[1]["group is gone"]


def test_every_try_is_judged(found):
    assert set(found[0]["refused"]) == GOES | set(REFUSED) | {"two trainings"}
