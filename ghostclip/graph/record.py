"""`CompiledRecord`: which releases of a training compiled graphs compute, so that a repeated one is computed alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What of a training graphs compute."""

    since: int  # releases before the first one that they compute
    sizes: tuple[int, ...]  # physical batch sizes that graphs are of
    keys: tuple[str, ...]  # of those on disk that were held against the eager engine
    branches: tuple[bool, ...] | None = None  # which way branches on data go in them

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Compiled:
        """Return what was written as plain values."""
        went = plain.get("branches")
        return cls(
            int(plain["since"]), tuple(plain["sizes"]), tuple(plain["keys"]), None if went is None else tuple(went)
        )


class CompiledRecord:
    """What of a training graphs compute, as its optimizer, checkpoints and ledger have it."""

    def __init__(self) -> None:
        self._now: Compiled | None = None
        self.write: Callable[[Mapping[str, Any]], None] | None = None  # to a ledger, before anything is released
        self.written: Callable[[], Mapping[str, Any] | None] = lambda: None  # what a ledger has of this training

    def note(self, compiled: Compiled) -> None:
        """Record what graphs compute from now on."""
        if self.write is not None:
            self.write(asdict(compiled))
        self._now = compiled

    @property
    def known(self) -> Compiled | None:
        """What is recorded; a ledger may know of releases after the checkpoint that was loaded."""
        plain = self.written()
        return Compiled.of(plain) if plain else self._now

    def state(self) -> dict[str, Any] | None:
        """Return it in plain values, for a checkpoint."""
        known = self.known
        return None if known is None else asdict(known)

    def load(self, plain: Mapping[str, Any] | None) -> None:
        """Continue what a checkpoint holds."""
        self._now = None if plain is None else Compiled.of(plain)
