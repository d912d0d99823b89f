"""Where Gaussian noise comes from.

A source is an object with `add_`, `state_dict` and `load_state_dict` (`NoiseSource`); each level of protection is one
of them, and an optimizer is handed one. Neither level claims that floating-point numbers hide what they encode: for
that the sum itself has to be discrete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ghostclip._validate import choice, non_negative
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.sampling import RandomKey

CHUNK = 1 << 15
"""Elements drawn at once on the CPU: 256 KiB of float64, which stay in its cache."""

GPU_CHUNK = 1 << 22
"""Elements drawn at once on a GPU: 32 MiB of float64, whatever the size of the parameter."""

LEVELS = ("fast", "secure")


class NoiseSource(Protocol):
    """Draws independent Gaussian noise, never the same twice."""

    level: str

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Add N(0, std²) to every element, in place.

        Args:
            tensor: Real floating-point tensor of any shape and device.
            std: Standard deviation, finite and at least 0.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything the following noise depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state.

        Args:
            state: What `state_dict` returned.
        """


def make_noise_source(
    *, level: str = "fast", seed: int | None = None, generator: torch.Generator | None = None
) -> NoiseSource:
    """Return a noise source of a level.

    Args:
        level: "fast" (statistical quality) or "secure" (a cryptographic keystream).
        seed: Whole number that the noise follows from; warns, and is refused for "secure".
        generator: torch generator that the key is drawn from, once; likewise.

    Returns:
        The source.

    Raises:
        InvalidOptionError: If the level is unknown or contradicts an explicit seed.
    """
    if choice(level, "level", LEVELS) == "fast":
        return FastNoise(seed=seed, generator=generator)
    if seed is not None or generator is not None:
        raise InvalidOptionError("level='secure': a seed or generator makes the noise predictable; leave it out.")
    return SecureNoise()


