"""Continuous Gaussian noise in float64: levels "fast" and "secure".

Neither claims that floating-point numbers hide what they encode: for that the sum itself has to be discrete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from ghostclip import _torch, kernels
from ghostclip._validate import choice
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.kernels import runtime
from ghostclip.kernels.noise import FAST_ROUNDS, SECURE_ROUNDS, normal_pairs
from ghostclip.noise.exact import ExactNoise
from ghostclip.noise.keyed import BLOCK, Block, KeyedNoise, Range, cipher_key, cut, words_of
from ghostclip.noise.keys import RandomKey

GPU_BLOCK = 1 << 22
"""Elements drawn at once on a GPU: 32 MiB of float64, whatever the size of the parameter."""

LEVELS = ("fast", "secure", "exact")

STREAMS = ("device", "counter")
"""Where fast noise on a GPU comes from: torch's generator of the device, or one key stream for all devices."""

_GPU_BLOCKS = 2**20


def make_noise_source(
    *, level: str = "fast", seed: int | None = None, generator: torch.Generator | None = None
) -> KeyedNoise:
    """Return a noise source of level "fast", "secure" (a cryptographic key stream) or "exact" (and discrete noise)."""
    # An explicit seed or generator warns, and is refused for all but "fast".
    if choice(level, "level", LEVELS) == "fast":
        return FastNoise(seed=seed, generator=generator)
    if seed is not None or generator is not None:
        raise InvalidOptionError(f"level={level!r}: a seed or generator makes the noise predictable; leave it out.")
    return SecureNoise() if level == "secure" else ExactNoise()


class _KeyStreamNoise(KeyedNoise):
    """Base of levels whose noise on a GPU may come from a key stream on the device itself."""

    _rounds: int
    """Of the stream's cipher."""
    _stream = STREAMS[1]

    def _release_range(self, flat_N: torch.Tensor, scales: tuple[float, float], where: Range) -> None:
        """Add noise to a range and divide; on a GPU with a key stream in one pass, else as the base."""
        if not flat_N.is_cuda or self._stream != "counter":
            super()._release_range(flat_N, scales, where)
            return
        # Number of the tensor, first element, size of the tensor. Correlated noise (`_rows`) is drawn in blocks.
        key, (position, first, total) = cipher_key(self._key), where
        add = partial(kernels.add_noise_, key=key, rounds=self._rounds)
        if self._rows is None:
            add(flat_N, position=position, scales=scales, extent=(first, total))
            return
        std, divisor = scales
        for offset in range(first, first + flat_N.numel(), GPU_BLOCK):
            part_N, extent = flat_N[offset - first :][:GPU_BLOCK], (offset, total)

            def add_(z_N: torch.Tensor, at: int, extent: tuple[int, int] = extent) -> None:
                add(z_N, position=at, scales=(1.0, 1.0), extent=extent)

            self._add_correlated(part_N, std, (position, offset), add_)
            if divisor != 1:
                _torch.divide_all_([part_N], divisor)


