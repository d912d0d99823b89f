"""The quick look along first parents says nothing that the closer looks do not."""

from types import SimpleNamespace

import pytest
import torch

from ghostclip.capture.row_origin import METADATA_KEY, ROWS_KEY, leads_to, note, origin_of_rows, straight_behind

_ROWS, _FEATURES = 4, 6
_ORDER = torch.tensor([2, 0, 3, 1])
# Whether rows surely lie as they did, and whether the operation is found.
_WAYS = {
    "itself": (lambda x: x, (True, True)),
    "elementwise": (lambda x: torch.tanh(x) * 2, (True, True)),
    "sum": (lambda x: torch.tanh(x) + x, (True, True)),
    "folded": (lambda x: x.view(_ROWS * 2, 3), (True, True)),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, (_FEATURES,)), (True, True)),
    "positions": (lambda x: x.view(_ROWS, 2, 3).transpose(1, 2), (True, True)),
    "no axis": (lambda x: x.sum(), (True, True)),
    "picked": (lambda x: x[_ORDER], (False, False)),
    "picked, then more": (lambda x: torch.tanh(x[_ORDER]), (False, False)),
    "flipped": (lambda x: x.flip(0), (False, False)),
    "behind an axis of one": (lambda x: x.unsqueeze(0)[:, _ORDER].view(_ROWS, _FEATURES), (False, False)),
    "placed by a matrix": (lambda x: torch.eye(_ROWS)[_ORDER] @ x, (False, False)),
    "joined": (lambda x: torch.cat([x[2:], x[:2]]), (False, False)),
    "picked beside a constant": (lambda x: torch.zeros(1, _FEATURES, requires_grad=True) + x[_ORDER], (False, False)),
}


def _captured(*, gathers_nothing=True):
    y = torch.randn(_ROWS, _FEATURES, requires_grad=True) * 1
    samples = None if gathers_nothing else _ORDER
    use = SimpleNamespace(gathers_nothing=gathers_nothing, gathered_samples=lambda rows: samples)
    note(y.grad_fn, METADATA_KEY, use)
    return y


def _look(x):
    return straight_behind(x.grad_fn, x.shape[0] if x.dim() else None)


@pytest.mark.parametrize("gathers_nothing", [True, False])
@pytest.mark.parametrize("way", _WAYS)
def test_it_agrees_with_the_closer_looks(way, gathers_nothing):
    go, wanted = _WAYS[way]
    x = go(_captured(gathers_nothing=gathers_nothing))
    in_order, found = _look(x)
    if gathers_nothing:
        assert (in_order, found) == wanted
    if in_order:
        assert origin_of_rows(x, 0, _ROWS, 0) is None
    if found:
        assert leads_to(x, torch.zeros((), requires_grad=True))


def test_rows_that_somebody_has_noted_are_looked_at():
    x = torch.tanh(_captured())
    note(x.grad_fn, ROWS_KEY, (0, _ORDER))
    assert _look(torch.exp(x)) == (False, False)
    assert origin_of_rows(torch.exp(x), 0, _ROWS, 0) is _ORDER


def test_where_no_operation_is_found_it_says_so():
    leaf = torch.randn(_ROWS, _FEATURES, requires_grad=True)
    assert _look(torch.tanh(leaf)) == (False, False)
    assert not _look(leaf)[1]
