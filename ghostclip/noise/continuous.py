"""Continuous Gaussian noise: levels "fast" and "secure".

Neither claims that floating-point numbers hide what they encode: for that the sum itself has to be discrete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from ghostclip._validate import choice
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.exact import ExactNoise
from ghostclip.noise.gaussian import box_muller
from ghostclip.noise.keyed import BLOCK, Block, KeyedNoise, cut
from ghostclip.noise.keys import RandomKey
from ghostclip.noise.keystream import words_of

GPU_BLOCK = 1 << 22
"""Elements drawn at once on a GPU: 32 MiB of float64, whatever the size of the parameter."""

AHEAD = 32
"""Calls whose generators' first states are found together: a hash between two backwards finds its code evicted from
the processor's cache, and takes thirty times as long as one after another."""

SEED_BYTES = 24
"""Bytes that a generator's first state is made of."""

LEVELS = ("fast", "secure", "exact")

_GPU_BLOCKS = 2**20


def make_noise_source(
    *, level: str = "fast", seed: int | None = None, generator: torch.Generator | None = None
) -> KeyedNoise:
    """Return a noise source of a level.

    Args:
        level: "fast" (statistical quality), "secure" (a cryptographic key stream) or "exact" (that, and discrete
            noise on integer sums).
        seed: Whole number that the noise follows from; warns, and is refused for all but "fast".
        generator: torch generator that the key is drawn from, and again after it was seeded anew; likewise.

    Returns:
        The source.

    Raises:
        InvalidOptionError: If the level is unknown or contradicts an explicit seed.
    """
    if choice(level, "level", LEVELS) == "fast":
        return FastNoise(seed=seed, generator=generator)
    if seed is not None or generator is not None:
        raise InvalidOptionError(f"level={level!r}: a seed or generator makes the noise predictable; leave it out.")
    return SecureNoise() if level == "secure" else ExactNoise()


