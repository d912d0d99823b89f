"""Floating-point operations of a step, counted and not estimated.

torch's own counter knows products that return a new tensor and passes over those that add into one (`addmm_`), and over
products with a vector. Whoever uses them would look cheaper than they are, so they are counted here. It also counts the
backward of a convolution in groups too often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engines import Runner
from benchmarks.tasks import Batch

Shape = Sequence[int]


@runtime_checkable
class CountsItself(Protocol):
    """A runner whose products torch does not see."""

    def operations(self, batch: Batch) -> int | None:
        """Operations of one step."""


def _product(left: Shape, right: Shape, *_dtype: object, out_shape: Shape | None = None, **_: object) -> int:
    """`left @ right`, also with a dtype of the result, which torch's own formulas do not expect."""
    return 2 * prod(left) * right[-1]


def _product_added(
    _into: Shape, left: Shape, right: Shape, *_scales: object, out_shape: Shape | None = None, **_: object
) -> int:
    """`into + left @ right`, also with leading batch axes on both: two for each element of left and column of right."""
    return 2 * prod(left) * right[-1]


def _product_with_vector(left: Shape, _right: Shape, out_shape: Shape | None = None, **_: object) -> int:
    return 2 * prod(left)


def _product_with_vector_added(
    _into: Shape, left: Shape, *_rest: object, out_shape: Shape | None = None, **_: object
) -> int:
    return 2 * prod(left)


def _outer_product_added(
    _into: Shape, left: Shape, right: Shape, *_scales: object, out_shape: Shape | None = None, **_: object
) -> int:
    return 2 * prod(left) * prod(right)


def _convolution_backward(
    grad_out: Shape, inputs: Shape, weight: Shape, *arguments: Any, out_shape: Any = None, **_: object
) -> int:
    """Gradients of input and kernel, twice the kernel for each position: of the output, or of a transposed one's input.

    torch's own formula counts the kernel's gradient once more for every group.
    """
    transposed, output_mask = arguments[4], arguments[7]
    positions = (inputs if transposed else grad_out)[2:]
    return 2 * inputs[0] * prod(positions) * prod(weight) * (bool(output_mask[0]) + bool(output_mask[1]))


aten = torch.ops.aten
OUR_COUNTS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _product_added,
    aten.baddbmm: _product_added,
    aten.addmm_: _product_added,
    aten.baddbmm_: _product_added,
    aten.addbmm: _product_added,
    aten.addbmm_: _product_added,
    aten.mv: _product_with_vector,
    aten.dot: _product_with_vector,
    aten.vdot: _product_with_vector,
    aten.addmv: _product_with_vector_added,
    aten.addmv_: _product_with_vector_added,
    aten.addr: _outer_product_added,
    aten.addr_: _outer_product_added,
}


def counter() -> FlopCounterMode:
    """A counter that passes over no product of matrices or vectors."""
    return FlopCounterMode(display=False, custom_mapping=OUR_COUNTS)


def count(runner: Runner, batch: Batch) -> int | None:
    """Count the operations of products and convolutions in one step.

    Two steps are counted, and the cheaper one is told: the 1st, 4th, 16th, 64th, ... step of ours proves anew that
    samples keep apart, by further backwards, and no two of these follow each other.
    """
    if isinstance(runner, CountsItself):
        return runner.operations(batch)
    found = []
    for _ in range(2):
        with counter() as counted:
            runner.step(batch)
        found.append(counted.get_total_flops())
    return min(found)
