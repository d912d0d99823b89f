"""Batches of any size in parts of few sizes: what graphs are compiled for.

The last part is padded by repeating its last sample. A padding sample has coefficient 0, and its values are those of a
sample that counts: it adds exactly nothing to a sum, to counts or to norms that are looked at.

Shape letters: B samples, P of a padded part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip import _tree

_SMALLER = 4


class Part(NamedTuple):
    """Part of a batch: its first sample, number of samples, and size with padding."""

    start: int
    samples: int
    size: int


class Sizes:
    """The sizes of physical batches."""

    def __init__(self, given: Sequence[int] | None) -> None:
        self._fixed = given is not None
        self._sizes = sorted(set(given or ()), reverse=True)

    @property
    def all(self) -> tuple[int, ...]:
        """The sizes, the largest first."""
        return tuple(self._sizes)

    def parts(self, samples: int) -> list[Part]:
        """Return the parts of a batch, the largest first; only the last one is padded."""
        if not self._fixed and (not self._sizes or samples >= 2 * self._sizes[0]):
            self._sizes = sorted({max(2, samples), max(2, -(-samples // _SMALLER))}, reverse=True)
        found: list[Part] = []
        start = 0
        while start < samples:
            size = self._next(samples - start)
            count = min(size, samples - start)
            found.append(Part(start, count, size))
            start += count
        return found

    def _next(self, left: int) -> int:
        """Return the largest size that is filled, or the smallest one that takes all remaining samples as cheaply."""
        filled = next((size for size in self._sizes if size <= left), self._sizes[-1])
        in_several = -(-left // filled) * filled
        return next((size for size in reversed(self._sizes) if left <= size <= in_several), filled)


def part_of(tree: Any, part: Part, whole: int, axis_of: Callable[[Any], int | None], *, padded: bool) -> Any:
    """Return a part of a batch in the same containers, contiguous where padded to its size."""
    size = part.size if padded else part.samples

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        axis = axis_of(leaf)
        if axis is None:
            return leaf.contiguous() if padded else leaf
        rows = leaf if part.samples == whole else leaf.narrow(axis, part.start, part.samples)
        if size > part.samples:
            last = rows.narrow(axis, part.samples - 1, 1)
            rows = torch.cat([rows, last.expand(*_sizes(last, axis, size - part.samples))], axis)
        return rows.contiguous() if padded else rows

    return _tree.mapped(taken, tree)


def _sizes(tensor: Tensor, axis: int, size: int) -> Iterator[int]:
    for place, own in enumerate(tensor.shape):
        yield size if place == axis else own


def repeated(tree: Any, axis_of: Callable[[Any], int | None]) -> Any:
    """Return a batch with its last sample once more."""

    def more(leaf: Any) -> Any:
        axis = axis_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if axis is None else torch.cat([leaf, leaf.narrow(axis, leaf.shape[axis] - 1, 1)], axis)

    return _tree.mapped(more, tree)
