"""Fresh entropy that follows from a name: tests and loops draw the same batches and noise in every run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def fresh_keys_from(name: str) -> Iterator[None]:
    """Yield while what is asked of `secrets` follows from a name: other bytes each time, and in each fork."""
    made, home = itertools.count(), os.getpid()

    def token_bytes(length: int | None = None) -> bytes:
        fork = os.getpid() - home
        return hashlib.shake_128(f"{name} {fork} {next(made)}".encode()).digest(length or 32)

    with mock.patch.object(secrets, "token_bytes", token_bytes):
        yield
