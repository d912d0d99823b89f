"""Gaussian noise from a ChaCha key stream, added to a clipped sum and divided, addressed by (key, position, element).

With 20 rounds it is the noise of level "secure", whatever the device: block number n of the tensor at a position has
ChaCha20's key, the nonce (position, 256·n) and counters from 0. A range of a tensor gets the same noise from whoever
holds it, so that any number of ranks add one draw.

Key streams are equal to the bit on every device. Logarithm, cosine and sine are those of the device, which differ in
their last places: a standard normal value by less than 2^-48, and so about one of 10^8 sums in float32 by one unit in
the last place. On one kind of device, and on one with and without the kernel, the same holds from run to run.

Shape letters: N elements, W words, S key streams, L blocks of a key stream, R its state's sixteen words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip._validate import non_negative, positive
from ghostclip.errors import InvalidOptionError
from ghostclip.kernels.runtime import Twins, generator

BLOCK: Final = 1 << 15
"""Elements in a block of noise."""

MAX_BLOCKS: Final = 1 << 24
"""Blocks of one tensor: what a nonce tells apart."""

SECURE_ROUNDS: Final = 20
"""Rounds of ChaCha20, RFC 8439."""

FAST_ROUNDS: Final = 8
"""Rounds that leave no statistical trace (nobody has told seven from random): noise of level "fast"."""

_CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MASK: Final = 0xFFFFFFFF
_AT_ONCE: Final = 128
"""Blocks of noise that the twin makes at once on a GPU: some 150 MiB for a while."""


def add_noise_(
    part: Tensor,
    *,
    key: bytes,
    position: int,
    scales: tuple[float, float],
    extent: tuple[int, int] | None = None,
    rounds: int = SECURE_ROUNDS,
) -> Tensor:
    """Replace a contiguous range of a clipped sum by ``(sum + std·noise) / divisor``, in place and in one pass.

    Privacy:
        N(0, std²) in every coordinate of the sum, up to floating-point effects. Radii use 63-bit uniforms: values
        up to 9.42 σ occur, beyond which lies 5e-21. The key reaches the device's memory.

    Cost:
        With the kernel one launch (two where the size is no multiple of 16), one read and one write of the part. The
        twin takes some hundred operations on bounded temporary memory for each 2^22 elements on a GPU.

    Reference:
        RFC 8439 (2018), section 2.3; Box and Muller (1958).
    """
    # The sum is formed in float64 and rounded once, the quotient is one of the tensor's type: both are functions of the
    # noisy value alone. `position` counts tensors over the whole training and is never used twice with one key;
    # `extent` is where the range begins in the whole tensor, and the size of the whole.
    std, divisor = non_negative(scales[0], "std"), positive(scales[1], "divisor")
    offset, total = extent or (0, part.numel())
    _check(part, key, position, (offset, total))
    flat_N = part.view(-1)
    arguments = (flat_N, chacha_state(key, position), (std, divisor), (offset, total), (BLOCK, rounds))
    TWINS.pick(flat_N)(*arguments)
    return part


def _check(part: Tensor, key: bytes, position: int, extent: tuple[int, int]) -> None:
    """Refuse a tensor, key or range that noise cannot be addressed for."""
    offset, total = extent
    if not part.dtype.is_floating_point or not part.is_contiguous():
        raise InvalidOptionError(f"tensor of {part.dtype}: noise is added to contiguous floating-point tensors only.")
    if len(key) != 32 or not 0 <= position < 2**64:
        raise InvalidOptionError(f"key of {len(key)} bytes, position={position!r}: 32 bytes and [0, 2^64) are needed.")
    if not 0 <= offset <= offset + part.numel() <= total <= MAX_BLOCKS * BLOCK:
        raise InvalidOptionError(f"offset={offset!r}: {part.numel()} elements from there are not among {total!r}.")


def chacha_state(key: bytes, position: int) -> list[int]:
    """Return the sixteen 32-bit words of ChaCha20's first state: constants, key, counter 0, position, 0."""
    words = [int.from_bytes(key[start : start + 4], "little") for start in range(0, 32, 4)]
    return [*_CONSTANTS, *words, 0, position & _MASK, position >> 32, 0]


