"""Ways to draw and to add noise, chosen by an argument of Trainer and of the Lightning callback."""

from __future__ import annotations

import pytest

from ghostclip.errors import InvalidOptionError
from ghostclip.integrations._host import MECHANISMS, PrivacyArguments
from tests.integrations.test_longer_than_planned import _Module, _Trainer

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
EXPECTED = {
    "poisson": "Poisson sampling with q = ",
    "balls_in_bins": "exactly one of",
    "unamplified": "the same batches in each epoch",
    "banded_inverse": "correlated over 3 steps",
    "banded_matrix_factorization": "of one group after another, of 3; noise correlated over all steps, by 2 buffers",
    "buffered_toeplitz": "correlated over all steps, by 3 buffers",
}


@pytest.mark.parametrize("host", [_Trainer, _Module])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_host_trains_within_epsilon_by_any_mechanism(host, mechanism, tmp_path):
    engine = host(tmp_path).train(2, target_epsilon=3.0, mechanism=mechanism, noise_bands=3)
    assert 2.9 < engine.get_epsilon(5e-4) <= 3.0
    assert EXPECTED[mechanism] in engine.summary(5e-4)


@pytest.mark.parametrize(
    "mechanism", ["balls_in_bins", "banded_inverse", "banded_matrix_factorization", "buffered_toeplitz"]
)
def test_a_host_resumes_any_mechanism_within_its_plan(mechanism, tmp_path):
    made = _Trainer(tmp_path)
    options = {"target_epsilon": 3.0, "mechanism": mechanism, "noise_bands": 2, "planned_epochs": 2}
    made.train(1, **options)
    engine = made.train(2, **options, resume=True)
    assert 2.9 < engine.get_epsilon(5e-4) <= 3.0


@pytest.mark.parametrize(
    ("options", "match"),
    [({"mechanism": "ballsinbins"}, "mechanism='ballsinbins'"), ({"noise_bands": 0}, "noise_bands=0")],
)
def test_a_mechanism_that_there_is_not_is_refused(options, match):
    with pytest.raises(InvalidOptionError, match=match):
        PrivacyArguments(target_epsilon=1.0, target_delta=1e-5, **options)
