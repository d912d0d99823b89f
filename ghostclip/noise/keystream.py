"""Key streams: uniform 64-bit words that nobody without the key can tell from chance, addressed by number.

SHAKE-128 comes with Python; ChaCha20 is several times faster and needs the `cryptography` package. A checkpoint says
which one its noise follows from.
"""

from __future__ import annotations

import hashlib
import importlib.util
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ghostclip._validate import choice
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.noise.keys import RandomKey

MAX_BLOCKS = 2**24
"""Blocks of one tensor."""

PARTS = 256
"""Streams of one block."""

KEYSTREAMS = ("chacha20", "shake128")


class KeyStream(Protocol):
    """Words that follow from a key, a position, a block and a part."""

    name: str

    def words(self, position: int, *, block: int, part: int, count: int) -> NDArray[np.uint64]:
        """Return the first words of one stream.

        Args:
            position: Number of the tensor that noise is drawn for, in [0, 2^64).
            block: Number of the block within the tensor, below `MAX_BLOCKS`.
            part: Number of the stream within the block, below `PARTS`.
            count: How many words.

        Returns:
            Uniform uint64, shape [count], writable.
        """


def available() -> str:
    """Return the faster key stream that is installed.

    Returns:
        One of `KEYSTREAMS`.
    """
    return "chacha20" if importlib.util.find_spec("cryptography") else "shake128"


def make_keystream(name: str, key: RandomKey) -> KeyStream:
    """Return a key stream by name.

    Args:
        name: One of `KEYSTREAMS`.
        key: What it follows from; the key that it has now.

    Returns:
        The key stream.

    Raises:
        ResumeError: If it needs a package that is not installed.
    """
    if choice(name, "keystream", KEYSTREAMS) == "shake128":
        return Shake128(key)
    if not importlib.util.find_spec("cryptography"):
        raise ResumeError(
            "noise state: it follows from a ChaCha20 key stream. Install ghostclip[secure] (the package cryptography)."
        )
    return ChaCha20(key)


def _number(block: int, part: int) -> int:
    """Number a stream within a tensor: 24 bits of block, 8 bits of part."""
    if not (0 <= block < MAX_BLOCKS and 0 <= part < PARTS):
        raise InvalidOptionError(f"block {block}, part {part}: one tensor's noise ends at {MAX_BLOCKS} and {PARTS}.")
    return block * PARTS + part


class Shake128:
    """The key stream of Python's own library: SHAKE-128.

    Args:
        key: What it follows from.

    Reference:
        FIPS 202 (2015), section 6.2.
    """

    name = "shake128"

    def __init__(self, key: RandomKey) -> None:
        self._key = key

    def words(self, position: int, *, block: int, part: int, count: int) -> NDArray[np.uint64]:
        """Return the first words of one stream.

        Args:
            position: Number of the tensor.
            block: Number of the block within the tensor.
            part: Number of the stream within the block.
            count: How many words.

        Returns:
            Uniform uint64, shape [count], writable.
        """
        stream = self._key.digest(position, 8 * count, part=_number(block, part))
        return np.frombuffer(stream, dtype="<u8").copy()


class ChaCha20:
    """ChaCha20 with a 256-bit key derived from the 128-bit one; the address is the nonce.

    Args:
        key: What it follows from.

    Reference:
        RFC 8439 (2018), section 2.3: a 32-bit counter of 64-byte blocks, from 0, and a 96-bit nonce.
    """

    name = "chacha20"

    def __init__(self, key: RandomKey) -> None:
        self._cipher_key = hashlib.shake_256(b"chacha20 noise key" + key.secret).digest(32)

    def words(self, position: int, *, block: int, part: int, count: int) -> NDArray[np.uint64]:
        """Return the first words of one stream.

        Args:
            position: Number of the tensor.
            block: Number of the block within the tensor.
            part: Number of the stream within the block.
            count: How many words.

        Returns:
            Uniform uint64, shape [count], writable.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        nonce = bytes(4) + position.to_bytes(8, "little") + _number(block, part).to_bytes(4, "little")
        stream = bytearray(8 * count + 63)  # `update_into` asks for room of a block more than the message
        encryptor = Cipher(algorithms.ChaCha20(self._cipher_key, nonce), mode=None).encryptor()
        encryptor.update_into(bytes(8 * count), stream)
        return np.frombuffer(stream, dtype="<u8", count=count)
