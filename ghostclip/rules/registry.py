"""The table from operation to rule, and what passes between the capture and a rule.

Shape letters: B samples, T positions, L the leading (row) axes, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from ghostclip.factors import Factor

# Brings a tensor ``(*L, *F)`` with the given number of leading axes into the canonical ``(B, T, *F)``.
Split = Callable[[Tensor, int], Tensor]
# (saved tensors, gradient of the output, split) -> the factor of every tracked argument, by its name.
Factors = Callable[[Sequence[Tensor], Tensor, Split], Mapping[str, Factor]]


@dataclass(frozen=True)
class Call:
    """One operation that consumed tracked tensors, with its arguments bound to names.

    Attributes:
        name: The operation's name.
        values: Arguments by name; tracked ones as detached plain tensors.
        tracked: Names of the tracked arguments.
    """

    name: str
    values: Mapping[str, Any]
    tracked: frozenset[str]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument's value.

        Args:
            name: The argument's name.
            default: What serves where it was not given or is None.

        Returns:
            The value; a tracked tensor's is detached.
        """
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class Captured:
    """What a rule asks to be kept, and how it turns that into factors.

    Attributes:
        saved: Tensors the backward needs.
        rows: The tensor whose leading axes tell the samples (the layer's input).
        lead: How many axes of the *output* (in ``order``) lead before the features.
        factors: Called in the backward.
        form: What the factors are, for the coverage table.
        order: Axes of the output, those of its rows first, as ``Tensor.permute`` takes them; empty where rows lead
            already. ``factors`` gets the gradient in this order.
    """

    saved: tuple[Tensor, ...]
    rows: Tensor
    lead: int
    factors: Factors
    form: str
    order: tuple[int, ...] = ()


Rule = Callable[[Call], Captured | None]


@dataclass(frozen=True)
class _Entry:
    rule: Rule
    arguments: tuple[str, ...]


_RULES: Final[dict[str, _Entry]] = {}


def register_op(*names: str, arguments: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations by their ``__name__``.

    Args:
        *names: Names under which the operation appears (``"linear"``, ``"__matmul__"``).
        arguments: The operation's positional argument names in order, separated by blanks.

    Returns:
        A decorator for a function ``Call -> Captured | None``; None means that the generic fallback must serve.
    """

    def decorate(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = _Entry(rule, tuple(arguments.split()))
        return rule

    return decorate


def rule_for(name: str) -> tuple[Rule, tuple[str, ...]] | None:
    """Return the rule for an operation and its argument names, or None."""
    entry = _RULES.get(name)
    return None if entry is None else (entry.rule, entry.arguments)
