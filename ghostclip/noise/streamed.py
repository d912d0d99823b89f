"""Noise that follows from a cryptographic key stream: what levels "secure" and "exact" share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ghostclip.noise.keyed import KeyedNoise
from ghostclip.noise.keys import RandomKey
from ghostclip.noise.keystream import available, make_keystream


class StreamedNoise(KeyedNoise):
    """Draws from ChaCha20 where `cryptography` is installed, from SHAKE-128 otherwise; a resumed run keeps to its own.

    Args:
        key: What the noise follows from.
    """

    def __init__(self, key: RandomKey) -> None:
        super().__init__(key)
        self._words = make_keystream(available(), key)

    def renew_key(self) -> None:
        """Draw from a fresh key from here on; see `KeyedNoise.renew_key`."""
        super().renew_key()
        self._words = make_keystream(self._words.name, self._key)

    def shared_state(self) -> dict[str, Any]:
        """Return the key, the position and the name of the key stream.

        Privacy:
            Whoever has this state can recompute the noise: keep it as secret as the data.

        Returns:
            Plain Python values.
        """
        return {**super().shared_state(), "keystream": self._words.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: If it is incomplete, of another level, or needs a package that is not installed.
        """
        name = state.get("keystream", self._words.name)
        make_keystream(name, self._key)  # refused before anything is changed
        super().load_state_dict(state)
        self._words = make_keystream(name, self._key)
