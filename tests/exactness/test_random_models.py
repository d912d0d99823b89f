"""Random small models, right ones and ones that mix samples; `python -m benchmarks.random_models` runs a thousand."""

import pytest

from benchmarks.random_models import measure

# Right ones that were refused when sizes decided, one of each kind: B outputs of B positions, experts on rows that
# alternate, copies, constants, halves of the batch; then where the first block meets data alone: routers, pieces and
# orders behind it; experts whose first rows fit two orders of the batch, or that have none. Last models that mix
# samples and were accepted.
_RIGHT = (
    13, 17, 20, 23, 29, 34, 37, 49, 52, 58, 787, 473, 68, 202, 359, 593, 646, 719, 848, 70036, 70745, 70970,
    400007, 500546, 930280, 930415, 910708,
)  # fmt: skip
_MIXING = (21, 66, 78, 153, 204, 264, 984)


@pytest.mark.parametrize("seed", _RIGHT)
def test_right_models_are_exact(seed):
    row = measure(seed)
    assert not row["mixes"]
    assert row["outcome"] == "exact", row.get("why")


@pytest.mark.parametrize("seed", _MIXING)
def test_models_that_mix_samples_are_refused(seed):
    row = measure(seed)
    assert row["mixes"]
    assert row["outcome"] == "refused"
