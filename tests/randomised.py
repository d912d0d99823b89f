"""What tests over random examples take from hypothesis; where it is missing, they are skipped one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["given", "settings", "st"]

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:

    class _Strategies:
        """Stands for every strategy and for what is made of them."""

        def __getattr__(self, name: str) -> _Strategies:
            return self

        def __call__(self, *args: object, **options: object) -> _Strategies:
            return self

        def __or__(self, other: object) -> _Strategies:
            return self

    class settings:
        """Has no effect."""

        def __init__(self, **options: object) -> None: ...

        def __call__(self, test: Callable[..., None]) -> Callable[..., None]:
            return test

        @staticmethod
        def register_profile(name: str, **options: object) -> None: ...

        @staticmethod
        def load_profile(name: str) -> None: ...

    st: Any = _Strategies()

    def given(*args: object, **strategies: object) -> pytest.MarkDecorator:
        """Mark the test as skipped: what it would have drawn is no fixture."""
        return pytest.mark.skip(reason="hypothesis is not installed")
