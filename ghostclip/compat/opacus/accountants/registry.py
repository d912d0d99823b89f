"""Accountants by name."""

from ghostclip.accounting import create_accountant, register_accountant

__all__ = ["create_accountant", "register_accountant"]
