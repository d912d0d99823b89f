"""Privacy accounting: the (ε, δ) of a sequence of noisy releases.

Nothing here imports torch. Every accountant is an `Accountant`; `create_accountant` finds one by name.
"""

from ghostclip.accounting.accountant import Accountant, IAccountant, PLDAccountant, PRVAccountant
from ghostclip.accounting.calibration import (
    GaussianAccountant,
    create_accountant,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    register_accountant,
)
from ghostclip.accounting.rdp import DEFAULT_ORDERS, RDPAccountant
from ghostclip.accounting.solve import Bounds

__all__ = [
    "DEFAULT_ORDERS",
    "Accountant",
    "Bounds",
    "GaussianAccountant",
    "IAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "get_noise_multiplier",
    "get_sample_rate",
    "get_steps",
    "register_accountant",
]
