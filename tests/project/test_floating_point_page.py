"""The page that proves the bound on one sample's contribution names the constants of the code."""

from __future__ import annotations

import re

import pytest
import torch

from ghostclip.clipping import norms
from ghostclip.kernels import bounds, outer
from ghostclip.kernels.bounds import rounded_up_
from tests.project.source import ROOT

PAGE = (ROOT / "docs" / "floating-point.md").read_text(encoding="utf-8")
CONSTANTS = {
    "CHAIN": bounds.CHAIN,
    "DRIFT_MARGIN": bounds.DRIFT_MARGIN,
    "PRODUCT_ROUNDINGS": bounds.PRODUCT_ROUNDINGS,
    "UNSEEN_DRIFT": bounds.UNSEEN_DRIFT,
    "SUM_ROUNDINGS": bounds.SUM_ROUNDINGS,
    "CROSS_ROUNDINGS": bounds.CROSS_ROUNDINGS,
    "LEAST": bounds.LEAST,
    "TOLERANCE": norms.TOLERANCE[torch.float32],
    "UNIT_STEP": bounds.UNIT_STEP,
    "UNIT_CHAIN": bounds.UNIT_CHAIN,
    "SPLIT_ROUNDINGS": bounds.SPLIT_ROUNDINGS,
    "FORMED": outer.FORMED,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_code(name):
    stated = re.findall(rf"`{name}` = ([\d.e-]*\d)", PAGE)
    assert stated, f"{name} is not on the page"
    assert {float(value) for value in stated} == {CONSTANTS[name]}


def test_what_is_said_in_words():
    assert "(float64: 1e-12)" in PAGE
    assert norms.TOLERANCE[torch.float64] == 1e-12
    assert "`UNBOUNDED` = 2⁻²¹" in PAGE
    assert norms.UNBOUNDED == 2.0**-21
    assert "`UNIT_LOSS` = 2⁻²⁰" in PAGE
    assert bounds.UNIT_LOSS == 2.0**-20
    assert "`TOLERANCE_BY_UNITS` = 2⁻⁹" in PAGE
    assert norms.TOLERANCE_BY_UNITS == 2.0**-9
    assert "128 values in 8 lanes, 256 in 16" in PAGE
    assert bounds._BLOCK in {128, 256}
    one = torch.ones(1, dtype=torch.float64)
    assert "8·eps" in PAGE
    assert rounded_up_(one.clone()).item() == 1 + 8 * torch.finfo(torch.float64).eps
    # What is let pass without float64: sums of terms no longer than so many times the gradient.
    assert "100·C" in PAGE
    assert int(norms.TOLERANCE[torch.float32] / 2 / bounds.unit_roundoff(torch.float32)) == 100


def test_names_on_the_page_are_there():
    for name in re.findall(r"`([a-z_]+)` ?\(?(?:clipping|factors|kernels)?", PAGE):
        if name in {"bookkeeping", "ghost", "fast", "hooks"}:
            continue
        assert re.search(rf"\b{name}\b", SOURCE), f"{name} is named on the page and is nowhere in the code"


SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "ghostclip").rglob("*.py"))