class FastNoise(_KeyStreamNoise):
    """Noise of statistical quality: independent, with true Gaussian tails, but not cryptographic.

    Privacy:
        The (ε, δ) of the accountant, up to floating-point effects. An attacker who can break the generator from its
        noisy output is not covered: see `SecureNoise`.

    Cost:
        On the CPU less time than torch's float64 normal, more than its float32 normal. On a GPU one launch and 8 bytes
        of traffic a value with the kernel, else three launches for each 2^22 values and 32 bytes a value.
    """

    level = "fast"
    _rounds = FAST_ROUNDS

    # On the CPU numpy's ziggurat in float64 (tails by rejection, to beyond 13 σ). On a GPU, where kernels are switched
    # on when the source is made, float64 Box-Muller of ChaCha8 (to 9.4 σ), the same on every GPU; otherwise torch's
    # float64 normal (53-bit uniforms, to 8.5 σ, beyond which lies 2e-17), the same on GPUs of one kind. Which of the
    # two is part of the state. torch's float32 normal on the CPU is cut off at 5.77 σ, which voids small δ, and its
    # generator takes 32 bits of a seed, so neither is used.
    def __init__(self, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__(RandomKey("noise", seed=seed, generator=generator), generator)
        self._stream = STREAMS[runtime.mode() != "off" and runtime.installed()]

    def shared_state(self) -> dict[str, Any]:
        """Return the key, the position and the stream of noise on a GPU."""
        return {**super().shared_state(), "stream": self._stream}

    def fingerprint(self) -> str:
        """Return what ranks with one noise share."""
        # Level, key's fingerprint, position, and GPU stream if not the device's own.
        return super().fingerprint() + " from one key stream" * (self._stream == "counter")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state, from the same stream."""
        stream = state.get("stream", STREAMS[0])
        if stream not in STREAMS:
            raise ResumeError(f"noise state: stream {stream!r}; this version of ghostclip has {', '.join(STREAMS)}.")
        super().load_state_dict(state)
        self._stream = stream

    def _block_size(self, tensor: torch.Tensor) -> int:
        return GPU_BLOCK if tensor.device.type == "cuda" else super()._block_size(tensor)

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        """Add scaled normal numbers to a part of a block."""
        if part_N.is_cuda:
            # Added in float64 and rounded once, in one operation.
            part_N.add_(cut(_gpu_normal(self._key, block, std, part_N.device), within))
            return
        noise = _generator(self._key, block).standard_normal(block.size)
        _add_in_double(part_N, cut(torch.from_numpy(noise), within), std)

    def _workers(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return how many threads draw noise on the CPU."""
        if torch.get_num_threads() == 1 or torch.is_inference_mode_enabled():
            return 1
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return 1
        sizes = [tensor.numel() for tensor in tensors]
        # Threads hold less together than the largest tensor, and each has enough to do to be worth its start.
        return min(torch.get_num_threads(), max(sizes, default=0) // (4 * BLOCK), sum(sizes) // (16 * BLOCK))


def _generator(key: RandomKey, block: Block) -> np.random.Generator:
    """Return NumPy's SFC64, a fast 64-bit generator, with a state of its own, 192 bits of it."""
    return np.random.Generator(np.random.SFC64(_SeedOfBlock(key, block)))  # type: ignore[arg-type]  # numpy's stubs omit ISeedSequence


class _SeedOfBlock(ISeedSequence):
    """The key's stream for a block as a generator's seed sequence; numpy's own mixing takes longer than small draws."""

    def __init__(self, key: RandomKey, block: Block) -> None:
        self._key = key
        self._block = block

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return words of the key's stream, as numpy asks for them."""
        kind = np.dtype(dtype).newbyteorder("<")
        block = self._block
        return np.frombuffer(self._key.digest(block.position, n_words * kind.itemsize, part=block.number), dtype=kind)


def _gpu_normal(key: RandomKey, block: Block, std: float, device: torch.device) -> torch.Tensor:
    """Draw a block of N(0, std²) on a GPU from a Philox key of its own."""
    # A key has 64 bits there: those of different blocks are consecutive numbers, and so differ with certainty, which
    # random ones would not.
    if block.number >= _GPU_BLOCKS:
        raise InvalidOptionError(f"tensor of more than {_GPU_BLOCKS * GPU_BLOCK} elements: add noise to it in parts.")
    first = int.from_bytes(key.digest(0, 8, part=2**63), "little")
    seed = (first + block.position * _GPU_BLOCKS + block.number) % 2**63
    noise_N = torch.empty(block.size, dtype=torch.float64, device=device)
    return noise_N.normal_(0.0, std, generator=torch.Generator(device).manual_seed(seed))


class SecureNoise(_KeyStreamNoise):
    """Noise from a cryptographic key stream with a key of the operating system, by float64 Box-Muller.

    Privacy:
        As `FastNoise`, and noise that was released does not help to predict other noise. Floating-point effects are
        not covered. On a GPU the key reaches the device's memory, as the sums do.

    Cost:
        On the CPU about the time of `FastNoise`; some eight times that without the package `cryptography`.
        On a GPU one launch and 8 bytes of traffic a value where kernels are switched on; else
        the key stream is made there by some hundred plain operations for each 2^22 values.
    """

    # The radius uses 63-bit uniforms, so that values up to 9.4 σ occur (2e-21 lies beyond). A GPU makes the same key
    # stream, to the bit, and from it the same noise up to the last places of float64 (see `ghostclip.kernels.noise`).
    level = "secure"
    _rounds = SECURE_ROUNDS

    def __init__(self) -> None:
        super().__init__(RandomKey("secure noise"))

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        """Add scaled normal numbers from the cryptographic key stream to a part of a block."""
        even = block.size + block.size % 2
        words = words_of(self._key, block, part=0, count=even)
        normal_N = torch.cat(normal_pairs(*torch.from_numpy(words.view(np.int64)).chunk(2)))
        _add_in_double(part_N, normal_N[: block.size][within], std)


def _add_in_double(part_N: torch.Tensor, noise_N: torch.Tensor, std: float) -> None:
    """Add std·noise, drawn on the CPU, to a part on any device; Apple's has no float64."""
    noise_N.mul_(std)
    if part_N.device.type == "mps":
        part_N.copy_(noise_N.add_(part_N.cpu()).to(part_N.dtype))
        return
    # Rounded as it is copied: on the CPU quicker than a sum of two types, and the same number.
    part_N.copy_(noise_N.to(part_N.device).add_(part_N))
