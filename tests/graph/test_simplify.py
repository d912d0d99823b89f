"""Simplified graphs: the same values, with views, copies and products that are there once."""

import pytest
import torch

from ghostclip import _torch
from ghostclip.graph.simplify import simplified
from ghostclip.graph.trace import operation


def _pieces(x):
    return [part.sin() for part in x.unbind(0)]


def _stacked_then_transposed(x):
    return [torch.stack(_pieces(x)).transpose(0, 1).contiguous() * 2]


def _side_by_side(x):
    return [torch.cat([part.unsqueeze(1) for part in _pieces(x)], 1) * 2]


def _both(x):
    pieces = _pieces(x)
    first = torch.stack(pieces).permute(1, 0, 2).contiguous()
    second = torch.cat([part.unsqueeze(1) for part in pieces], 1)
    return [first @ first.mT + second @ second.mT]


def _there_and_back(x):
    return [x.transpose(0, 1).contiguous().transpose(0, 1) + x.permute(2, 0, 1).permute(1, 2, 0)]


def _reshapes(x):
    return [x.flatten(0, 1).unsqueeze(0).view(x.shape).unsqueeze(1) + 1]


def _cat_of_few(x):
    first, second = x.sin(), x.cos()
    return [torch.cat([first, second], 0), torch.cat([first[:, :1], second[:, :1]], 1)]


def _copy_in_another_order(x):
    return [torch.stack(_pieces(x)).permute(2, 1, 0).contiguous() * 2, torch.stack(_pieces(x), -1).contiguous()]


def _equal_sums(x):
    parts = [(x + 1).split(2)[0], (x + 1).split(2)[0]]
    return [x.sum(0), x.sum(0), torch.zeros(2), torch.zeros(2), x.sum(1).view(-1), x.sum(1).view(-1), *parts]


def _views_of_one(x):
    total = torch.zeros(6, dtype=x.dtype) + x.sum()
    return [total[:3], total[:3].view(3), total[3:]]


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (_stacked_then_transposed, {"stack": 1, "clone": 0, "permute": 0}),
        (_side_by_side, {"stack": 1, "cat": 0, "unsqueeze": 0}),
        (_both, {"stack": 1, "cat": 0, "clone": 0, "bmm": 1}),
        (_there_and_back, {"permute": 0, "transpose": 0, "clone": 0}),
        (_reshapes, {"reshape": 0, "view": 0, "unsqueeze": 1}),
        (_cat_of_few, {"cat": 2, "stack": 0}),
        (_copy_in_another_order, {"stack": 2, "clone": 1}),
        (_equal_sums, {"sum": 4}),
        (_views_of_one, {}),
    ],
)
def test_values_stay_and_steps_go(function, kinds):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    with torch.no_grad(), _torch.overrides_off():
        graph = simplified(_torch.traced(torch.func.functionalize(function), [x]))
    found = graph(x)
    for mine, want in zip(found, function(x), strict=True):
        torch.testing.assert_close(mine, want)
    names = [operation(node) for node in graph.graph.nodes]
    assert {kind: names.count(kind) for kind in kinds} == kinds
    if function is _equal_sums:
        assert len({_torch.memory_key(one) for one in found}) == len(found)


def test_random_numbers_are_drawn_as_often_as_before():
    def function(x):
        return [torch.rand_like(x) - torch.rand_like(x)]

    x = torch.zeros(50)
    with torch.no_grad(), _torch.overrides_off():
        graph = simplified(_torch.traced(function, [x]))
    assert graph(x)[0].abs().max() > 0