class _KeyedNoise:
    """What the levels share: the key, the position, and adding noise chunk by chunk.

    A call of `add_` has a stream of its own, numbered by `position`, so that the state is the key and one number.
    """

    level = ""

    def __init__(self, key: RandomKey) -> None:
        self._key = key
        self._position = 0

    @torch.no_grad()
    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Add N(0, std²) to every element, in place.

        The sum is formed in float64 and rounded once to the tensor's type, so that a 16-bit or 32-bit result is a
        function of the noisy value alone.

        Args:
            tensor: Real floating-point tensor of any shape and device.
            std: Standard deviation, finite and at least 0; 0 leaves the tensor as it is.

        Raises:
            InvalidOptionError: If the tensor is not floating-point or std is not finite.

        Privacy:
            Every call uses noise that no other call uses.

        Cost:
            Temporary memory for `CHUNK` (`GPU_CHUNK`) float64 values, and a copy of a tensor that is not contiguous.
        """
        std = non_negative(std, "std")
        if not tensor.dtype.is_floating_point:
            raise InvalidOptionError(f"tensor of {tensor.dtype}: noise is added to floating-point tensors only.")
        if std == 0 or tensor.numel() == 0:
            return
        position, self._position = self._position, self._position + 1
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._fill(target.view(-1), std, position)
        if target is not tensor:
            tensor.copy_(target)

    def _fill(self, flat_N: torch.Tensor, std: float, position: int) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the key and the position.

        Privacy:
            Whoever has this state can recompute the noise: keep it as secret as the data.

        Returns:
            Plain Python values (and one tensor for each GPU used).
        """
        return {"level": self.level, "key": self._key.secret.hex(), "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: If it is incomplete or of another level.
        """
        missing = {"level", "key", "position"} - state.keys()
        if missing:
            raise ResumeError(f"noise state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        if state["level"] != self.level:
            raise ResumeError(f"noise state: level {state['level']!r} was saved, this source is {self.level!r}.")
        self._key.load(state["key"])
        self._position = int(state["position"])


class FastNoise(_KeyedNoise):
    """Noise of statistical quality: independent, with true Gaussian tails, but not cryptographic.

    On the CPU numpy's ziggurat in float64 (tails by rejection, to beyond 13 σ); on a GPU torch's float64 normal
    (53-bit uniforms, to 8.5 σ, beyond which lies 2e-17). torch's float32 normal on the CPU is cut off at 5.77 σ, which
    voids small δ, and its generator takes 32 bits of a seed, so neither is used.

    Privacy:
        The (ε, δ) of the accountant, up to floating-point effects. An attacker who can break the generator from its
        noisy output is not covered: see `SecureNoise`.

    Cost:
        On the CPU less time than torch's float64 normal, more than its float32 normal.

    Args:
        seed: Whole number that the noise follows from; warns.
        generator: torch generator that the key is drawn from, once; warns.
    """

    level = "fast"

    def __init__(self, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__(RandomKey("noise", seed=seed, generator=generator))
        self._generators: dict[str, torch.Generator] = {}

    def _fill(self, flat_N: torch.Tensor, std: float, position: int) -> None:
        if flat_N.device.type == "cuda":
            generator = self._generator(flat_N.device)
            for chunk in flat_N.split(GPU_CHUNK):
                noise = torch.empty(chunk.shape, dtype=torch.float64, device=chunk.device).normal_(generator=generator)
                chunk.copy_(noise.mul_(std).add_(chunk))
            return
        stream = self._key.stream(position)
        for chunk in flat_N.split(CHUNK):
            _add_on_cpu(chunk, torch.from_numpy(stream.standard_normal(chunk.numel())), std)

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(name)
            # Streams of `add_` are numbered from 0, those of devices from the other end.
            seed = int.from_bytes(self._key.digest(2**63 + device.index, 8), "little")
            self._generators[name].manual_seed(seed % 2**63)
        return self._generators[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the key, the position, and the generator of each GPU used.

        Privacy:
            Whoever has this state can recompute the noise: keep it as secret as the data.

        Returns:
            Plain Python values and byte tensors.
        """
        devices = {name: generator.get_state() for name, generator in self._generators.items()}
        return {**super().state_dict(), "devices": devices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: If it is incomplete, of another level, or needs a GPU that is not there.
        """
        super().load_state_dict(state)
        self._generators = {}
        try:
            for name, generator_state in state.get("devices", {}).items():
                self._generator(torch.device(name)).set_state(generator_state)
        except RuntimeError as error:
            raise ResumeError(f"noise state: it was saved on a GPU that is not here ({error}).") from error


class SecureNoise(_KeyedNoise):
    """Noise from a cryptographic keystream: SHAKE-128 of a key of the operating system, and float64 Box-Muller.

    The radius uses 63-bit uniforms, so that values up to 9.4 σ occur (2e-21 lies beyond). On a GPU the noise is drawn
    on the CPU and copied.

    Privacy:
        As `FastNoise`, and noise that was released does not help to predict other noise. Floating-point effects are
        not covered.

    Cost:
        About twice the time of `FastNoise`, most of it in SHAKE-128.
    """

    level = "secure"

    def __init__(self) -> None:
        super().__init__(RandomKey("secure noise"))

    def _fill(self, flat_N: torch.Tensor, std: float, position: int) -> None:
        # One secret per call and one stream per chunk, so that no keystream is as long as the parameter.
        chunk_key = RandomKey("secure noise chunk")
        chunk_key.secret = self._key.digest(position, len(chunk_key.secret))
        for number, chunk in enumerate(flat_N.split(CHUNK)):
            pairs = (chunk.numel() + 1) // 2
            words = np.frombuffer(chunk_key.digest(number, 16 * pairs), dtype=np.int64).copy()
            _add_on_cpu(chunk, box_muller(torch.from_numpy(words))[: chunk.numel()], std)


def _add_on_cpu(chunk_N: torch.Tensor, noise_N: torch.Tensor, std: float) -> None:
    """Add std·noise to a chunk on any device; float64 exists only on the CPU for some of them."""
    chunk_N.copy_(noise_N.mul_(std).add_(chunk_N.to("cpu")).to(chunk_N.dtype))


def box_muller(words_W: torch.Tensor) -> torch.Tensor:
    """Turn random bits into standard normal values: √(-2 log u)·(cos, sin)(2πv).

    Args:
        words_W: Uniform int64, an even number of them, shape [W]; overwritten.

    Returns:
        As many independent N(0, 1) values, float64; none exceeds √(2·64·log 2) = 9.42.
    """
    radius_N, angle_N = words_W.chunk(2)
    # (k + 1/2) / 2^63 for a uniform 63-bit k: never 0, and exact where it is small, which is where the tails are.
    uniform_N = radius_N.bitwise_and_(2**63 - 1).to(torch.float64).add_(0.5).mul_(2.0**-63)
    radius_N = uniform_N.log_().mul_(-2).sqrt_()
    angle_N = angle_N.to(torch.float64).mul_(math.pi * 2.0**-63)
    return torch.cat((angle_N.cos().mul_(radius_N), angle_N.sin_().mul_(radius_N)))
