"""What the strategies of one clipper share: the capture of a model, decisions on samples, the clipped sums."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ghostclip.capture import backward_entry
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.clipping.bounds import Whole
from ghostclip.clipping.decisions import Decisions
from ghostclip.clipping.passes import Pass, Sequences
from ghostclip.clipping.store import GradientStore, Sharded
from ghostclip.clipping.stored_factors import Repeats, Verdict


class ClippingState:
    """State that the strategies of one clipper share: begins and ends what each of them adds to the sums."""

    generation = 0  # how often the sums were reset
    _doubt: Verdict | None = None

    def __init__(
        self,
        model: nn.Module,
        capture: CaptureContext,
        decisions: Decisions,
        *,
        sharded: Sharded | None,
        sequences: Sequences | None,
        mean: bool,
    ) -> None:
        self.model = model
        self.capture = capture
        self.decisions = decisions
        self.sharded = sharded
        # those of `sharded` that work on the same samples
        self.ranks = None if sharded is None else sharded.shared_samples
        self.sequences = sequences  # ranks over which sequences are split
        self.mean = mean  # whether a scalar loss is a mean over the samples, else their sum
        # those of backwards whose sums are still here
        self._consumed: WeakSet[ForwardContext] = WeakSet()
        substitution = capture.substitution
        self.store = GradientStore(
            substitution.parameters,
            present=substitution.present,
            delivery=None if sharded is None else sharded.delivery,
        )
        capture.before_forward = self.store.let_go

    def listen(self, listener: Pass, run: Callable[[], bool | None]) -> bool | None:
        """Run a backward that a listener receives, and return what ``run`` returns."""
        with self.capture.listening(listener), self.capture.substituted():
            return run()

    def groups(self) -> Mapping[str, int]:
        """Return the clip group of every parameter that is trainable now."""
        self.decisions.device = next(self.model.parameters()).device
        if type(self.decisions.policy.grouping) is Whole:
            return self.decisions.open([]).group_of
        named = self.model.named_parameters()
        return self.decisions.open([name for name, parameter in named if parameter.requires_grad]).group_of

    def forward_of(self, listener: Pass) -> ForwardContext:
        """Return the forward that a backward went through."""
        # The first of several, the latest where it met no parameter.
        return listener.forwards[0] if listener.forwards else self.capture.forward

    def scale(self, forward: ForwardContext, *, per_sample: bool) -> float:
        """Return the factor from arriving gradients to those of each sample's own loss: a mean has divided by B."""
        is_mean = self.mean and not per_sample and not forward.summed
        return float(max(1, forward.batch_size)) if is_mean else 1.0

    def all_or_nothing(self, add: Callable[[], object]) -> None:
        """Add the sums of a batch, and drop every sum if that fails half-way: half a batch must never be released."""
        try:
            add()
        except BaseException:
            self.reset()
            raise

    def close(self, listener: Pass, *, rows: int | None = None) -> None:
        """Note that the sums of a backward are complete, and release what it needed."""
        # `rows`: number of samples where rows were left empty; what lies in these is not noted.
        listener.streams.part()
        noted = [forward.noted for forward in listener.forwards if forward.noted is not None]
        for forward in listener.forwards:
            forward.consumed, forward.noted = True, None
            self._consumed.add(forward)
            backward_entry.forget(forward)
        forward = self.forward_of(listener)
        seen = 0 if forward.is_dummy else forward.batch_size
        rows = seen if rows is None else rows
        self._end(rows, noted if rows == seen else [])
        sharded = self.sharded
        if sharded is not None:
            # What one rank finds, all refuse.
            self.all_or_nothing(lambda: sharded.look_at(self._sums))
        self.capture.let_go()

    def _sums(self) -> dict[str, Tensor | None]:
        parameters = self.capture.substitution.parameters
        return {name: self.store.summed_gradient(p) for name, p in parameters.items() if p.requires_grad}

    def adopt(self, sums: Mapping[str, Tensor], rows: int, noted: list[Any]) -> None:
        """Add the sums of a batch that were formed elsewhere, by parameter name."""
        if not self.capture.substitution.parameters:
            # No forward was run here.
            named = self.model.named_parameters()
            self.capture.substitution.parameters.update({name: p for name, p in named if p.requires_grad})

        def add() -> None:
            for name, clipped_sum in sums.items():
                self.store.add(name, clipped_sum)

        self.all_or_nothing(add)
        self._end(rows, noted)

    def _end(self, rows: int, noted: list[Any]) -> None:
        notes = self.capture.note_inputs
        self.decisions.close(rows, None if notes is None or not noted else notes.join(noted))
        self.store.finish()

    def discard(self) -> None:
        """Forget sums that nobody has released: forwards whose graph was retained may go backward again."""
        for forward in [forward for forward in self._consumed if forward.retained]:
            backward_entry.wait_again(self.capture, forward)
        self.reset()

    def reset(self) -> None:
        """Drop the sums."""
        self.generation += 1
        self._consumed.clear()
        self.decisions.forget()
        self.store.reset()

    # -- whether a second backward repeated the first ---------------------------------------------------------------

    def require(self, repeats: Repeats) -> None:
        """Drop the sums of a second backward that brought other gradients; where asking waits, it is asked later."""
        self._doubt = repeats.require()
        if self._doubt is not None and self.sharded is not None:
            # Other ranks hold a part of these sums, and wait for no later answer.
            self.settle_doubt()
        elif self._doubt is not None:
            self.store.drop_if(self._doubt.differs_K.any())

    def take_doubt(self) -> Verdict | None:
        """Return whether the step before repeated itself, where that is still open, for the caller to read."""
        doubt, self._doubt = self._doubt, None
        return doubt

    def settle_doubt(self) -> None:
        """Read whether the step before repeated itself, where that is still open."""
        doubt = self.take_doubt()
        if doubt is not None:
            doubt.require()
