"""Every engine with broken surroundings fails the check it should, and the unbroken one passes them all."""

from __future__ import annotations

import pytest

from tests.audit.checks import CHECKS
from tests.audit.surrounding_mutations import SURROUNDING_MUTATIONS
from tests.audit.surroundings import SURROUNDINGS

EVERY_CHECK = {**CHECKS, **SURROUNDINGS}
SEEN_BY = {
    "steps_forgotten": ("every_release_is_charged", r"10 releases: epsilon [\d.]+ is printed for"),
    "draws_not_followed": ("a_replayed_batch_is_refused_or_counted", "6 draws used 30 times: epsilon"),
    "passes_over_a_draw_counted_once": ("passes_over_a_draw_are_counted", "6 releases of three passes each: epsilon"),
    "copies_keep_the_key": ("copies_do_not_repeat_noise", "copy: both draw the same noise"),
    "ledger_read_without_its_chain": ("a_cut_ledger_is_refused_or_counted", "lost lines at its middle: epsilon"),
    "rows_without_a_bound": ("cancelling_parts_move_at_most_c", r"LookUps, \w+, parts of .* that cancel nearly move"),
    "uses_added_one_by_one": ("cancelling_parts_move_at_most_c", r"Uses, \w+, parts of .* that cancel nearly move"),
    "huge_parts_meet_the_sum": ("huge_parts_leave_the_others_sums", r"\w+, parts of .* that cancel move"),
    "norms_of_reduced_precision": ("one_record_moves_at_most_c", r"moves a release on \d records by 1(\.000\d+)? C"),
    "loss_scale_left_in_the_sums": ("one_record_moves_at_most_c", "moves a release on 0 records by 1024 C"),
    "sums_within_reach": ("sums_cannot_be_changed_unseen", r"grad.data.mul_ .* moves the release"),
}


@pytest.mark.parametrize("check", SURROUNDINGS)
def test_the_engine_passes(check):
    SURROUNDINGS[check]()


def test_every_mutation_is_listed():
    assert SEEN_BY.keys() == SURROUNDING_MUTATIONS.keys()


@pytest.mark.parametrize("mutation", SEEN_BY)
def test_broken_surroundings_are_seen(mutation):
    check, words = SEEN_BY[mutation]
    with SURROUNDING_MUTATIONS[mutation](), pytest.raises(AssertionError, match=words):
        EVERY_CHECK[check]()
