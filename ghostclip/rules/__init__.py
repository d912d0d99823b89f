"""Which operation gives which factor: one small pure function per operation, one file per family.

A rule is keyed by the torch function that consumed the parameter, not by a module class, so that every class that
computes ``F.linear(x, weight)`` is covered, whatever its name. What cannot be captured at all (a custom autograd
function) is covered by a sampler for its module, see ``ghostclip.rules.registry.register_grad_sampler``.
"""

from ghostclip.rules import head, linear, lookup, norm, recurrent  # noqa: F401  (importing a family registers its rules)
from ghostclip.rules.registry import (
    Call,
    Captured,
    Rule,
    follows_from_form,
    is_rule_for,
    register_grad_sampler,
    register_norm_sampler,
    register_rule,
    rule_for,
)

__all__ = [
    "Call",
    "Captured",
    "Rule",
    "follows_from_form",
    "is_rule_for",
    "register_grad_sampler",
    "register_norm_sampler",
    "register_rule",
    "rule_for",
]
