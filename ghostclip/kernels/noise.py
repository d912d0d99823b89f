"""Gaussian noise from a ChaCha20 key stream, added to a clipped sum and divided, addressed by (key, position, block).

The noise is the same on every device, and the same as that of noise level "secure" where its key stream is ChaCha20:
block number n of the tensor at a position has ChaCha20's key, the nonce (position, 256·n) and counters from 0.

Shape letters: N elements, W words.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ghostclip._validate import non_negative, positive
from ghostclip.errors import InvalidOptionError
from ghostclip.kernels.twins import Twins, generator

BLOCK: Final = 1 << 15
"""Elements in a block of noise."""

MAX_BLOCKS: Final = 1 << 24
"""Blocks of one tensor: what a nonce tells apart."""

_CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MASK: Final = 0xFFFFFFFF


def add_noise_(
    part: Tensor, *, key: bytes, position: int, scales: tuple[float, float], extent: tuple[int, int] | None = None
) -> Tensor:
    """Replace a part of a clipped sum by ``(sum + std·noise) / divisor``, in place and in one pass over memory.

    Sum and quotient are formed in float64 and rounded once, so that the result is a function of the noisy value alone.

    Args:
        part: Contiguous floating-point tensor, or a contiguous range of a flattened one.
        key: ChaCha20's key, 32 bytes, as secret as the data.
        position: Number of the tensor, counted over the whole training, in [0, 2^64); never used twice with one key.
        scales: Standard deviation of the noise in the sum, at least 0, and the public divisor, above 0.
        extent: Where the range begins in the whole tensor and how many elements the whole has; all of it if left out.

    Returns:
        ``part``.

    Raises:
        InvalidOptionError: If an argument is out of its range, or the tensor is not contiguous and floating-point.

    Privacy:
        N(0, std²) in every coordinate of the sum, up to floating-point effects. Radii use 63-bit uniforms: values
        up to 9.42 σ occur, beyond which lies 5e-21. The key reaches the device's memory.

    Reference:
        RFC 8439 (2018), section 2.3; Box and Muller (1958).
    """
    std, divisor = non_negative(scales[0], "std"), positive(scales[1], "divisor")
    offset, total = extent or (0, part.numel())
    _check(part, key, position, (offset, total))
    flat_N = part.view(-1)
    arguments = (flat_N, chacha_state(key, position), (std, divisor), (offset, total), BLOCK)
    TWINS.pick(flat_N)(*arguments)
    return part


def _check(part: Tensor, key: bytes, position: int, extent: tuple[int, int]) -> None:
    offset, total = extent
    if not part.dtype.is_floating_point or not part.is_contiguous():
        raise InvalidOptionError(f"tensor of {part.dtype}: noise is added to contiguous floating-point tensors only.")
    if len(key) != 32 or not 0 <= position < 2**64:
        raise InvalidOptionError(f"key of {len(key)} bytes, position={position!r}: 32 bytes and [0, 2^64) are needed.")
    if not 0 <= offset <= offset + part.numel() <= total <= MAX_BLOCKS * BLOCK:
        raise InvalidOptionError(f"offset={offset!r}: {part.numel()} elements from there are not among {total!r}.")


def chacha_state(key: bytes, position: int) -> list[int]:
    """Return ChaCha20's state for the first block of key stream of a tensor's first block of noise.

    Args:
        key: 32 bytes.
        position: Number of the tensor.

    Returns:
        Sixteen 32-bit words: constants, key, counter 0, position, 0.
    """
    words = [int.from_bytes(key[start : start + 4], "little") for start in range(0, 32, 4)]
    return [*_CONSTANTS, *words, 0, position & _MASK, position >> 32, 0]


def chacha_words(state: list[int], *, stream: int, count: int, device: torch.device) -> Tensor:
    """Return the first 64-bit words of one key stream, in plain PyTorch.

    Args:
        state: From `chacha_state`.
        stream: Last word of the nonce.
        count: How many words.
        device: Where they are made.

    Returns:
        Uniform int64, shape ``(count,)``.
    """
    counters_W = torch.arange(-(-count // 8), device=device)
    initial = [torch.full_like(counters_W, word) for word in state]
    initial[12], initial[15] = counters_W & _MASK, torch.full_like(counters_W, stream)
    x = list(initial)
    for _ in range(10):
        for column in range(4):
            _quarter(x, (column, 4 + column, 8 + column, 12 + column))
        for column in range(4):
            _quarter(x, (column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4))
    words = [(word + start) & _MASK for word, start in zip(x, initial, strict=True)]
    longs = [low | (high << 32) for low, high in zip(words[0::2], words[1::2], strict=True)]
    return torch.stack(longs, 1).flatten()[:count]


def _quarter(x: list[Tensor], where: tuple[int, int, int, int]) -> None:
    a, b, c, d = where
    for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[first] = (x[first] + x[second]) & _MASK
        mixed = x[third] ^ x[first]
        x[third] = ((mixed << by) & _MASK) | (mixed >> (32 - by))


def normal_pairs(radius_W: Tensor, angle_W: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent normal values for each pair of uniform words: √(-2 log u)·(cos, sin)(2πv).

    Args:
        radius_W: Uniform int64; 63 bits are used, so that tails reach 9.42 σ.
        angle_W: Uniform int64, same shape.

    Returns:
        Two float64 tensors of that shape.
    """
    uniform_W = ((radius_W & (2**63 - 1)).to(torch.float64) + 0.5) * 2.0**-63
    length_W = (-2.0 * uniform_W.log()).sqrt()
    turn_W = angle_W.to(torch.float64) * (math.pi * 2.0**-63)
    return length_W * turn_W.cos(), length_W * turn_W.sin()


def _naive(
    part_N: Tensor, state: list[int], scales: tuple[float, float], extent: tuple[int, int], block_size: int
) -> Tensor:
    offset, total = extent
    std, divisor = scales
    for number in range(offset // block_size, -(-(offset + part_N.numel()) // block_size)):
        start = number * block_size
        size = min(block_size, total - start)
        even = size + size % 2
        words_W = chacha_words(state, stream=number * 256, count=even, device=part_N.device)
        noise_N = torch.cat(normal_pairs(*words_W.chunk(2)))[:size]
        first, last = max(start, offset), min(start + size, offset + part_N.numel())
        piece = part_N[first - offset : last - offset]
        piece.copy_((noise_N[first - start : last - start] * std + piece) / divisor)
    return part_N


def _fast(
    part_N: Tensor, state: list[int], scales: tuple[float, float], extent: tuple[int, int], block_size: int
) -> Tensor:
    from ghostclip.kernels._compiled.noise import add_noise as kernel

    return kernel(part_N, state, scales, extent, block_size)


def _example(device: torch.device) -> tuple[Tensor, list[int], tuple[float, float], tuple[int, int], int]:
    part_N = torch.rand(99, generator=generator()).to(device)
    return part_N, chacha_state(bytes(range(32)), 2**40 + 5), (2.0, 3.0), (20, 150), 64


# Triton goes from 64 to 16 bits by way of 32, which rounds twice; clipped sums have 32 at least.
TWINS: Final = Twins("add_noise_", _naive, _fast, _example, dtypes=(torch.float32, torch.float64))
