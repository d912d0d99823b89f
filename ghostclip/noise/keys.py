"""The keys that all randomness follows from, and the random streams that a key stands for.

Nothing here reads or changes torch's global generator: `torch.manual_seed` neither fixes nor repeats what is drawn.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from ghostclip.errors import FixedSeedWarning, InvalidOptionError, ResumeError

_KEY_BYTES = 16


class RandomKey:
    """A key of 128 bits and the random streams that follow from it, addressed by position.

    Privacy:
        The key is as secret as the noise itself, and it is part of a checkpoint's state: whoever has it can recompute
        the noise and the batches. By default it is fresh entropy of the operating system. An explicit seed or
        generator makes it reproducible, and warns.
    """

    # Stream number n is a function of (key, purpose, n): a resumed run draws what the interrupted one would have drawn,
    # and two positions never share a stream.
    def __init__(self, purpose: str, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if seed is not None and generator is not None:
            raise InvalidOptionError(f"{purpose}: seed and generator are both given; give one of them, or none.")
        self._purpose = purpose
        if seed is None and generator is None:
            self.renew()
            return
        warnings.warn(
            f"{purpose} follows from an explicit {'generator' if seed is None else 'seed'}: whoever knows it can undo "
            "the protection. Leave it out when the result is released.",
            FixedSeedWarning,
            stacklevel=3,
        )
        if generator is not None:
            self.derive(generator)
        else:
            self._follow_from(seed)

    def derive(self, generator: torch.Generator) -> None:
        """Replace the key by 128 bits drawn from a torch generator."""
        words = torch.randint(2**32, (_KEY_BYTES // 4,), generator=generator, device=generator.device)
        self._follow_from(sum(int(word) << (32 * index) for index, word in enumerate(words.tolist())))

    def _follow_from(self, seed: int | None) -> None:
        self.secret = hashlib.shake_128(f"{self._purpose} seed {seed}".encode()).digest(_KEY_BYTES)

    def renew(self) -> None:
        """Replace the key by fresh entropy of the operating system."""
        self.secret = secrets.token_bytes(_KEY_BYTES)

    def digest(self, position: int, length: int, *, part: int = 0) -> bytes:
        """Return bytes of a cryptographic key stream (SHAKE-128 of key, position, part and purpose)."""
        # Parts are independent.
        block = self.secret + position.to_bytes(8, "little") + part.to_bytes(8, "little") + self._purpose.encode()
        return hashlib.shake_128(block).digest(length)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that tell keys apart without revealing them."""
        return hashlib.shake_128(b"fingerprint of" + self.secret + self._purpose.encode()).hexdigest(8)

    def load(self, secret: str) -> None:
        """Replace the key by a saved one, in hexadecimal digits."""
        try:
            key = bytes.fromhex(secret)
        except (TypeError, ValueError) as error:
            raise ResumeError(f"{self._purpose} state: 'key' holds no hexadecimal digits ({error}).") from error
        if len(key) != _KEY_BYTES:
            raise ResumeError(f"{self._purpose} state: 'key' has {len(key)} bytes, not {_KEY_BYTES}.")
        self.secret = key


class WordStream:
    """Uniform 64-bit words of one position of a key, in the order they are requested."""

    def __init__(self, key: RandomKey, position: int) -> None:
        self._key = key
        self._position = position
        self._parts = 0

    def take(self, count: int) -> NDArray[np.uint64]:
        """Return uint64 words that were not returned before, read-only."""
        part, self._parts = self._parts, self._parts + 1
        return np.frombuffer(self._key.digest(self._position, 8 * count, part=part), dtype="<u8")
