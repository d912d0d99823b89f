"""Keys that all randomness follows from, who may draw from them, their random streams, and exact selections from these.

A copy, an unpickled object and a forked process hold the same key and the same position, and would draw the same noise
and the same batches again: the difference of two such releases has no noise. They are noticed where something is drawn
or released, not where they are made, since frameworks copy and fork what they never use.

Nothing here reads or changes torch's global generator: `torch.manual_seed` neither fixes nor repeats what is drawn.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ghostclip.errors import CopyError, FixedSeedWarning, InvalidOptionError, ResumeError

_KEY_BYTES = 16

Records = NDArray[np.int64]


# Number and token of a process: its children have another number, or another token once they were forked by Python.
_Process = tuple[int, object]
_process: _Process = os.getpid(), object()


def _begin_process() -> None:
    """Set a token for this process, after a fork."""
    global _process  # noqa: PLW0603 - there is one process
    _process = os.getpid(), object()


def _this_process() -> _Process:
    """Return this process's number and token, renewed if a library has forked."""
    # A library written in C may fork without Python's knowing.
    if _process[0] != os.getpid():
        _begin_process()
    return _process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)


class Owner:
    """The one object, in one process, that may draw on from a state: copies and forks would repeat its randomness.

    Privacy:
        What a copy of the object, an unpickled one or a forked process would draw has been, or will be, drawn by the
        original too. All of these are refused by `require`. A state that is saved and loaded on purpose (`state_dict`)
        is a continuation, and is not.
    """

    def __init__(self, holder: object | None) -> None:
        # None: a copy or pickle, which belongs to nobody.
        self._holder = None if holder is None else weakref.ref(holder)
        self._process = None if holder is None else _this_process()

    def require(self, holder: object, *, remedy: str) -> None:
        """Refuse a copy of the object, and another process; ``remedy`` is a sentence of what to do instead."""
        if self._holder is None or self._holder() is not holder:
            raise self._copy_error(holder, remedy)
        if self._process is not _this_process():
            raise CopyError(
                f"this {type(holder).__name__} was made in another process, of which process {os.getpid()} is a fork: "
                f"both would go on from the same state, with the same randomness and the same account. {remedy}"
            )

    def move_here(self, holder: object, *, remedy: str) -> None:
        """Make this process the owner, where the state was set in it; refuse a copy of the object."""
        if self._holder is None or self._holder() is not holder:
            raise self._copy_error(holder, remedy)
        self._process = _this_process()

    def _copy_error(self, holder: object, remedy: str) -> CopyError:
        """Return the error for a copy."""
        return CopyError(
            f"this {type(holder).__name__} is a copy (copy.copy, copy.deepcopy, pickle): it would go on from the "
            f"same state as the original, with the same randomness and the same account. {remedy}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a copy or pickle that belongs to no process yet."""
        return Owner, (None,)


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
        """Set the key to a hash of a seed."""
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
        """Return the next uint64 words, never the same ones twice, read-only."""
        part, self._parts = self._parts, self._parts + 1
        return np.frombuffer(self._key.digest(self._position, 8 * count, part=part), dtype="<u8")


def independent_coins(words: WordStream, count: int, rate: float) -> Records:
    """Select each of ``count`` records independently with probability ``rate``, ascending, int64.

    Cost:
        O(1 + N·q), whatever the number of records.

    Reference:
        Devroye (1986), Non-Uniform Random Variate Generation, XII.2: geometric waiting times.
    """
    # The gaps between selected records are geometric: ⌊log u / log(1 - q)⌋ records are passed over for a uniform u.
    if rate == 1:
        return np.arange(count, dtype=np.int64)
    chunks = []
    last = -1
    while last < count:
        mean = (count - 1 - last) * rate
        # Enough at the first try in all but one case in 1e9; the loop goes on where it is not.
        tries = int(mean + 6 * math.sqrt(mean)) + 8
        # (k + 1/2) / 2^64, rounded: never 0, and with full precision near 0, where rare events are decided.
        uniform = (words.take(tries).astype(np.float64) + 0.5) * 2.0**-64
        # A gap beyond the end is beyond the end: capped before the conversion, which would overflow.
        gaps = np.minimum(np.floor(np.log(uniform) / math.log1p(-rate)), count).astype(np.int64)
        chunks.append(last + np.cumsum(gaps + 1))
        last = int(chunks[-1][-1])
    selected = np.concatenate(chunks)
    return selected[selected < count]


def permutation(words: WordStream, count: int) -> Records:
    """Return the records in uniformly random order.

    Cost:
        O(N log N).
    """
    # Sorts random 64-bit words; two equal ones (less than once in 1e5 permutations of 1e7 records) keep their order.
    return np.argsort(words.take(count), kind="stable")


def subset(words: WordStream, records: Records, size: int) -> Records:
    """Return a uniformly random subset of at most ``size`` records, in their order."""
    if len(records) <= size:
        return records
    return records[np.sort(permutation(words, len(records))[:size])]
