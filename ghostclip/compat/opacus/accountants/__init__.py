"""`ghostclip.accounting` under the import paths that scripts for Opacus use."""

from ghostclip.compat.opacus.accountants.accountant import IAccountant
from ghostclip.compat.opacus.accountants.gdp import GaussianAccountant
from ghostclip.compat.opacus.accountants.prv import PRVAccountant
from ghostclip.compat.opacus.accountants.rdp import RDPAccountant
from ghostclip.compat.opacus.accountants.registry import create_accountant, register_accountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "register_accountant",
]