class FastNoise(KeyedNoise):
    """Noise of statistical quality: independent, with true Gaussian tails, but not cryptographic.

    On the CPU numpy's ziggurat in float64 (tails by rejection, to beyond 13 σ); on a GPU torch's float64 normal
    (53-bit uniforms, to 8.5 σ, beyond which lies 2e-17). torch's float32 normal on the CPU is cut off at 5.77 σ, which
    voids small δ, and its generator takes 32 bits of a seed, so neither is used. GPUs of one kind draw the same noise.

    Privacy:
        The (ε, δ) of the accountant, up to floating-point effects. An attacker who can break the generator from its
        noisy output is not covered: see `SecureNoise`.

    Cost:
        On the CPU less time than torch's float64 normal, more than its float32 normal.

    Args:
        seed: Whole number that the noise follows from; warns.
        generator: torch generator that the key is drawn from, and again after it was seeded anew; warns.
    """

    level = "fast"

    def __init__(self, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__(RandomKey("noise", seed=seed, generator=generator), generator)
        self._seeds = SeedsAhead(self._key)

    def _block_size(self, tensor: torch.Tensor) -> int:
        return GPU_BLOCK if tensor.device.type == "cuda" else super()._block_size(tensor)

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        if part_N.device.type == "cuda":
            noise_N = _gpu_normal(self._key, block, part_N.device)[within]
            part_N.copy_(noise_N.mul_(std).add_(part_N))
            return
        noise = _generator(self._seeds, block).standard_normal(block.size)
        _add_in_double(part_N, cut(torch.from_numpy(noise), within), std)

    def _workers(self, tensors: Sequence[torch.Tensor]) -> int:
        if torch.get_num_threads() == 1 or torch.is_inference_mode_enabled():
            return 1
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return 1
        sizes = [tensor.numel() for tensor in tensors]
        # Threads hold less together than the largest tensor, and each has enough to do to be worth its start.
        return min(torch.get_num_threads(), max(sizes, default=0) // (4 * BLOCK), sum(sizes) // (16 * BLOCK))


class SeedsAhead:
    """First bytes of the streams of blocks; those of first blocks are found for several calls together and kept.

    Args:
        key: What they follow from; may be replaced by another at any time.
    """

    def __init__(self, key: RandomKey) -> None:
        self._key = key
        self._kept: tuple[bytes, int, tuple[bytes, ...]] = (b"", 0, ())

    def seed(self, block: Block, length: int) -> bytes:
        """Return the first bytes of a block's stream.

        Args:
            block: What is drawn.
            length: How many.

        Returns:
            The bytes, a function of key, position and number of the block.
        """
        if block.number or length > SEED_BYTES:
            return self._key.digest(block.position, length, part=block.number)
        secret, start, seeds = self._kept
        if secret != self._key.secret or not start <= block.position < start + len(seeds):
            secret, start = self._key.secret, block.position
            seeds = tuple(self._key.digest(start + index, SEED_BYTES) for index in range(AHEAD))
            self._kept = (secret, start, seeds)
        return seeds[block.position - start][:length]


def _generator(seeds: SeedsAhead, block: Block) -> np.random.Generator:
    """Return a fast 64-bit generator with a state of its own, 192 bits of it."""
    return np.random.Generator(np.random.SFC64(_SeedOfBlock(seeds, block)))  # type: ignore[arg-type]  # numpy's stubs omit ISeedSequence


class _SeedOfBlock(ISeedSequence):
    """The key's stream for a block as a generator's first state; numpy's own mixing takes longer than small draws.

    Args:
        seeds: How streams begin.
        block: What is drawn.
    """

    def __init__(self, seeds: SeedsAhead, block: Block) -> None:
        self._seeds = seeds
        self._block = block

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the first words of the stream.

        Args:
            n_words: How many.
            dtype: numpy's unsigned 32-bit or 64-bit integers.

        Returns:
            Uniform words, shape [n_words].
        """
        kind = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self._seeds.seed(self._block, n_words * kind.itemsize), dtype=kind)


def _gpu_normal(key: RandomKey, block: Block, device: torch.device) -> torch.Tensor:
    """Draw a block on a GPU from a Philox key of its own.

    A key has 64 bits there: those of different blocks are consecutive numbers, and so differ with certainty, which
    random ones would not.
    """
    if block.number >= _GPU_BLOCKS:
        raise InvalidOptionError(f"tensor of more than {_GPU_BLOCKS * GPU_BLOCK} elements: add noise to it in parts.")
    first = int.from_bytes(key.digest(0, 8, part=2**63), "little")
    generator = torch.Generator(device)
    generator.manual_seed((first + block.position * _GPU_BLOCKS + block.number) % 2**63)
    return torch.empty(block.size, dtype=torch.float64, device=device).normal_(generator=generator)


class SecureNoise(KeyedNoise):
    """Noise from a cryptographic key stream with a key of the operating system, by float64 Box-Muller.

    The radius uses 63-bit uniforms, so that values up to 9.4 σ occur (2e-21 lies beyond). On a GPU the noise is drawn
    on the CPU and copied.

    Privacy:
        As `FastNoise`, and noise that was released does not help to predict other noise. Floating-point effects are
        not covered.

    Cost:
        About the time of `FastNoise`; many times that without the package `cryptography` (`ghostclip[secure]`).
    """

    level = "secure"

    def __init__(self) -> None:
        super().__init__(RandomKey("secure noise"))

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        even = block.size + block.size % 2
        words = words_of(self._key, block, part=0, count=even)
        _add_in_double(part_N, box_muller(torch.from_numpy(words.view(np.int64)))[: block.size][within], std)


def _add_in_double(part_N: torch.Tensor, noise_N: torch.Tensor, std: float) -> None:
    """Add std·noise, drawn on the CPU, to a part on any device; Apple's has no float64."""
    noise_N.mul_(std)
    if part_N.device.type == "mps":
        part_N.copy_(noise_N.add_(part_N.cpu()).to(part_N.dtype))
        return
    # Rounded as it is copied: on the CPU quicker than a sum of two types, and the same number.
    part_N.copy_(noise_N.to(part_N.device).add_(part_N))
