"""Per-sample gradients of a stack of matrices, one factor for each: the experts of a mixture."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.factors.base import Factor, SquaredNorm, Terms, no_error, rows_of, terms_side_by_side
from ghostclip.factors.dense import Dense


class Stacked(Factor):
    """The gradient of ``parameter[e]`` is ``parts[e]``'s; slices without a part receive nothing."""

    def __init__(self, parts: Mapping[int, Factor], *, shape: Sequence[int], like: Tensor) -> None:
        # `parts`: factor of each used slice along the first axis. `like` has the batch as first axis, and device and
        # dtype.
        self.parts = dict(parts)
        self.shape = torch.Size(shape)
        self.batch_size = like.shape[0]
        self._zero_B = like.new_zeros(like.shape[0], dtype=torch.promote_types(like.dtype, torch.float32))

    def sqnorm(self) -> SquaredNorm:
        """Return the sum of the parts' squared norms: slices do not overlap."""
        norms = [part.sqnorm() for part in self.parts.values()]
        if not norms:
            return no_error(self._zero_B)
        errors = [norm.error_B for norm in norms if norm.error_B is not None]
        value_B = sum_tensors([norm.value_B for norm in norms])
        return SquaredNorm(value_B, sum_tensors(errors) if errors else None, self._together([n.terms for n in norms]))

    def terms(self) -> Terms | None:
        return self._together([part.terms() for part in self.parts.values()])

    def _together(self, found: Sequence[Terms | None]) -> Terms | None:
        return terms_side_by_side([terms for terms in found if terms is not None], self._zero_B.device)

    def materialize(self) -> Tensor:
        full = self._zero_B.new_zeros(self.batch_size, *self.shape)
        for number, part in self.parts.items():
            full[:, number] = part.materialize()
        return full

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        for number, part in self.parts.items():
            part.add_clipped_sum_(coef_B, out[number])

    def masked(self, keep_B: Tensor) -> "Stacked":
        parts = {number: part.masked(keep_B) for number, part in self.parts.items()}
        return Stacked(parts, shape=self.shape, like=self._zero_B)

    def selected(self, index_D: Tensor) -> "Stacked":
        parts = {number: part.selected(index_D) for number, part in self.parts.items()}
        return Stacked(parts, shape=self.shape, like=rows_of(self._zero_B, index_D))

    def in_double(self) -> "Stacked":
        parts = {number: part.in_double() for number, part in self.parts.items()}
        return Stacked(parts, shape=self.shape, like=self._zero_B.double())

    def reshaped(self, shape: Sequence[int]) -> Factor:
        if torch.Size(shape) == self.shape:
            return self
        return Dense(self.materialize()).reshaped(shape)

    def with_parts(self, parts: Mapping[int, Factor], shape: Sequence[int]) -> "Stacked":
        """Return a stack of other parts with this one's batch size, device and dtype."""
        return Stacked(parts, shape=shape, like=self._zero_B)

    def element_count(self) -> int:
        return sum(part.element_count() for part in self.parts.values())


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape (at least one)."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
