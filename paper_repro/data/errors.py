"""The one error of loading data."""

from __future__ import annotations


class DataError(ValueError):
    """A data set that was asked for is not where it was looked for, or not what it should be."""
