"""The Rényi accountant."""

from ghostclip.accounting import RDPAccountant

__all__ = ["RDPAccountant"]
