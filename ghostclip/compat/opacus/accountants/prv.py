"""The tight accountant, by privacy loss distribution, under Opacus's name."""

from ghostclip.accounting import PRVAccountant

__all__ = ["PRVAccountant"]
