"""Privacy accounting: the (ε, δ) of a sequence of noisy releases.

Nothing here imports torch. Every accountant is an `Accountant`; `create_accountant` finds one by name.
"""

from ghostclip.accounting.accountant import Accountant, IAccountant
from ghostclip.accounting.calibration import (
    delta_too_large,
    epsilon_too_large,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
)
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.accounting.pld import PLDAccountant, PRVAccountant
from ghostclip.accounting.rdp import DEFAULT_ORDERS, RDPAccountant, epsilon_from_rdp, rdp_curve
from ghostclip.accounting.registry import (
    DEFAULT_ACCOUNTANT,
    BestAccountant,
    DPAccountingAccountant,
    GaussianAccountant,
    bounding_accountant,
    create_accountant,
    register_accountant,
)
from ghostclip.accounting.solve import Bounds

__all__ = [
    "DEFAULT_ACCOUNTANT",
    "DEFAULT_ORDERS",
    "Accountant",
    "BestAccountant",
    "Bounds",
    "DPAccountingAccountant",
    "GaussianAccountant",
    "IAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "bounding_accountant",
    "create_accountant",
    "delta_too_large",
    "epsilon_too_large",
    "epsilon_from_rdp",
    "get_noise_multiplier",
    "get_sample_rate",
    "get_steps",
    "rdp_curve",
    "register_accountant",
    "steps_per_epoch",
]
