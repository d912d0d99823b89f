"""`ghostclip.accounting` under the import paths that scripts for Opacus use."""

from ghostclip.accountants.accountant import IAccountant
from ghostclip.accountants.gdp import GaussianAccountant
from ghostclip.accountants.prv import PRVAccountant
from ghostclip.accountants.rdp import RDPAccountant
from ghostclip.accountants.registry import create_accountant, register_accountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "register_accountant",
]
