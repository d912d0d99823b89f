"""The central-limit estimate; it must be asked for with `estimate=True`."""

from ghostclip.accounting import GaussianAccountant

__all__ = ["GaussianAccountant"]