def chacha_words(
    state: list[int], *, streams: Sequence[int], count: int, device: torch.device, rounds: int = SECURE_ROUNDS
) -> Tensor:
    """Return the first ``count`` 64-bit words of each key stream, int64, ``(S, count)``, in plain PyTorch."""
    # All blocks of all streams are made at once, four 32-bit words by four: 32-bit integers wrap on every device.
    lanes = -(-count // 8)
    fixed = torch.tensor([_signed(word) for word in state], dtype=torch.int32).to(device).view(16, 1, 1)
    counters = torch.arange(lanes, dtype=torch.int32).to(device)
    nonces = torch.tensor([_signed(stream) for stream in streams], dtype=torch.int32).to(device).unsqueeze(1)
    parts = (fixed.narrow(0, 0, 12), counters, fixed.narrow(0, 13, 2), nonces)
    start_RSL = torch.cat([part.expand(-1 if part.dim() == 3 else 1, len(streams), lanes) for part in parts])
    a, b, c, d = start_RSL.clone().chunk(4)
    spare = torch.empty_like(a)
    for _ in range(rounds // 2):
        _quarters_(a, b, c, d, spare)
        # Diagonals become columns.
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarters_(a, b, c, d, spare)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    words_RSL = torch.cat((a, b, c, d)).add_(start_RSL)
    return words_RSL.permute(1, 2, 0).flatten().view(torch.int64).view(len(streams), -1).narrow(1, 0, count)


def _signed(word: int) -> int:
    """Return a 32-bit word as a signed integer."""
    return word - (word >> 31 << 32)


def _quarters_(a: Tensor, b: Tensor, c: Tensor, d: Tensor, spare: Tensor) -> None:
    """Do a quarter round on four columns at once, in place."""
    for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        first.add_(second)
        third.bitwise_xor_(first)
        torch.bitwise_left_shift(third, by, out=spare)
        # The sign bit is copied into the bits that are cleared then.
        third.bitwise_right_shift_(32 - by).bitwise_and_((1 << by) - 1).bitwise_or_(spare)


def normal_pairs(radius_W: Tensor, angle_W: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent normal values, float64, at most 9.42, for each pair of uniform int64 words.

    They are √(-2 log u)·(cos, sin)(2πv); the first words are overwritten.

    Reference:
        Box and Muller (1958), A note on the generation of random normal deviates.
    """
    # (k + 1/2) / 2^63 for a uniform 63-bit k: never 0, and exact where it is small, which is where the tails are.
    uniform_W = radius_W.bitwise_and_(2**63 - 1).to(torch.float64).add_(0.5).mul_(2.0**-63)
    length_W = uniform_W.log_().mul_(-2).sqrt_()
    turn_W = angle_W.to(torch.float64).mul_(math.pi * 2.0**-63)
    return turn_W.cos().mul_(length_W), turn_W.sin_().mul_(length_W)


def _naive(
    part_N: Tensor, state: list[int], scales: tuple[float, float], extent: tuple[int, int], stream: tuple[int, int]
) -> Tensor:
    """Plain-PyTorch twin of the kernel: add noise block by block, then divide."""
    (std, divisor), (offset, total), (block_size, rounds) = scales, extent, stream
    end, number = offset + part_N.numel(), offset // block_size
    while number * block_size < end:
        start, size = number * block_size, min(block_size, total - number * block_size)
        # The last block may be smaller, and is made by itself.
        several = min(_AT_ONCE if part_N.is_cuda else 1, -(-end // block_size) - number, total // block_size - number)
        streams = [(number + index) * 256 & _MASK for index in range(max(1, several))]
        words_SW = chacha_words(state, streams=streams, count=size + size % 2, device=part_N.device, rounds=rounds)
        noise_N = torch.cat(normal_pairs(*words_SW.chunk(2, 1)), 1).narrow(1, 0, size).flatten()
        first, last = max(start, offset), min(start + len(noise_N), end)
        count = last - first
        # Added in float64 and rounded once, in one operation.
        part_N.narrow(0, first - offset, count).add_(noise_N.narrow(0, first - start, count).mul_(std))
        number += len(streams)
    if divisor != 1:
        _torch.divide_all_([part_N], divisor)
    return part_N


def _fast(
    part_N: Tensor, state: list[int], scales: tuple[float, float], extent: tuple[int, int], stream: tuple[int, int]
) -> Tensor:
    """As `_naive`, by the kernel."""
    from ghostclip.kernels.triton_noise import add_noise as kernel

    return kernel(part_N, state, scales, extent, stream)


def _example(device: torch.device) -> tuple[Tensor, list[int], tuple[float, float], tuple[int, int], tuple[int, int]]:
    part_N = torch.rand(99, generator=generator()).to(device)
    return part_N, chacha_state(bytes(range(32)), 2**40 + 5), (2.0, 3.0), (20, 150), (64, SECURE_ROUNDS)


# Triton goes from 64 to 16 bits by way of 32, which rounds twice; clipped sums have 32 at least.
TWINS: Final = Twins("add_noise_", _naive, _fast, (_example,), dtypes=(torch.float32, torch.float64))
