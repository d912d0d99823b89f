"""Key stream of levels "secure" and "exact": ChaCha20, uniform 64-bit words addressed by position, block and part.

The package `cryptography` makes it at the speed of the processor; without it the plain twin that the GPU's kernel is
tested against makes the same words, some thirty times slower.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ghostclip.errors import InvalidOptionError
from ghostclip.kernels.noise import MAX_BLOCKS, chacha_state, chacha_words
from ghostclip.noise.keyed import Block
from ghostclip.noise.keys import RandomKey

PARTS = 256
"""Streams of one block."""

_log = logging.getLogger(__name__)


@cache
def _ciphers() -> Any:
    """Return the package's module of ciphers, or None where it is not installed."""
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        _log.warning("secure noise is slow without the package cryptography: pip install cryptography")
        return None
    return ciphers


def cipher_key(key: RandomKey) -> bytes:
    """Return the cipher's 32-byte key, as secret as the noise."""
    return hashlib.shake_256(b"chacha20 noise key" + key.secret).digest(32)


def words_of(key: RandomKey, block: Block, *, part: int, count: int) -> NDArray[np.uint64]:
    """Return the first words of one stream, uniform uint64, addressed by position, block and part.

    Reference:
        RFC 8439 (2018), section 2.3: a 32-bit counter of 64-byte blocks, from 0, and a 96-bit nonce.
    """
    if not (0 <= block.number < MAX_BLOCKS and 0 <= part < PARTS):
        raise InvalidOptionError(
            f"block {block.number}, part {part}: one tensor's noise ends at {MAX_BLOCKS} and {PARTS}."
        )
    secret = cipher_key(key)
    stream, ciphers = block.number * PARTS + part, _ciphers()
    if ciphers is None:
        state = chacha_state(secret, block.position)
        words_SW = chacha_words(state, streams=[stream], count=count, device=torch.device("cpu"))
        return words_SW[0].numpy().view(np.uint64)
    nonce = bytes(4) + block.position.to_bytes(8, "little") + stream.to_bytes(4, "little")
    content = bytearray(8 * count + 63)  # `update_into` asks for room of a block more than the message
    encryptor = ciphers.Cipher(ciphers.algorithms.ChaCha20(secret, nonce), mode=None).encryptor()
    encryptor.update_into(bytes(8 * count), content)
    return np.frombuffer(content, dtype="<u8", count=count)
