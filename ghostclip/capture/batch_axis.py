"""Which rows of a tensor belong to which sample.

Rows are the leading axes of a layer's input and output (everything but its features). A *row map* sends them to the
canonical layout ``(B, T, ...)``. Shapes suggest candidates; the call site remembers which one the evidence of the
probe confirmed, so that a coincidence of sizes later on cannot change it.

Shape letters: B samples, T positions of a sample, L the leading (row) axes, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowMap:
    """Map from the rows along one axis of a tensor to samples."""

    # "axis" (one row per sample), "major" (folded, all rows of a sample consecutive), "minor" (folded, samples
    # alternate), "whole" (one sample owns everything), "gathered", or "one" (everything belongs to one of the samples)
    kind: str
    axis: int = 0
    # for ``"gathered"`` and ``"one"``: the sample of every row, shape ``(n,)`` or ``(1,)``, int64
    samples: Tensor | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The part of the map that a call site remembers."""
        return self.kind, self.axis

    @property
    def gathering(self) -> str:
        """How rows were gathered: not at all, in the batch's order, or in another; each is proved for itself."""
        if self.samples is None or self.kind != "gathered":
            return ""
        in_order = torch.equal(self.samples, self.samples.sort().values)
        return "in order" if in_order else "in another order"

    def split(self, tensor: Tensor, num_batch_dims: int, batch_size: int) -> Tensor:
        """Return a tensor ``(*L, *F)`` as ``(B, T, *F)``, shorter samples padded with zeros."""
        if num_batch_dims == 1 and self.kind == "axis":
            return tensor.unsqueeze(1)
        if num_batch_dims == 2 and self.kind == "axis" and not self.axis:
            return tensor
        features = tensor.shape[num_batch_dims:]
        if self.kind == "whole":
            return tensor.reshape(1, -1, *features)
        if self.kind == "gathered":
            return self._pack(tensor.movedim(self.axis, 0), num_batch_dims, batch_size)
        axis, size = self.axis, tensor.shape[self.axis]
        if self.kind == "major":
            tensor = tensor.unflatten(axis, (batch_size, size // batch_size))
        elif self.kind == "minor":
            tensor = tensor.unflatten(axis, (size // batch_size, batch_size))
            axis += 1
        if axis:
            tensor = tensor.movedim(axis, 0)
        positions = prod(tensor.shape[1 : tensor.dim() - len(features)])
        return tensor.reshape(batch_size, positions, *features)

    def _pack(self, tensor: Tensor, num_batch_dims: int, batch_size: int) -> Tensor:
        assert self.samples is not None
        order = torch.argsort(self.samples, stable=True)
        counts_B = torch.bincount(self.samples, minlength=batch_size)
        first_B = torch.cumsum(counts_B, 0) - counts_B
        sample = self.samples[order]
        place = torch.arange(order.numel(), device=order.device) - first_B[sample]
        longest = int(counts_B.max()) if order.numel() else 0
        packed = tensor.new_zeros(batch_size, longest, *tensor.shape[1:])
        packed[sample, place] = tensor[order]
        inner = prod(tensor.shape[1:num_batch_dims])
        return packed.reshape(batch_size, longest * inner, *tensor.shape[num_batch_dims:])

    def samples_of(self, size: int, batch_size: int) -> Tensor:
        """Return the sample of every row along the axis, ``(size,)``, int64."""
        if self.samples is not None:
            return self.samples
        index = torch.arange(size)
        if self.kind == "minor":
            return index % batch_size
        return index // max(1, size // max(1, batch_size)) if batch_size > 1 else torch.zeros_like(index)


def samples_axis(sizes: tuple[int, ...], batch_size: int, axis: int) -> int | None:
    """Return the axis of the samples, as far as sizes tell, or None."""
    # An axis of B entries, else one of several times as many (folded), the expected one first.
    order = [place for place in dict.fromkeys((axis, *range(len(sizes)))) if place < len(sizes)]
    exact = (place for place in order if sizes[place] == batch_size)
    folded = (place for place in sorted(order) if sizes[place] > batch_size and sizes[place] % batch_size == 0)
    return next(exact, next(folded, None))


WHOLE = RowMap("whole")


def candidates(sizes: Sequence[int], batch_size: int, *, axis: int) -> list[RowMap]:
    """Return the row maps that the sizes allow, the expected one first."""
    return list(_candidates(tuple(sizes), batch_size, axis))


@lru_cache(maxsize=4096)
def _candidates(sizes: tuple[int, ...], batch_size: int, axis: int) -> list[RowMap]:
    if batch_size == 1:
        return [WHOLE]
    order = [axis, *(k for k in range(len(sizes)) if k != axis)] if axis < len(sizes) else list(range(len(sizes)))
    exact = [RowMap("axis", k) for k in order if sizes[k] == batch_size]
    if batch_size == 0:
        return exact
    folded = [k for k in order if sizes[k] > batch_size and sizes[k] % batch_size == 0]
    kinds = ("major", "minor") if axis == 0 else ("minor", "major")
    return exact + [RowMap(kind, k) for k in folded for kind in kinds]
