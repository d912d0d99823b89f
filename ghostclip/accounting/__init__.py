"""Privacy accounting: how much (ε, δ) a sequence of subsampled Gaussian steps has released.

Nothing here imports torch. Every accountant is an `Accountant`; `create_accountant` finds one by name.
"""

from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.calibration import get_noise_multiplier
from ghostclip.accounting.conversion import epsilon_from_rdp
from ghostclip.accounting.ledger import steps_per_epoch
from ghostclip.accounting.rdp import RDPAccountant
from ghostclip.accounting.rdp_curve import DEFAULT_ORDERS, rdp_curve
from ghostclip.accounting.registry import create_accountant, register_accountant

__all__ = [
    "DEFAULT_ORDERS",
    "Accountant",
    "RDPAccountant",
    "create_accountant",
    "epsilon_from_rdp",
    "get_noise_multiplier",
    "rdp_curve",
    "register_accountant",
    "steps_per_epoch",
]
