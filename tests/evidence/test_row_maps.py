"""A row map must explain every set of samples that was asked about, whenever it comes into question."""

from types import SimpleNamespace

import pytest
import torch

from ghostclip.capture.row_maps import RowMap
from ghostclip.evidence.probe import Probe

MAJOR, MINOR = RowMap("major", 0), RowMap("minor", 0)


class _Forward:
    batch_size = 2


class _Site:
    chosen, attempts = None, 0


def _rows(*touched):
    grad = torch.zeros(4, 3)
    grad[list(touched)] = 1.0
    return grad


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [((0, 1), (2, 3), "major"), ((0, 2), (1, 3), "minor"), ((0,), (1, 3), "minor"), ((0, 1), (1, 3), None)],
)
def test_a_map_that_an_earlier_set_contradicts_is_not_chosen_later(first, second, chosen):
    use = SimpleNamespace(node=None, site=_Site(), maps=[MAJOR, MINOR], num_batch_dims=1, forward=_Forward())
    probe = Probe({0: 1.0}, str)
    probe.receive(use, _rows(*first))
    probe.weights = {1: 1.0}
    probe.receive(use, _rows(*second))
    assert bool(probe.failures) == (chosen is None)
    assert chosen is None or use.site.chosen[0] == chosen
