"""Which operation gives which factor: one small pure function per operation, one file per family.

A rule is keyed by the torch function that consumed the parameter, not by a module class, so that every class that
computes ``F.linear(x, weight)`` is covered, whatever its name.
"""

from ghostclip.rules import (  # noqa: F401  (importing a family registers its rules)
    activation,
    bag,
    conv,
    embedding,
    index,
    linear,
    moe,
    norm,
    products,
)
from ghostclip.rules.registry import Call, Captured, rule_for

__all__ = ["Call", "Captured", "rule_for"]
