"""One backward: its norms, and then the clipped sums, at once or when other parts of the model have theirs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.clipping.held_factors import Keeper
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.passes import BookKeeping, Hooks
from ghostclip.clipping.state import ClippingState
from ghostclip.kernels.products import full_precision
from ghostclip.planning.plan import Planner


class Held(NamedTuple):
    """One backward without clipped sums yet: its listener with the factors, its norms, and its forward."""

    listener: BookKeeping
    total: GroupNorms
    forward: ForwardContext


class OnePass:
    """Runs the strategies "bookkeeping" and "hooks"."""

    loss_elsewhere = False  # whether backwards begin at outputs, as the loss is computed in another part of the model
    _held: list[Held] | None = None

    def __init__(self, state: ClippingState, planner: Planner, *, device_only: bool) -> None:
        self._state = state
        self._planner = planner
        self._device_only = device_only

    @property
    def is_held(self) -> bool:
        """Whether sums are deferred."""
        return self._held is not None

    def begin(self, strategy: str, loss: Tensor | None, keeper: Keeper | None = None) -> BookKeeping:
        """Return a new listener to a backward that starts at a loss, None if that is not known."""
        state = self._state
        state.settle_doubt()
        if strategy == "hooks":
            state.store.drop_stale_samples()
            return Hooks(state.groups(), device_only=self._device_only, ranks=state.ranks)
        parameters = state.capture.substitution.present
        keep = None if loss is None else self._planner.before(loss, state.capture.forward, parameters)

        def kept_layers(use: ParamUse, grad: Tensor) -> frozenset[str]:
            return self._planner.during(use, grad, parameters) if keep is None else keep

        return BookKeeping(
            state.groups(),
            kept_layers=kept_layers,
            keeper=keeper,
            device_only=self._device_only,
            sequences=state.sequences,
            ranks=state.ranks,
        )

    def run(self, listener: BookKeeping, back: Callable[[], None], *, per_sample: bool) -> None:
        """Run a backward and add its clipped sums; ``per_sample``: the loss is one value per sample."""
        self._state.listen(listener, back)
        self.complete(listener, per_sample=per_sample)

    def complete(self, listener: BookKeeping, *, per_sample: bool) -> None:
        """Add the clipped sums of a backward that has ended."""
        state = self._state
        listener.streams.join()
        with torch.no_grad(), full_precision():
            held = Held(listener, listener.norms(), state.forward_of(listener))
            if self._held is None:
                self._add_sums(held, held.total, state.scale(state.capture.forward, per_sample=per_sample))
        if self._held is None:
            state.close(listener)
        else:
            self._held.append(held)

    def _add_sums(self, held: Held, total: GroupNorms, scale: float, rows: int | None = None) -> None:
        state, listener = self._state, held.listener
        weights = state.decisions.weights(
            total, held.forward, scale, listener.ill_conditioned_B, certain_B=listener.certain_B, rows=rows
        )
        state.all_or_nothing(lambda: listener.add_sums(state.store, weights, scale))

    @contextmanager
    def holding(self, *, loss_elsewhere: bool) -> Iterator[list[Held]]:
        """Defer sums and yield the list of ended backwards; see `GhostClipper.holding`."""
        self._held, self.loss_elsewhere = [], loss_elsewhere
        try:
            yield self._held
        finally:
            self._held, self.loss_elsewhere = None, False

    def conclude(self, held: Sequence[Held], totals: Sequence[GroupNorms], rows: Sequence[int]) -> None:
        """Add the clipped sums of deferred backwards, as one backward over samples of each."""
        # Norms are over all parts of the model; `rows`: how many samples of each have norms.
        state = self._state
        before = state.decisions.passes
        with torch.no_grad(), full_precision():
            for one, total, count in zip(held, totals, rows, strict=True):
                self._add_sums(one, total, state.scale(one.forward, per_sample=False), count)
                state.close(one.listener, rows=count)
        state.decisions.merge_passes(before)
