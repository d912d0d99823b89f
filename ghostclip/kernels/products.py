"""Products of matrices in float32 at least: which are widened, which matrix units take, and in what precision they run.

Matrix units of a GPU multiply 16-bit numbers some ten times as fast as float32, and a product of two such numbers is
exact in float32. What they are given as it is comes out in float32; what they may lose is in `bounds`. Products in
float32 are products in float32, whatever precision was chosen for the model's own.

Shape letters: N samples (times slots), T positions, F features, U columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ghostclip.kernels.bounds import HALF, UNIT_CHAIN, widened
from ghostclip.kernels.runtime import traced

_OUT_DTYPE: Final = "dtype" in torch.ops.aten.bmm.overloads()
# Before, what is added to had to be of 16 bits, or was not read (torch, pull request 167931).
_ADDS: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
# Loads of matrix units are of so many bytes; rows that begin elsewhere are loaded number by number.
_ALIGNED: Final = 16
# Bytes of a line of a CPU's cache, at multiples of which memory is allocated.
_LINE: Final = 64
_FIRST: Final = (8, 0)
"""Compute capability of the first GPUs whose matrix units take bfloat16."""


def has_units(device: torch.device) -> bool:
    """Return whether a device multiplies 16-bit matrices into float32."""
    return device.type == "cuda" and _OUT_DTYPE and _suits(device)


@lru_cache(maxsize=64)
def _suits(device: torch.device) -> bool:
    """Return whether a GPU's matrix units take bfloat16."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _FIRST


def on_units(left: Tensor, right: Tensor) -> bool:
    """Return whether matrix units multiply these two tensors as they are: 16 bits, one dtype, on such a GPU."""
    dtype = left.dtype
    return dtype in HALF and dtype == right.dtype and has_units(left.device)


def operand(x_NTF: Tensor) -> Tensor:
    """Return the tensor as products take it, aligned for matrix units or widened to 32 bits at least."""
    return aligned(x_NTF) if on_units(x_NTF, x_NTF) else widened(x_NTF)


def is_taken(x_NTF: Tensor) -> bool:
    """Return whether matrix units read a tensor where it lies: 16 bits, rows or columns at multiples of 16 bytes."""
    if not on_units(x_NTF, x_NTF):
        return False
    per_load = _ALIGNED // x_NTF.element_size()
    samples, across, along = x_NTF.stride()
    return samples % per_load == 0 and (
        (along == 1 and across % per_load == 0) or (across == 1 and along % per_load == 0)
    )


