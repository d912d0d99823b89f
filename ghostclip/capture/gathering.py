"""What is asked of a model whose parameters are gathered from several ranks while its modules run.

Every gathering is a collective operation, in which all ranks take part or all wait. What one rank does beyond the
others (proofs of a forward, which depend on its samples) must therefore gather nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn


class Gathering(Protocol):
    """Ranks that gather the parameters of one model."""

    units: Sequence[nn.Module]  # modules whose parameters are gathered for their calls
    # names of parameters whose modules themselves combine what ranks compute with parts of them
    brought_together: frozenset[str]
    spread: frozenset[str]  # names of parameters that every rank has whole with a part of the gradient
    proves_again: bool  # whether the latest forward is proved although no rank has met anything new

    @property
    def divides(self) -> bool:
        """Whether ranks share samples, and compute with parts of parameters."""

    def hold(self, *, able: bool, inputs: Sequence[Tensor]) -> bool:
        """Decide, with all ranks, whether a forward is one to ask for evidence; if so, gather everything for it."""

    def may_ask(self) -> bool:
        """Return whether everything is gathered for a forward that is being proved; else ask for it in a later one."""

    @property
    def wants_proof(self) -> bool:
        """Whether this rank has met something new in a forward that was not one to be proved."""

    def prove_next(self) -> None:
        """Make the next forward one to ask for evidence; called on all ranks."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks raise, in which everything is gathered; called on all of them."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward: a rank that leaves it says why, and the others raise that."""

    def telling(self) -> AbstractContextManager[None]:
        """Return a context whose errors the others raise in `together`, which this rank does not reach."""

    def sharing(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks that share samples raise, to run nothing collective after one."""

    def any_sharing(self, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether something holds on a rank that shares samples with this one; called on all of these."""

    def tell_failure(self) -> None:
        """Let the others raise in `together` that this rank's forward has failed."""

    def let_go(self) -> None:
        """Free the gathered parameters of a finished forward."""

    def agree(self, what: str, value: int) -> list[int]:
        """Return every rank's value, in the order of the ranks; called on all of them."""


def on_any(gathering: Gathering | None, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
    """Return whether something holds on any rank that shares samples with this one; None is one rank alone."""
    return holds if gathering is None else gathering.any_sharing(holds)
