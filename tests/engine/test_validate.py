"""The checks that every option goes through."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), torch.tensor(2.0)])
def test_positive_takes_any_real_number(value):
    assert _validate.positive(value, "option") == float(value)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "1", None, [1.0], torch.ones(2)])
def test_positive_refuses_everything_else(value):
    with pytest.raises(InvalidOptionError, match="option"):
        _validate.positive(value, "option")


def test_ranges_end_where_they_say():
    assert _validate.positive(math.inf, "option", allow_infinity=True) == math.inf
    assert _validate.non_negative(0, "option") == 0
    assert _validate.fraction(1, "option") == 1
    assert _validate.positive_int(np.int64(3), "option") == 3
    assert _validate.choice("a", "option", ("a", "b")) == "a"
    for check, value in (
        (_validate.non_negative, -1e-9),
        (_validate.non_negative, math.inf),
        (_validate.fraction, 0),
        (_validate.fraction, 1.01),
        (_validate.probability, 1),
        (_validate.probability, 0),
        (_validate.positive_int, 0),
        (_validate.positive_int, 2.0),
        (_validate.positive_int, True),
    ):
        with pytest.raises(InvalidOptionError, match="option="):
            check(value, "option")
    with pytest.raises(InvalidOptionError, match="'a', 'b'"):
        _validate.choice("c", "option", ("a", "b"))
