"""What is asked of a model whose parameters are gathered from several ranks while its modules run.

Every gathering is a collective operation, in which all ranks take part or all wait. What one rank does beyond the
others (proofs of a forward, which depend on its samples) must therefore gather nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn


class Gathering(Protocol):
    """Ranks that gather the parameters of one model together.

    Attributes:
        units: The modules whose parameters are gathered for their calls.
        brought_together: Names of parameters whose modules see to it themselves that what ranks compute with parts of
            them becomes the whole.
        spread: Names of parameters that every rank has whole, and parts of their gradients.
        proves_again: Whether the latest forward is asked about although none of the ranks has met anything new.
    """

    units: Sequence[nn.Module]
    brought_together: frozenset[str]
    spread: frozenset[str]
    proves_again: bool

    @property
    def divides(self) -> bool:
        """Whether ranks share samples, and compute with a part of what a parameter is."""

    def hold(self, *, able: bool, inputs: Sequence[Tensor]) -> bool:
        """Decide, with all ranks, whether a forward is one to ask for evidence; if so, gather everything for it.

        Args:
            able: Whether this rank has samples enough to prove anything.
            inputs: What the model is called with; ranks that share samples must have the same.

        Returns:
            Whether this rank is to ask.
        """

    def may_ask(self) -> bool:
        """Return whether everything is gathered for a forward that is being proved; else ask for it in a later one."""

    @property
    def wants_proof(self) -> bool:
        """Whether this rank has met something new in a forward that was not one to be proved."""

    def prove_next(self) -> None:
        """Make the next forward one to ask for evidence; called on all ranks, as one of them wants it."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks raise, where everything is gathered; called on all of them."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward: a rank that leaves it says why, and the others raise that."""

    def telling(self) -> AbstractContextManager[None]:
        """Return a context whose errors the others hear of in `together`, which this rank does not reach."""

    def sharing(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks that share samples raise, and run nothing together after one.

        Args:
            what: What is done inside, for messages.

        Returns:
            The context.
        """

    def any_sharing(self, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether something holds on a rank that shares samples with this one; called on all of these.

        Args:
            holds: Whether it does on this rank.

        Returns:
            True if so.
        """

    def tell_failure(self) -> None:
        """Let the others hear in `together` that this rank's forward has raised."""

    def let_go(self) -> None:
        """Free what was gathered for a forward that is over."""

    def agree(self, what: str, value: int) -> list[int]:
        """Return every rank's value; called on all of them.

        Args:
            what: What is exchanged.
            value: This rank's.

        Returns:
            In the order of the ranks.
        """


def on_any(gathering: Gathering | None, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
    """Return whether something holds on any rank that shares samples with this one; called on all of these.

    Args:
        gathering: The ranks, None where there is one alone.
        holds: Whether it does on this rank.

    Returns:
        True if so.
    """
    return holds if gathering is None else gathering.any_sharing(holds)
