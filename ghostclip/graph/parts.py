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
    """A part of a batch.

    Attributes:
        start: Its first sample.
        samples: How many it has.
        size: Its size with padding.
    """

    start: int
    samples: int
    size: int


class Sizes:
    """The sizes of physical batches."""

    def __init__(self, given: Sequence[int] | None) -> None:
        """Take the sizes that were given.

        Args:
            given: Sizes; None to take that of the first batch and a quarter of it.
        """
        self._fixed = given is not None
        self._sizes = sorted(set(given or ()), reverse=True)

    def parts(self, samples: int) -> list[Part]:
        """Cut a batch.

        Args:
            samples: B, at least 1.

        Returns:
            Its parts, the largest first; only the last one is padded.
        """
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
        """Return the largest size that is filled, or the smallest one that takes all that is left as cheaply."""
        filled = next((size for size in self._sizes if size <= left), self._sizes[-1])
        in_several = -(-left // filled) * filled
        return next((size for size in reversed(self._sizes) if left <= size <= in_several), filled)


def part_of(tree: Any, part: Part, whole: int, axis_of: Callable[[Any], int | None], *, padded: bool) -> Any:
    """Return a part of a batch.

    Args:
        tree: The batch.
        part: Which part.
        whole: Samples of the batch.
        axis_of: Says along which axis a tensor holds samples; None for one that all share.
        padded: Whether to pad it to its size.

    Returns:
        The same containers, tensors contiguous where padded.
    """
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
    """Return a batch with its last sample once more.

    Args:
        tree: The batch.
        axis_of: As for `part_of`.

    Returns:
        The same containers.
    """

    def more(leaf: Any) -> Any:
        axis = axis_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if axis is None else torch.cat([leaf, leaf.narrow(axis, leaf.shape[axis] - 1, 1)], axis)

    return _tree.mapped(more, tree)
