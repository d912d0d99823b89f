"""Gaussian noise from a ChaCha20 key stream, added to a sum and divided in the same pass over memory.

Each program makes 64-byte blocks of key stream: eight words for radii, and the eight that belong to them for angles.
"""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

import math
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES: Final = 128
_TO_UNIT: tl.constexpr = tl.constexpr(2.0**-63)
_TO_ANGLE: tl.constexpr = tl.constexpr(math.pi * 2.0**-63)


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(state_ptr, index, like):
    """One 32-bit word of the state, the same in every lane."""
    return like + tl.load(state_ptr + index).to(tl.uint32)


@triton.jit
def _long(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def key_stream(state_ptr, stream, counter):
    """Return the eight 64-bit words of ChaCha20 blocks: one state and stream for all lanes, a counter for each."""
    zero = counter ^ counter
    s0 = _word(state_ptr, 0, zero)
    s1 = _word(state_ptr, 1, zero)
    s2 = _word(state_ptr, 2, zero)
    s3 = _word(state_ptr, 3, zero)
    s4 = _word(state_ptr, 4, zero)
    s5 = _word(state_ptr, 5, zero)
    s6 = _word(state_ptr, 6, zero)
    s7 = _word(state_ptr, 7, zero)
    s8 = _word(state_ptr, 8, zero)
    s9 = _word(state_ptr, 9, zero)
    s10 = _word(state_ptr, 10, zero)
    s11 = _word(state_ptr, 11, zero)
    s12 = counter
    s13 = _word(state_ptr, 13, zero)
    s14 = _word(state_ptr, 14, zero)
    s15 = zero + stream
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    w0, w1, w2, w3 = _long(x0 + s0, x1 + s1), _long(x2 + s2, x3 + s3), _long(x4 + s4, x5 + s5), _long(x6 + s6, x7 + s7)
    w4, w5 = _long(x8 + s8, x9 + s9), _long(x10 + s10, x11 + s11)
    w6, w7 = _long(x12 + s12, x13 + s13), _long(x14 + s14, x15 + s15)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def normal_pair(radius, angle):
    """Return two independent normal values for each pair of uniform 64-bit words, float64; none beyond 9.42."""
    uniform = ((radius & 0x7FFFFFFFFFFFFFFF).to(tl.int64).to(tl.float64) + 0.5) * _TO_UNIT
    length = tl.sqrt(-2.0 * tl.log(uniform))
    turn = angle.to(tl.int64, bitcast=True).to(tl.float64) * _TO_ANGLE
    return length * tl.cos(turn), length * tl.sin(turn)


@triton.jit
def _add_at(sum_ptr, within, start, size, offset, count, value, std, divisor):
    """Add to the elements that the block and the part at hand have in common."""
    place = start + within - offset
    mask = (within < size) & (place >= 0) & (place < count)
    given = tl.load(sum_ptr + place, mask=mask, other=0.0)
    noisy = (given.to(tl.float64) + value * std) / divisor
    tl.store(sum_ptr + place, noisy.to(given.dtype), mask=mask)


@triton.jit
def _emit(sum_ptr, radius, angle, within, half, start, size, offset, count, std, divisor):
    cosine, sine = normal_pair(radius, angle)
    inside = tl.where(within < half, within, size)
    _add_at(sum_ptr, inside, start, size, offset, count, cosine, std, divisor)
    _add_at(sum_ptr, inside + half, start, size, offset, count, sine, std, divisor)


@triton.jit
def _one_of(index, x0, x1, x2, x3, x4, x5, x6, x7, y0, y1, y2, y3, y4, y5, y6, y7):
    """The word with a number in [0, 16), which is the same in every lane."""
    odd = index % 2 == 1
    p0, p1, p2, p3 = tl.where(odd, x1, x0), tl.where(odd, x3, x2), tl.where(odd, x5, x4), tl.where(odd, x7, x6)
    p4, p5, p6, p7 = tl.where(odd, y1, y0), tl.where(odd, y3, y2), tl.where(odd, y5, y4), tl.where(odd, y7, y6)
    two = index // 2 % 2 == 1
    q0, q1, q2, q3 = tl.where(two, p1, p0), tl.where(two, p3, p2), tl.where(two, p5, p4), tl.where(two, p7, p6)
    four = index // 4 % 2 == 1
    return tl.where(index // 8 % 2 == 1, tl.where(four, q3, q2), tl.where(four, q1, q0))


@triton.jit
def _add_noise(
    sum_ptr,
    state_ptr,
    scales_ptr,
    first_block,
    block_size,
    total,
    offset,
    count,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
):
    number = first_block + tl.program_id(0).to(tl.int64)
    start = number * block_size
    size = tl.minimum(block_size, total - start).to(tl.int64)
    half = (size + size % 2) // 2
    std = tl.load(scales_ptr)
    divisor = tl.load(scales_ptr + 1)
    stream = (number * 256).to(tl.uint32)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    at = lane.to(tl.int64) * 8
    counter = (lane + half // 8).to(tl.uint32)
    r0, r1, r2, r3, r4, r5, r6, r7 = key_stream(state_ptr, stream, lane.to(tl.uint32))
    a0, a1, a2, a3, a4, a5, a6, a7 = key_stream(state_ptr, stream, counter)
    if not ALIGNED:
        # The angles begin in the middle of a block of key stream, so that each lane needs parts of two.
        b0, b1, b2, b3, b4, b5, b6, b7 = key_stream(state_ptr, stream, (lane + half // 8 + 1).to(tl.uint32))
        k = half % 8
        c0 = _one_of(k, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c1 = _one_of(k + 1, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c2 = _one_of(k + 2, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c3 = _one_of(k + 3, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c4 = _one_of(k + 4, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c5 = _one_of(k + 5, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c6 = _one_of(k + 6, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        c7 = _one_of(k + 7, a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7)
        a0, a1, a2, a3, a4, a5, a6, a7 = c0, c1, c2, c3, c4, c5, c6, c7
    _emit(sum_ptr, r0, a0, at, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r1, a1, at + 1, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r2, a2, at + 2, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r3, a3, at + 3, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r4, a4, at + 4, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r5, a5, at + 5, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r6, a6, at + 6, half, start, size, offset, count, std, divisor)
    _emit(sum_ptr, r7, a7, at + 7, half, start, size, offset, count, std, divisor)


def add_noise(
    part_N: Tensor, state: Sequence[int], scales: tuple[float, float], extent: tuple[int, int], block_size: int
) -> Tensor:
    """Replace a part of a tensor by (itself + noise) / divisor, in place; the tensor's noise is addressed by block.

    Args:
        part_N: Contiguous, one-dimensional, float32 or float64.
        state: The 16 words of ChaCha20's first state (constants, key, counter, nonce).
        scales: Standard deviation of the noise, and the divisor.
        extent: Where the part begins in the whole tensor, and how many elements the whole has.
        block_size: Elements in a block of noise; a multiple of 16.

    Returns:
        ``part_N``.
    """
    offset, total = extent
    count = part_N.numel()
    if count == 0:
        return part_N
    words = torch.tensor(list(state), dtype=torch.int64).to(part_N.device)
    numbers = torch.tensor(scales, dtype=torch.float64).to(part_N.device)
    first, end = offset // block_size, triton.cdiv(offset + count, block_size)
    whole = min(end, total // block_size)

    def launch(start: int, stop: int, size: int) -> None:
        lanes = min(_LANES, triton.next_power_of_2(triton.cdiv(size, 16)))
        half = (size + 1) // 2
        grid = (stop - start, triton.cdiv(half, 8 * lanes))
        arguments = (part_N, words, numbers, start, block_size, total, offset, count)
        _add_noise[grid](*arguments, ALIGNED=half % 8 == 0, LANES=lanes, num_warps=4)

    if whole > first:
        launch(first, whole, block_size)
    if end > whole:
        launch(max(first, whole), end, total - whole * block_size)
    return part_N
