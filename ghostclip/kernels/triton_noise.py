"""Triton kernel of Gaussian noise from a ChaCha key stream, added to a sum and divided in the same pass over memory.

Each program makes 64-byte blocks of key stream: eight words for radii, and the eight that belong to them for angles.
Loaded when it is first used, as all modules that import Triton.
"""

import math
import struct
from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs


_LANES: Final = 128
_TO_UNIT: tl.constexpr = tl.constexpr(2.0**-63)
_TO_ANGLE: tl.constexpr = tl.constexpr(math.pi * 2.0**-63)


@triton.jit
def _rotated(x, by: tl.constexpr):
    """Rotate a 32-bit word to the left."""
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    """One quarter round of ChaCha."""
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
def _long(low, high):
    """Return a 64-bit word of two 32-bit ones."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _spread(word, like):
    """One 32-bit word, the same in every lane."""
    return like + word.to(tl.uint32, bitcast=True)


@triton.jit
def key_stream(k0, k1, k2, k3, k4, k5, k6, k7, low, high, stream, counter, ROUNDS: tl.constexpr):
    """Return the eight 64-bit words of ChaCha blocks: one key and nonce for all lanes, a counter for each."""
    zero = counter ^ counter
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = _spread(k0, zero), _spread(k1, zero), _spread(k2, zero), _spread(k3, zero)
    s8, s9, s10, s11 = _spread(k4, zero), _spread(k5, zero), _spread(k6, zero), _spread(k7, zero)
    s12, s13, s14, s15 = counter, _spread(low, zero), _spread(high, zero), zero + stream
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in range(ROUNDS // 2):
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
def _side_by_side(w0, w1, w2, w3, w4, w5, w6, w7):
    """Eight words of each lane as one tile, so that a lane reads and writes eight neighbours at once."""
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), (w0.shape[0], 8))


@triton.jit
def _add_at(sum_ptr, index, valid, count, value, std, divisor, DIVIDE: tl.constexpr):
    """Add to the elements that the block and the part at hand have in common."""
    mask = valid & (index >= 0) & (index < count)
    total = tl.load(sum_ptr + index, mask=mask, other=0.0)
    noisy = (value * std + total.to(tl.float64)).to(total.dtype)
    if DIVIDE:
        # The quotient of two numbers of the tensor's type, rounded as the standard says.
        if total.dtype == tl.float32:
            noisy = tl.div_rn(noisy, divisor.to(tl.float32))
        else:
            noisy = noisy / divisor
    tl.store(sum_ptr + index, noisy, mask=mask)


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
def _double(low, high):
    """The float64 number from two 32-bit words, as numbers passed to a kernel arrive in float32."""
    bits = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
    return bits.to(tl.float64, bitcast=True)


_VARYING: Final = (
    *("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "low", "high", "std_low", "std_high", "by_low", "by_high"),
    *("first_block", "total", "count"),
)


@triton.jit(do_not_specialize=_VARYING)
def _add_noise(
    sum_ptr,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    low,
    high,
    std_low,
    std_high,
    by_low,
    by_high,
    first_block,
    total,
    offset,
    count,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    DIVIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add noise to a range and divide; a program makes one part of a block's noise from its key stream."""
    number = first_block + tl.program_id(0).to(tl.int64)
    start = number * BLOCK
    size = tl.minimum(total - start, BLOCK).to(tl.int64)
    half = (size + size % 2) // 2
    std = _double(std_low, std_high)
    divisor = _double(by_low, by_high)
    stream = (number * 256).to(tl.uint32)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    r0, r1, r2, r3, r4, r5, r6, r7 = key_stream(
        k0, k1, k2, k3, k4, k5, k6, k7, low, high, stream, lane.to(tl.uint32), ROUNDS
    )
    counter = (lane + half // 8).to(tl.uint32)
    a0, a1, a2, a3, a4, a5, a6, a7 = key_stream(k0, k1, k2, k3, k4, k5, k6, k7, low, high, stream, counter, ROUNDS)
    if not ALIGNED:
        # The angles begin in the middle of a block of key stream, so that each lane needs parts of two.
        b0, b1, b2, b3, b4, b5, b6, b7 = key_stream(
            k0, k1, k2, k3, k4, k5, k6, k7, low, high, stream, counter + 1, ROUNDS
        )
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
    radius = _side_by_side(r0, r1, r2, r3, r4, r5, r6, r7)
    angle = _side_by_side(a0, a1, a2, a3, a4, a5, a6, a7)
    cosine, sine = normal_pair(radius, angle)
    within = lane.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
    index = start - offset + within
    valid = within < half
    _add_at(sum_ptr, index, valid, count, cosine, std, divisor, DIVIDE)
    _add_at(sum_ptr, index + half, valid & (within + half < size), count, sine, std, divisor, DIVIDE)


def _words(number: float) -> tuple[int, int]:
    """Return the bits of a float64 number as two signed 32-bit words, the low one first."""
    low, high = struct.unpack("<2i", struct.pack("<d", number))
    return low, high


def add_noise(
    part_N: Tensor, state: Sequence[int], scales: tuple[float, float], extent: tuple[int, int], stream: tuple[int, int]
) -> Tensor:
    """Replace a range of a flattened tensor by (itself + noise) / divisor, in place."""
    # state: ChaCha's 16 words. scales: (std of the noise, divisor). extent: (where the range begins, size of the whole
    # tensor). stream: (elements in a block of noise, rounds of ChaCha).
    offset, total = extent
    block_size, rounds = stream
    count = part_N.numel()
    if count == 0:
        return part_N
    words = [word - (word >> 31 << 32) for word in (*state[4:12], *state[13:15])]
    numbers = [word for scale in scales for word in _words(scale)]
    first, end = offset // block_size, triton.cdiv(offset + count, block_size)
    # Angles of the last block, if that is smaller, begin with a block of key stream or in the middle of one.
    rest = total % block_size
    whole = end if (rest + 1) // 2 % 8 == 0 else min(end, total // block_size)

    def launch(start: int, stop: int, size: int) -> None:
        lanes = min(_LANES, triton.next_power_of_2(triton.cdiv(size, 16)))
        grid = (stop - start, triton.cdiv(size, 16 * lanes))
        options = {"BLOCK": block_size, "ROUNDS": rounds, "DIVIDE": scales[1] != 1, "LANES": lanes}
        arguments = (part_N, *words, *numbers, start, total, offset, count)
        _add_noise[grid](*arguments, ALIGNED=(size + 1) // 2 % 8 == 0, num_warps=4, **options)

    if whole > first:
        launch(first, whole, min(block_size, -(-total // 16) * 16))
    if end > whole:
        launch(max(first, whole), end, rest)
    return part_N