def aligned(x_NTF: Tensor) -> Tensor:
    """Return a 16-bit tensor whose rows begin at multiples of 16 bytes."""
    # Copies begin at multiples of 32 bytes, so that our own kernels read them as they are, too (V = 50,257).
    features, per_load = x_NTF.shape[2], _ALIGNED // x_NTF.element_size()
    if is_taken(x_NTF) or x_NTF.numel() == 0 or features < per_load:
        return x_NTF
    width = -(-features // (2 * per_load)) * 2 * per_load
    return x_NTF.new_empty(*x_NTF.shape[:2], width)[:, :, :features].copy_(x_NTF)


def batched(left_NTF: Tensor, right_NFU: Tensor) -> Tensor:
    """Return the product of each pair of matrices in float32 at least."""
    # Matrix units form it in sums of `UNIT_CHAIN` products.
    if left_NTF.dtype == right_NFU.dtype == torch.float32:
        return torch.bmm(left_NTF, right_NFU)
    if not on_units(left_NTF, right_NFU):
        return torch.bmm(widened(left_NTF), widened(right_NFU))
    pairs = zip(left_NTF.split(UNIT_CHAIN, 2), right_NFU.split(UNIT_CHAIN, 1), strict=True)
    total_NTU: Tensor | None = None
    for left, right in pairs:
        if total_NTU is None:
            total_NTU = torch.bmm(left, right, out_dtype=torch.float32)
        elif _adds():
            torch.baddbmm(total_NTU, left, right, out_dtype=torch.float32, out=total_NTU)
        else:
            total_NTU.add_(torch.bmm(left, right, out_dtype=torch.float32))
    assert total_NTU is not None
    return total_NTU


def _adds() -> bool:
    """Return whether a product may be added to float32 as it is formed: not where operations are traced."""
    # There torch takes the type of the result for the factor of what is added to.
    return _ADDS and not traced()


def empty_rows(like: Tensor, samples: int, size: int) -> Tensor:
    """Return empty memory ``(N, size)`` in which each sample's row begins with a line of the cache."""
    # On a CPU, a product adds up in another order where its result begins within a line, so that rounding of a sample's
    # gradient would depend on its place in the batch.
    per_line = _LINE // like.element_size()
    if like.device.type != "cpu" or size % per_line == 0:
        return like.new_empty(samples, size)
    return like.new_empty(samples, -(-size // per_line) * per_line)[:, :size]


def pair_by_pair(left_NTF: Tensor, right_NFU: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of each pair of matrices, on a CPU with the same bits in a batch of any size."""
    # `out` comes from `empty_rows`; on a CPU the samples of the result may have gaps between them.
    if on_units(left_NTF, right_NFU):
        product_NTU = batched(left_NTF, right_NFU)
        return product_NTU if out is None else out.copy_(product_NTU)
    left_NTF, right_NFU = widened(left_NTF), widened(right_NFU)
    samples, rows, columns = len(left_NTF), left_NTF.shape[1], right_NFU.shape[2]
    if left_NTF.device.type == "cpu":
        if right_NFU.stride(2) != 1 and not (_begins_lines(left_NTF) and _begins_lines(right_NFU)):
            # Sums along both operands are cut where lines begin.
            right_NFU = right_NFU.contiguous()
        if out is None and rows * columns * left_NTF.element_size() % _LINE != 0:
            out = empty_rows(left_NTF, samples, rows * columns).unflatten(1, (rows, columns))
    return torch.bmm(left_NTF, right_NFU) if out is None else torch.bmm(left_NTF, right_NFU, out=out)


def _begins_lines(x_NTF: Tensor) -> bool:
    """Return whether each sample's numbers begin with a line of the cache."""
    size = x_NTF.element_size()
    return x_NTF.stride(0) * size % _LINE == 0 and x_NTF.storage_offset() * size % _LINE == 0


def add_product_(out_OI: Tensor, left_OT: Tensor, right_TI: Tensor, *, fresh: bool = False, sign: int = 1) -> None:
    """Add the product of two 16-bit matrices to a float32 one, on matrix units."""
    # ``fresh`` overwrites and needs sign 1.
    if fresh:
        torch.mm(left_OT, right_TI, out_dtype=torch.float32, out=out_OI)
    elif _adds():
        torch.addmm(out_OI, left_OT, right_TI, out_dtype=torch.float32, alpha=sign, out=out_OI)
    else:
        out_OI.add_(torch.mm(left_OT, right_TI, out_dtype=torch.float32), alpha=sign)


_Switch: TypeAlias = tuple[Any, str, tuple[Any, ...]]
"""What decides on precision: where it lies, its name, and the values of full precision, the one that is set first."""

_AS_IT_IS: Final = nullcontext()
# Devices for which autocast may be on.
_KINDS: Final = ("cpu", "cuda")


def full_precision() -> AbstractContextManager[None]:
    """Return a context in which neither backends nor autocast round the operands of norms and clipped sums."""
    # torch.set_float32_matmul_precision("high"), usual in training scripts, rounds operands of a product to 10 bits,
    # "medium" and autocast to 7: norms would be too small by 3e-4. The model's own forward and backward keep what was
    # chosen for them, so that this is entered for every layer. Of torch's other switches, those of reductions in 16
    # bits do not matter to products with a float32 result.
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            return _without_autocast()
    for owner, name, full in _switches():
        if getattr(owner, name) not in full:
            return _full(_switches())
    return _AS_IT_IS


def full_convolutions() -> AbstractContextManager[None]:
    """Return a context that does for convolutions what `full_precision` does for products; GPUs use TF32 by default."""
    return _full(_convolution_switches())


def _full(switches: Sequence[_Switch]) -> AbstractContextManager[None]:
    """Return a context in which these switches are at full precision."""
    lower = [switch for switch in switches if getattr(switch[0], switch[1]) not in switch[2]]
    return _switched(lower) if lower else _AS_IT_IS


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Within the block autocast is off and products run at full precision."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, _KINDS):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_full(_switches()))
        yield


@contextmanager
def _switched(switches: Sequence[_Switch]) -> Iterator[None]:
    """Set switches to full precision within the block."""
    before = [getattr(owner, name) for owner, name, _ in switches]
    for owner, name, full in switches:
        setattr(owner, name, full[0])
    try:
        yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


@lru_cache(maxsize=1)
def _switches() -> list[_Switch]:
    """Return the switches of matrix products' precision that this version of torch has."""
    backends: Any = torch.backends
    gpu = backends.cuda.matmul
    if not hasattr(backends.cudnn, "conv"):
        return [(gpu, "allow_tf32", (False,)), (_MatmulPrecision(), "chosen", ("highest",)), *_accumulation(gpu)]
    # The newer switches; reading the older ones is an error where somebody used the newer. "none" says that nobody
    # chose anything, here or for all backends, which on a GPU is not always full precision.
    cpu = (backends.mkldnn.matmul, "fp32_precision", ("ieee", "none"))
    return [cpu, (gpu, "fp32_precision", ("ieee",)), *_accumulation(gpu)] if backends.cuda.is_built() else [cpu]


def _accumulation(gpu: Any) -> list[_Switch]:
    """Return the switch of sums in float16, where there is one."""
    # Sums of float16 products in float16, from torch 2.7 on.
    return [(gpu, "allow_fp16_accumulation", (False,))] if hasattr(gpu, "allow_fp16_accumulation") else []


@lru_cache(maxsize=1)
def _convolution_switches() -> list[_Switch]:
    """Return the switches of convolutions' precision."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return [(backends.cudnn, "allow_tf32", (False,))]
    cpu = (backends.mkldnn.conv, "fp32_precision", ("ieee", "none"))
    return [cpu, (backends.cudnn.conv, "fp32_precision", ("ieee",))] if backends.cuda.is_built() else [cpu]


class _MatmulPrecision:
    """The one switch of torch before 2.9 for products on CPUs."""

    @property
    def chosen(self) -> str:
        """What was chosen."""
        return torch.get_float32_matmul_precision()

    @chosen.setter
    def chosen(self, value: str) -> None:
        torch.set_float32_matmul_precision(value)
