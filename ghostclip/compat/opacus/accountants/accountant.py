"""The interface of accountants, under Opacus's name for it."""

from ghostclip.accounting import IAccountant

__all__ = ["IAccountant"]
