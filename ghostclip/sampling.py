"""Which records take part in a step: Poisson sampling, and the keys that its randomness (and the noise's) follows from.

Nothing here reads or changes torch's global generator: `torch.manual_seed` neither fixes nor repeats what is drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from ghostclip._validate import fraction, positive_int
from ghostclip.accounting.ledger import steps_per_epoch
from ghostclip.errors import FixedSeedWarning, InvalidOptionError, ResumeError

_KEY_BYTES = 16


class RandomKey:
    """A key of 128 bits and the random streams that follow from it, addressed by position.

    Stream number n is a function of (key, purpose, n): a resumed run draws what the interrupted one would have drawn,
    and two positions never share a stream.

    Privacy:
        The key is as secret as the noise itself, and it is part of a checkpoint's state: whoever has it can recompute
        the noise and the batches. By default it is fresh entropy of the operating system. An explicit seed or
        generator makes it reproducible, and warns.

    Args:
        purpose: What is drawn, so that equal seeds give unrelated streams for different purposes.
        seed: Whole number to derive the key from.
        generator: torch generator to draw the key from, once.

    Raises:
        InvalidOptionError: If both `seed` and `generator` are given.
    """

    def __init__(self, purpose: str, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if seed is not None and generator is not None:
            raise InvalidOptionError(f"{purpose}: seed and generator are both given; give one of them, or none.")
        self._purpose = purpose
        if seed is None and generator is None:
            self.secret = secrets.token_bytes(_KEY_BYTES)
            return
        warnings.warn(
            f"{purpose} follows from an explicit {'generator' if seed is None else 'seed'}: whoever knows it can undo "
            "the protection. Leave it out when the result is released.",
            FixedSeedWarning,
            stacklevel=3,
        )
        if generator is not None:
            words = torch.randint(2**32, (_KEY_BYTES // 4,), generator=generator, device=generator.device)
            seed = sum(int(word) << (32 * index) for index, word in enumerate(words.tolist()))
        self.secret = hashlib.shake_128(f"{purpose} seed {seed}".encode()).digest(_KEY_BYTES)

    def digest(self, position: int, length: int) -> bytes:
        """Return bytes of a cryptographic keystream.

        Args:
            position: Number of the stream, ≥ 0.
            length: How many bytes.

        Returns:
            The first `length` bytes of the stream.
        """
        block = self.secret + position.to_bytes(8, "little") + self._purpose.encode()
        return hashlib.shake_128(block).digest(length)

    def stream(self, position: int) -> np.random.Generator:
        """Return a fast 64-bit generator with a key of its own, derived by `digest`.

        Args:
            position: Number of the stream, ≥ 0.

        Returns:
            A numpy generator at the start of the stream.
        """
        entropy = int.from_bytes(self.digest(position, _KEY_BYTES), "little")
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))

    def load(self, secret: str) -> None:
        """Replace the key by a saved one.

        Args:
            secret: The key in hexadecimal digits.

        Raises:
            ResumeError: If it is no key.
        """
        try:
            key = bytes.fromhex(secret)
        except (TypeError, ValueError) as error:
            raise ResumeError(f"{self._purpose} state: 'key' holds no hexadecimal digits ({error}).") from error
        if len(key) != _KEY_BYTES:
            raise ResumeError(f"{self._purpose} state: 'key' has {len(key)} bytes, not {_KEY_BYTES}.")
        self.secret = key


class PoissonSampler(Sampler[list[int]]):
    """Batch sampler in which every record joins every batch independently with probability q.

    A batch may be empty, and has any size up to the number of records. The size is drawn from Binomial(N, q) and that
    many distinct records are chosen: the same distribution as N coins, in time proportional to the batch.

    Privacy:
        This is the sampling that the accountants assume: batches are independent, and none is ever drawn twice, also
        after an abandoned loop. Which records were drawn, and how many, stays secret: batch sizes are not covered by
        the guarantee. Replicas (see `share`) all draw the same batch and keep every n-th record.

    Cost:
        Proportional to the batch when q is small, whatever the number of records; never more than to N.

    Args:
        num_samples: N, the number of records.
        sample_rate: q in (0, 1].
        generator: torch generator to draw the key from, once; warns.
        steps: Batches per epoch; round(1/q), at least 1, by default.
        seed: Whole number to derive the key from; warns.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_samples = positive_int(num_samples, "num_samples")
        self.sample_rate = fraction(sample_rate, "sample_rate")
        self.steps = steps_per_epoch(self.sample_rate) if steps is None else positive_int(steps, "steps")
        self.rank, self.num_replicas = 0, 1
        self._key = RandomKey("sampling", seed=seed, generator=generator)
        self._drawn = 0
        self._delivered = 0
        self._epoch_end = 0
        self._resuming = False
        self._loop: object = None
        self._tracker: object = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps

    def draw(self, position: int) -> list[int]:
        """Return batch number `position` of the whole training, always the same one.

        Args:
            position: Number of the batch, counted over all epochs from 0.

        Returns:
            Distinct record numbers, ascending.
        """
        stream = self._key.stream(position)
        size = stream.binomial(self.num_samples, self.sample_rate)
        records = np.sort(stream.choice(self.num_samples, size, replace=False, shuffle=False))
        return records[self.rank :: self.num_replicas].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one epoch of fresh batches; after `load_state_dict`, what was left of the interrupted one.

        Yields:
            Distinct record numbers, ascending.

        Raises:
            InvalidOptionError: If another loop over this sampler has started meanwhile.
        """
        loop = self._loop = object()
        if not self._resuming:
            self._epoch_end = self._drawn + self.steps
        self._resuming = False
        while self._drawn < self._epoch_end:
            position = self._drawn
            # Counted before it is handed out: whatever happens to this batch, it is never drawn again.
            self._drawn = position + 1
            if self._tracker is None:
                self._delivered = self._drawn
            yield self.draw(position)
            if self._loop is not loop:
                raise InvalidOptionError("a newer loop over this private loader has started; use one at a time.")

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Let a loader that draws ahead say by `mark_delivered` which batches its user has received.

        Within this context `state_dict` counts deliveries instead of draws, so that prefetched batches are not lost.

        Yields:
            Nothing.
        """
        tracker = self._tracker = object()
        self._delivered = self._drawn
        try:
            yield
        finally:
            if self._tracker is tracker:
                self._tracker = None

    def mark_delivered(self) -> None:
        """Count one batch as received by the user."""
        self._delivered += 1

    def share(self, *, rank: int, num_replicas: int, key: str) -> None:
        """Draw the same batches as all replicas and keep every `num_replicas`-th record of each, from `rank` on.

        Args:
            rank: Number of this replica, from 0.
            num_replicas: How many there are.
            key: The key that all of them use: entry `key` of one replica's `state_dict`.

        Raises:
            InvalidOptionError: If the rank is not below the number of replicas.
        """
        if not 0 <= rank < num_replicas:
            raise InvalidOptionError(f"rank={rank!r}: must lie in [0, num_replicas={num_replicas!r}).")
        self.rank, self.num_replicas = rank, num_replicas
        self._key.load(key)

    def state_dict(self) -> dict[str, Any]:
        """Return the key and the position as plain Python values.

        Privacy:
            The state contains the key: keep it where the noise's and the data's secrets are kept.

        Returns:
            Mapping for `load_state_dict`.
        """
        return {
            "key": self._key.secret.hex(),
            "position": self._delivered,
            "remaining": max(0, self._epoch_end - self._delivered),
            "num_samples": self.num_samples,
            "sample_rate": self.sample_rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a saved sampler was: the next epoch yields what was left of the interrupted one.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: If it is incomplete or belongs to other data or another rate.
        """
        missing = {"key", "position", "remaining", "num_samples", "sample_rate"} - state.keys()
        if missing:
            raise ResumeError(f"sampler state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        for name in ("num_samples", "sample_rate"):
            if state[name] != getattr(self, name):
                raise ResumeError(
                    f"sampler state: {name}={state[name]!r} was saved, this sampler has {getattr(self, name)!r}; "
                    "resume with the data and the batch size of the interrupted run."
                )
        self._key.load(state["key"])
        self._drawn = self._delivered = int(state["position"])
        self._epoch_end = self._drawn + int(state["remaining"])
        self._resuming = state["remaining"] > 0


UniformWithReplacementSampler = PoissonSampler
"""The name that Opacus gives to Poisson sampling."""
