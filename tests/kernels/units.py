"""Matrix units as they are known to add, on a CPU: products exact, sixteen at a time, cut off and not rounded."""

from __future__ import annotations

import torch
from torch import Tensor

# Products that are added at a time, and bits behind the last place of the largest that are kept while numbers are
# aligned to it.
HOPPER, AMPERE = (16, 2), (8, 1)


def cut_off(x: Tensor, place: Tensor) -> Tensor:
    """Return numbers without what lies below a power of two, towards zero."""
    return (x / place).trunc() * place


def _last_place(x: Tensor, bits: int) -> Tensor:
    exponent = torch.frexp(x).exponent - bits
    return torch.ldexp(torch.ones_like(x), exponent.clamp(min=-1000))


def product(left_NTF: Tensor, right_NFU: Tensor, kind: tuple[int, int] = HOPPER) -> Tensor:
    """Return the products of matrices as such units leave them, float32."""
    step, extra = kind
    left, right = left_NTF.double(), right_NFU.double()
    total = left.new_zeros(*left.shape[:2], right.shape[2])
    for start in range(0, left.shape[2], step):
        piece = slice(start, start + step)
        terms = left[:, :, None, piece] * right[:, piece].mT[:, None]
        terms = torch.cat([total.unsqueeze(3), terms], 3)
        largest = terms.abs().amax(3, keepdim=True)
        aligned = cut_off(terms, _last_place(largest, 24 + extra)).sum(3)
        total = cut_off(aligned, _last_place(aligned, 24))
    return total.float()


class Emulated:
    """Stands in for the CUDA kernels of products of 16-bit matrices with a float32 result, on the CPU.

    Attributes:
        calls: How often one was run.
        kind: Which units.
    """

    def __init__(self) -> None:
        self.calls, self.kind = 0, HOPPER
        self._library = torch.library.Library("aten", "IMPL")
        for name, kernel in (("bmm.dtype", self._bmm), ("mm.dtype", self._mm), ("mm.dtype_out", self._mm_out)):
            self._library.impl(name, kernel, "CPU")
        for name in ("addmm.dtype_out", "baddbmm.dtype_out"):
            self._library.impl(name, self._added_out, "CPU")

    def close(self) -> None:
        """Take the kernels away again."""
        self._library._destroy()

    def _bmm(self, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype
        assert left.dtype in (torch.bfloat16, torch.float16)
        assert out_dtype == torch.float32
        self.calls += 1
        return product(left, right, self.kind)

    def _mm(self, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._bmm(left.unsqueeze(0), right.unsqueeze(0), out_dtype).squeeze(0)

    def _mm_out(self, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(self._mm(left, right, out_dtype))

    def _added_out(
        self,
        added: Tensor,
        left: Tensor,
        right: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: Tensor,
    ) -> Tensor:
        form = self._mm if left.dim() == 2 else self._bmm
        return out.copy_(beta * added + alpha * form(left, right, out_dtype))
