"""One backward for the last part of a model and two for the first: factors are kept, or formed again, as memory allows.

The backward is interrupted where the gradient of one value is all that goes on. What came before it is kept by
book-keeping and its part of the graph is freed; behind it factors are dropped once their norms are known. With the
coefficients of all, what was kept is contracted, and the part behind goes backward once more for its own sums.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ghostclip.capture.param_use import ParamUse
from ghostclip.clipping.held_factors import Keeper, Repeats
from ghostclip.clipping.norms import GroupNorms, exact_norms
from ghostclip.clipping.passes import BookKeeping, ClipWeights, NormPass, SumPass
from ghostclip.clipping.state import ClippingState
from ghostclip.factors import Factor
from ghostclip.kernels.products import full_precision
from ghostclip.planning.below import Cut


class PartlyKept(BookKeeping):
    """Book-keeping that drops the factors of some parameters once their norms are known."""

    # What is put together is kept, whosever it is.
    puts_together = False

    def __init__(self, group_of: Mapping[str, int], *, dropped: Collection[str], keeper: Keeper | None = None) -> None:
        # Each of the `dropped` parameters is used once.
        super().__init__(group_of, keeper=keeper)
        self._dropped = dropped
        self.seen: set[int] = set()
        self.repeats: Repeats | None = None
        self.measured_again: Callable[[Tensor], GroupNorms] | None = None

    def go_behind(self, repeats: Repeats, measured_again: Callable[[Tensor], GroupNorms]) -> None:
        """Note that the next backward is that of the part which gets another one."""
        # `measured_again` runs it once more for the norms of a few samples, in float64.
        self.final = False
        self.repeats, self.measured_again = repeats, measured_again

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Store a factor, or add its norm and drop it."""
        if name not in self._dropped:
            super().consume(use, name, factor)
            return
        assert self.repeats is not None, "what is dropped is used behind the interruption alone"
        self.repeats.note(name, factor)
        self.seen.add(id(use))
        self.total.add_norm_of(name, factor)

    def exact(self, index_D: Tensor) -> GroupNorms:
        """Return the norms of a few samples from float64, of stored factors and of those formed once more."""
        found = exact_norms(self.factors, self.total, index_D)
        if self.measured_again is not None:
            found.merge(self.measured_again(index_D))
        return found


class Parts:
    """The backwards of one batch: one for the part before a cut, two for the part behind it."""

    repeats: Repeats

    def __init__(self, state: ClippingState, loss: Tensor, cut: Cut, keeper: Keeper | None) -> None:
        self._state, self._loss, self._cut, self._keeper = state, loss, cut, keeper
        self._grad: Tensor | None = None

    def run(self, *, scale: float) -> None:
        """Add the clipped sums of the batch."""
        # ``scale`` turns arriving gradients into those of each sample's own loss.
        state = self._state
        state.settle_doubt()
        listener = PartlyKept(state.groups(), dropped=self._cut.names, keeper=self._keeper)
        total = self._measure(listener)
        weights = state.decisions.weights(total, state.forward_of(listener), scale, listener.ill_conditioned_B)

        def add() -> None:
            self._add_sums(listener, weights, scale)
            state.require(self.repeats)

        state.all_or_nothing(add)
        state.close(listener)

    def _measure(self, listener: PartlyKept) -> GroupNorms:
        """Run the first backwards and return the norms of all samples."""
        self._state.listen(listener, self._before)
        assert self._grad is not None
        self.repeats = Repeats(self._grad, self._loss.grad_fn, count=len(self._cut.names))
        listener.go_behind(self.repeats, lambda index_D: self._again(listener, index_D))
        self._state.listen(listener, self._behind)
        listener.streams.join()
        with torch.no_grad(), full_precision():
            return listener.norms()

    def _before(self) -> None:
        self._grad, *_ = torch.autograd.grad([self._loss], [self._cut.edge, *self._cut.ends])

    def _behind(self) -> None:
        assert self._grad is not None
        self._state.capture.run_backward([self._cut.edge], [self._grad])

    def _again(self, listener: PartlyKept, index_D: Tensor) -> GroupNorms:
        self.repeats.begin_again()
        norms = NormPass(listener.total.group_of, shared=set(), repeats=self.repeats, index_D=index_D)
        norms.only = self._cut.names
        self._state.listen(norms, self._behind)
        norms.streams.join()
        return norms.norms()

    def _add_sums(self, listener: PartlyKept, weights: ClipWeights, scale: float) -> None:
        """Contract what was stored, and run the last backward for what was not."""
        with torch.no_grad(), full_precision():
            listener.add_sums(self._state.store, weights, scale)
        self.repeats.begin_again()
        behind = SumPass(self._state.store, weights, repeats=self.repeats, expected=listener.seen, several=set())
        behind.only = self._cut.names
        self._state.listen(behind, lambda: torch.autograd.backward([self._cut.edge], [self._grad]))
        behind.streams.join()
        with torch.no_grad(), full_precision():
            behind.finish()
        behind.streams.part()
