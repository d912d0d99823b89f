"""Every broken engine fails the checks it should, for the reason it should, and the unbroken one passes them all."""

from __future__ import annotations

import pytest

from tests.audit.checks import CHECKS
from tests.audit.mutations import MUTATIONS

CONTRADICTED = r"epsilon >= [\d.]+ .* is contradicted"
# Which checks see which fault, and what they say. Others may see it, too.
SEEN_BY = {
    "no_noise_on_one_bias": {
        "noise_has_its_scale": r"noise of tensor 3: 0\.000 of its standard deviation",
        "audit_stays_below_the_claim": f"tensor 3: {CONTRADICTED}",
    },
    "half_the_noise": {
        "noise_has_its_scale": r"noise of tensor 0: 0\.[45]\d+ of its standard deviation",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "noise_reused_between_steps": {
        "noise_is_independent": "the same noise twice",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "noise_of_truncated_float32_normals": {"noise_has_its_tails": "24-bit uniforms"},
    "noise_cut_at_three_deviations": {"noise_has_its_tails": r"^0 of \d+ draws beyond 3\.0 standard deviations"},
    "same_noise_on_two_ranks": {"noise_ignores_global_seeds": r"two ranks has correlation (0\.9|1\.0)"},
    "same_noise_on_both_shards": {"noise_of_shards_is_independent": r"two shards has correlation (0\.9|1\.0)"},
    "clip_three_times_too_loose": {
        "one_record_moves_at_most_c": "'ordinary' moves a release on 0 records by 3 C",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "every_tensor_clipped_at_c": {
        "one_record_moves_at_most_c": r"moves a release on 0 records by 1\.9\d+ C",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "column_losses_broadcast": {
        "one_record_moves_at_most_c": r"moves a release on 1 records by [\d.]+ C",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "clipped_once_after_accumulation": {
        "one_record_moves_at_most_c_when_accumulated": "moves an accumulated release by 2 C",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "nan_samples_not_masked": {
        "one_record_moves_at_most_c": "'NaN' moves a release on 0 records by inf C",
        "audit_stays_below_the_claim": CONTRADICTED,
    },
    "divided_by_the_actual_batch": {"one_record_moves_at_most_c": "moves a release on 0 records by 4 C"},
    "shuffled_while_poisson_is_accounted": {"participation_is_poisson": r"batch sizes vary 0\.00 times"},
}


# The audit takes a second each; the faults that only the noise shows are tried on it every time.
AUDITED_EVERY_TIME = {"no_noise_on_one_bias", "half_the_noise"}


def _pairs():
    for mutation, checks in SEEN_BY.items():
        for check in checks:
            slow = check == "audit_stays_below_the_claim" and mutation not in AUDITED_EVERY_TIME
            yield pytest.param(mutation, check, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("check", CHECKS)
def test_the_engine_passes(check):
    CHECKS[check]()


def test_every_mutation_is_listed():
    assert SEEN_BY.keys() == MUTATIONS.keys()


@pytest.mark.parametrize(("mutation", "check"), list(_pairs()))
def test_a_broken_engine_is_seen(mutation, check):
    with MUTATIONS[mutation](), pytest.raises(AssertionError, match=SEEN_BY[mutation][check]):
        CHECKS[check]()
