"""The statistical audit of whole steps: what it finds lies below the claim, and not far below."""

from __future__ import annotations

import pytest

from tests.audit.checks import audit_of_a_step
from tests.audit.subject import CLAIMED_EPSILON


def test_a_step_is_as_private_as_claimed_and_not_much_more():
    """With few runs: near enough to the truth that an audit which sees nothing would be noticed."""
    found = audit_of_a_step(400)
    assert max(finding.epsilon for finding in found.values()) <= CLAIMED_EPSILON
    assert found["all"].epsilon >= 0.3 * CLAIMED_EPSILON


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_runs_find_most_of_the_claim(seed):
    found = audit_of_a_step(3000, seed=seed)
    assert max(finding.epsilon for finding in found.values()) <= CLAIMED_EPSILON
    assert found["all"].epsilon >= 0.6 * CLAIMED_EPSILON
