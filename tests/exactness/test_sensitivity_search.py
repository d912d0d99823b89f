"""No data that an adversary would choose moves a clipped sum by more than the bound in floating point."""

from random import Random

import pytest
import torch

from tests.exactness.sensitivity.data import Setting, batch_of, ordinary
from tests.exactness.sensitivity.known import KNOWN
from tests.exactness.sensitivity.layers import KINDS
from tests.exactness.sensitivity.measure import ALLOWED, NUMERICS, Subject, reduced_products
from tests.exactness.sensitivity.search import Cell, search_cell

# Evaluations of a cell: over all kinds, dtypes and strategies the slow search makes more than 1e5.
_QUICK, _THOROUGH = 4, 105


def _holds(cell, evaluations, seed):
    found = search_cell(cell, evaluations, seed=seed)
    assert not found.error, f"{cell}: {found.error}"
    assert found.worst() <= found.limit(), f"{cell}: {found.moves}, evaluation {found.number}, width {found.width}"


def _needs(numerics):
    if numerics == "medium" and not reduced_products()["medium"]:
        pytest.skip("float32 products are computed in float32 on this machine, whatever precision is asked for")


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_data_that_broke_the_bound(known, strategy):
    _needs(known.numerics)
    moves = known.moves(strategy)
    assert moves.worst() <= 1 + ALLOWED[NUMERICS[known.numerics].dtype], moves


@pytest.mark.parametrize("numerics", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_few_random_batches(kind, numerics):
    for strategy in ("bookkeeping", "ghost"):
        _holds(Cell(kind.name, numerics, strategy), _QUICK, seed=1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_are_those_of_their_samples(kind):
    """The search switches off the engine's own proof, which its data would fail."""
    subject = Subject(kind, kind.widths[0], NUMERICS["float64"], "bookkeeping")
    for size, positions in ((2, 2), (3, 2), (2, kind.positions[-1])):
        setting = Setting(subject.shapes(positions), kind.ids, positions, torch.float64)
        norms, expected = subject.norms(batch_of([ordinary(setting, Random(place)) for place in range(size)]))
        torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_search(kind, numerics, strategy):
    _needs(numerics)
    _holds(Cell(kind.name, numerics, strategy), _THOROUGH, seed=0)


def test_a_move_above_the_bound_is_seen(monkeypatch):
    """A clipper that lets everything through by a thousandth too much."""
    monkeypatch.setattr("ghostclip.clipping.bounds._margin", lambda bound, dtype: bound * 1.001)
    found = search_cell(Cell("linear", "float32", "bookkeeping"), 5, seed=0)
    assert found.worst() == pytest.approx(1.001, abs=1e-5)
    assert found.failed
