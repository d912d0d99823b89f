"""Strategies: one backward for norms and sums, two through one forward, or two for the first part of a model alone.

*One pass* keeps factors and adds the clipped sums at once, or when other parts of the model have their norms. *Two
passes* form factors again: the first backward is for the norms, the second for the sums. *Parts* do as memory allows:
the backward is interrupted where the gradient of one value is all that goes on. What came before it is kept by
book-keeping and its part of the graph is freed; behind it factors are dropped once their norms are known. With the
coefficients of all, what was kept is contracted, and the part behind goes backward once more for its own sums. Which
one runs is chosen in `GhostClipper.resolve_strategy`.

They share the capture of a model, decisions on samples and the clipped sums (`ClippingState`).
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ghostclip import _torch, _validate
from ghostclip.capture import backward_entry
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.clipping.bounds import Whole
from ghostclip.clipping.decisions import ClipWeights, Decisions, Sequences
from ghostclip.clipping.joint import RepeatCheck, Verdict
from ghostclip.clipping.norms import GroupNorms, exact_norms
from ghostclip.clipping.passes import BookKeeping, Hooks, NormPass, Pass, SumPass
from ghostclip.clipping.plan import Cut, Planner
from ghostclip.clipping.store import GradientStore, Sharded
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.factors import Factor
from ghostclip.kernels.products import full_precision


class ClippingState:
    """What all strategies of a clipper share: how a backward's sums are begun, completed or dropped."""

    generation = 0  # how often the sums were reset
    _verdict: Verdict | None = None  # whether the last two backwards agreed, still to be read from the device

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
        capture.before_forward = self.store.drop_unowned

    def listen(self, listener: Pass, run: Callable[[], bool | None]) -> bool | None:
        """Run a backward whose output gradients a pass receives, and return what ``run`` returns."""
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
        return (float(max(1, forward.batch_size)) if is_mean else 1.0) / forward.start

    def all_or_nothing(self, add: Callable[[], object]) -> None:
        """Add the sums of a batch, and drop every sum if that fails half-way: half a batch must never be released."""
        try:
            add()
        except BaseException:
            self.reset()
            raise

    def close(self, listener: Pass, *, rows: int | None = None) -> None:
        """Complete a backward: consume its forwards, record its samples, and deliver its sums."""
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
            self.all_or_nothing(lambda: sharded.compare_sums(self._sums))
        self.capture.free_gathered()

    def _sums(self) -> dict[str, Tensor | None]:
        """Return the clipped sums by parameter name."""
        parameters = self.capture.substitution.parameters
        return {name: self.store.summed_gradient(p) for name, p in parameters.items() if p.requires_grad}

    def adopt(self, sums: Mapping[str, Tensor], rows: int, noted: list[Any]) -> None:
        """Add the sums of a batch that a compiled graph has formed, by parameter name."""
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
        """Record the samples of a completed backward, and finish its sums."""
        notes = self.capture.note_inputs
        self.decisions.close(rows, None if notes is None or not noted else notes.join(noted))
        self.store.finish()

    def discard(self) -> None:
        """Drop sums that were not released; forwards with a retained graph may have another backward."""
        for forward in [forward for forward in self._consumed if forward.retained]:
            backward_entry.expect_again(self.capture, forward)
        self.reset()

    def reset(self) -> None:
        """Drop the sums."""
        self.generation += 1
        self._consumed.clear()
        self.decisions.forget()
        self.store.reset()

    # -- whether a second backward repeated the first ---------------------------------------------------------------

    def require(self, repeats: RepeatCheck) -> None:
        """Refuse or drop a second backward that differs from the first; an answer on the device is read later."""
        self._verdict = repeats.require()
        if self._verdict is not None and self.sharded is not None:
            # Other ranks hold a part of these sums, and wait for no later answer.
            self.require_verdict()
        elif self._verdict is not None:
            self.store.drop_if(self._verdict.differs_K.any())

    def pop_verdict(self) -> Verdict | None:
        """Return the open answer whether the last two backwards agreed, for the caller to read; None if none is."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def require_verdict(self) -> None:
        """Wait for the open answer whether the last two backwards agreed, and refuse if they did not."""
        verdict = self.pop_verdict()
        if verdict is not None:
            verdict.require()


TWO_PASS: Final = ("ghost", "fast")


def check_ranks(model: nn.Module, strategy: str, *, sharded: Sharded | None, sequences: Sequences | None) -> None:
    """Refuse parameters in parts without `sharded`, and options that contradict other ranks."""
    if sharded is None and any(map(_torch.is_sharded_tensor, model.parameters())):
        raise UnsupportedModelError(
            f"{type(model).__name__} has parameters that several ranks hold in parts (DTensor). Call make_private, "
            "or say GhostClipper(model, sharded=ghostclip.distributed.ShardedModel(model), ...)."
        )
    if sequences is not None and sharded is not None:
        raise InvalidOptionError(
            "sequences with sharded: splitting sequences over ranks that hold parameters in parts is not supported. "
            "Use one of them."
        )
    if sequences is not None and strategy not in {"auto", "bookkeeping"}:
        raise InvalidOptionError(
            f"strategy={strategy!r} with sequences: factors that ranks have in parts are brought together by "
            "book-keeping alone. Use strategy='bookkeeping'."
        )


def check_budget(memory_budget: float, strategy: str, *, sharded: Sharded | None, sequences: Sequences | None) -> None:
    """Refuse a memory budget below 1 where nothing can be chosen to meet it."""
    _validate.positive(memory_budget, "memory_budget", allow_infinity=True)
    reasons = {
        "sequences": sequences is not None,
        "a model that is sharded": sharded is not None,
        f"strategy={strategy!r}": strategy not in ("auto", "bookkeeping"),
    }
    conflict = next((reason for reason, holds in reasons.items() if holds), None)
    if memory_budget < 1 and conflict is not None:
        raise InvalidOptionError(
            f"memory_budget={memory_budget} with {conflict}: below 1 every layer gets one backward or two as memory "
            "allows, and the two are compared. Use strategy='auto', or a budget of 1 or more."
        )


class PendingBackward(NamedTuple):
    """A backward whose clipped sums wait: its factors, its norms and its forward."""

    listener: BookKeeping  # holds its factors
    total: GroupNorms  # norms of its samples
    forward: ForwardContext


class OnePass:
    """Strategies of one backward: "bookkeeping" and "hooks"."""

    loss_elsewhere = False  # whether backwards begin at outputs, as the loss is computed in another part of the model
    _held: list[PendingBackward] | None = None  # backwards whose sums wait; None where none do

    def __init__(self, state: ClippingState, planner: Planner) -> None:
        self._state = state
        self._planner = planner

    @property
    def is_pending(self) -> bool:
        """Whether sums are deferred."""
        return self._held is not None

    def begin(self, strategy: str, loss: Tensor | None) -> BookKeeping:
        """Return a new pass for a backward from a loss, None if that is not known."""
        state = self._state
        state.require_verdict()
        if strategy == "hooks":
            state.store.drop_stale_samples()
            return Hooks(state.groups(), ranks=state.ranks)
        parameters = state.capture.substitution.present
        keep = None if loss is None else self._planner.before(loss, state.capture.forward, parameters)

        def stored_layers(use: ParamUse, grad: Tensor) -> frozenset[str]:
            return self._planner.during(use, grad, parameters) if keep is None else keep

        return BookKeeping(state.groups(), stored_layers=stored_layers, sequences=state.sequences, ranks=state.ranks)

    def run(self, listener: BookKeeping, back: Callable[[], None], *, per_sample: bool) -> None:
        """Run a backward and add its clipped sums; ``per_sample``: the loss is one value per sample."""
        self._state.listen(listener, back)
        self.complete(listener, per_sample=per_sample)

    def complete(self, listener: BookKeeping, *, per_sample: bool) -> None:
        """Compute norms and add the clipped sums of a backward that has ended, or hold it."""
        state = self._state
        listener.streams.join()
        with torch.no_grad(), full_precision():
            pending = PendingBackward(listener, listener.norms(), state.forward_of(listener))
            if self._held is None:
                self._add_sums(pending, pending.total, state.scale(state.capture.forward, per_sample=per_sample))
        if self._held is None:
            state.close(listener)
        else:
            self._held.append(pending)

    def _add_sums(self, pending: PendingBackward, total: GroupNorms, scale: float, rows: int | None = None) -> None:
        """Compute the weights from norms and add the stored factors' clipped sums."""
        state, listener = self._state, pending.listener
        weights = state.decisions.weights(total, pending.forward, scale, listener.ill_conditioned_B, rows=rows)
        state.all_or_nothing(lambda: listener.add_sums(state.store, weights, scale))

    @contextmanager
    def holding(self, *, loss_elsewhere: bool) -> Iterator[list[PendingBackward]]:
        """Defer sums and yield the list of ended backwards; see `GhostClipper.holding`."""
        self._held, self.loss_elsewhere = [], loss_elsewhere
        try:
            yield self._held
        finally:
            self._held, self.loss_elsewhere = None, False

    def conclude(self, pending: Sequence[PendingBackward], totals: Sequence[GroupNorms], rows: Sequence[int]) -> None:
        """Add the clipped sums of deferred backwards, as one backward over samples of each."""
        # Norms are over all parts of the model; `rows`: how many samples of each have norms.
        state = self._state
        before = state.decisions.passes
        with torch.no_grad(), full_precision():
            for one, total, count in zip(pending, totals, rows, strict=True):
                self._add_sums(one, total, state.scale(one.forward, per_sample=False), count)
                state.close(one.listener, rows=count)
        state.decisions.merge_passes(before)


class TwoPasses:
    """Strategies of two backwards, norms first: "ghost", and "fast", which forms per-sample gradients for them."""

    # A backward for norms is run again where a parameter turned out to be used several times, which only its later uses
    # show, and once more, for a few samples in float64, where rounding may have changed their norms.
    def __init__(self, state: ClippingState) -> None:
        self._state = state
        self._several: set[str] = set()  # parameters known to have several uses

    def run(self, loss: Tensor, *, scale: float, instantiate: bool) -> None:
        """Add a batch's clipped sums by two backwards from a scalar loss; `instantiate` for the strategy "fast"."""
        # ``instantiate`` forms per-sample gradients for the norms.
        state = self._state
        repeats = RepeatCheck(loss, loss.grad_fn, count=sum(state.capture.forward.use_counts.values()))
        norms, total, same_uses, ill_conditioned_B = self._measure(loss, repeats, instantiate=instantiate)
        weights = state.decisions.weights(total, state.forward_of(norms), scale, ill_conditioned_B)
        expected = norms.seen if same_uses else None
        sums = SumPass(
            state.store, weights, repeats=repeats, expected=expected, several=norms.several, ranks=state.ranks
        )

        def add() -> None:
            state.listen(sums, loss.backward)
            sums.streams.join()
            with torch.no_grad(), full_precision():
                sums.finish()
                state.require(repeats)

        state.all_or_nothing(add)
        sums.streams.part()
        state.close(norms)

    def _measure(
        self, loss: Tensor, repeats: RepeatCheck, *, instantiate: bool
    ) -> tuple[NormPass, GroupNorms, bool, Tensor | None]:
        """Run the first backward, again where needed, until all norms are certain."""
        # Returns the last pass, the norms, whether it met all uses, and the samples that were measured in float64.
        state = self._state
        group_of = state.groups()
        index_D: Tensor | None = None
        total: GroupNorms | None = None
        ill_conditioned_B: Tensor | None = None
        while True:
            norms = NormPass(
                group_of,
                shared=self._several,
                repeats=repeats,
                instantiate=instantiate,
                index_D=index_D,
                ranks=state.ranks,
            )
            same_uses = state.listen(norms, lambda: state.capture.run_backward([loss], [None]))
            if self._any_rank(same_uses is None or bool(norms.late), norms):
                self._several |= norms.late
                repeats.begin_again(anew=total is None)
                continue
            repeats.begin_again()
            norms.streams.join()
            with torch.no_grad(), full_precision():
                measured = norms.norms()
                if total is not None:
                    if index_D is not None:
                        ill_conditioned_B = total.refine(measured, index_D)
                    break
                total = measured
                imprecise_B = self._imprecise_B(total)
            if not self._any_rank(imprecise_B is not None, norms):
                break
            index_D = None if imprecise_B is None else imprecise_B.nonzero().squeeze(1)
        return norms, total, bool(same_uses), ill_conditioned_B

    def _any_rank(self, again: bool, norms: NormPass) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether a rank needs the backward again: where parameters are gathered for it, all take part."""
        sharded = self._state.sharded
        if sharded is None:
            return again
        order = int.from_bytes(hashlib.blake2b(repr(norms.order).encode(), digest_size=7).digest(), "big")
        answers = sharded.agree("second backward", 2 * order + again)
        sharded.delivery.order(at_once=len({value // 2 for value in answers}) == 1)
        return any(value % 2 for value in answers)

    def _imprecise_B(self, total: GroupNorms) -> Tensor | None:
        """Return which norms need float64, None without any, with one wait for the device for all answers."""
        verdict = self._state.pop_verdict()
        imprecise_B = total.imprecise_B(None if verdict is None else verdict.differs_K.any())
        if verdict is not None and not total.finite:
            verdict.require()
        return imprecise_B


class PartialBookKeeping(BookKeeping):
    """Book-keeping that drops the factors of some parameters once their norms are known."""

    # What is put together is kept, whosever it is.
    puts_together = False

    def __init__(self, group_of: Mapping[str, int], *, dropped: Collection[str]) -> None:
        # Each of the `dropped` parameters is used once.
        super().__init__(group_of)
        self._dropped = dropped
        self.seen: set[int] = set()  # `id` of the uses whose factors were dropped
        self.repeats: RepeatCheck | None = None
        self.measured_again: Callable[[Tensor], GroupNorms] | None = None

    def begin_behind_cut(self, repeats: RepeatCheck, measured_again: Callable[[Tensor], GroupNorms]) -> None:
        """Begin the backward of the part behind the cut, which gets another one later."""
        # `measured_again` runs it once more for the norms of a few samples, in float64.
        self.final = False
        self.repeats, self.measured_again = repeats, measured_again

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Store a factor, or add its norm and drop it."""
        if name not in self._dropped:
            super().consume(use, name, factor)
            return
        assert self.repeats is not None, "what is dropped is used behind the interruption alone"
        self.repeats.compare_factor(name, factor)
        self.seen.add(id(use))
        self.total.add_norm_of(name, factor)

    def exact(self, index_D: Tensor) -> GroupNorms:
        """Return the norms of a few samples from float64, of stored factors and of those formed once more."""
        norms = exact_norms(self.factors, self.total, index_D)
        if self.measured_again is not None:
            norms.merge(self.measured_again(index_D))
        return norms


class Parts:
    """Backwards of one batch interrupted at a cut: one for the part before it, two for the part behind."""

    repeats: RepeatCheck

    def __init__(self, state: ClippingState, loss: Tensor, cut: Cut) -> None:
        self._state, self._loss, self._cut = state, loss, cut
        self._grad: Tensor | None = None  # gradient at the cut

    def run(self, *, scale: float) -> None:
        """Add the clipped sums of the batch."""
        # ``scale`` turns arriving gradients into those of each sample's own loss.
        state = self._state
        state.require_verdict()
        listener = PartialBookKeeping(state.groups(), dropped=self._cut.names)
        total = self._measure(listener)
        weights = state.decisions.weights(total, state.forward_of(listener), scale, listener.ill_conditioned_B)

        def add() -> None:
            self._add_sums(listener, weights, scale)
            state.require(self.repeats)

        state.all_or_nothing(add)
        state.close(listener)

    def _measure(self, listener: PartialBookKeeping) -> GroupNorms:
        """Run the first backwards and return the norms of all samples."""
        self._state.listen(listener, self._before)
        assert self._grad is not None
        self.repeats = RepeatCheck(self._grad, self._loss.grad_fn, count=len(self._cut.names))
        listener.begin_behind_cut(self.repeats, lambda index_D: self._again(listener, index_D))
        self._state.listen(listener, self._behind)
        listener.streams.join()
        with torch.no_grad(), full_precision():
            return listener.norms()

    def _before(self) -> None:
        """Run the backward from the loss to the cut."""
        self._grad, *_ = torch.autograd.grad([self._loss], [self._cut.edge, *self._cut.ends])

    def _behind(self) -> None:
        """Run the backward from the cut on."""
        assert self._grad is not None
        self._state.capture.run_backward([self._cut.edge], [self._grad])

    def _again(self, listener: PartialBookKeeping, index_D: Tensor) -> GroupNorms:
        """Run the backward from the cut again for a few samples' norms in float64."""
        self.repeats.begin_again()
        norms = NormPass(listener.total.group_of, shared=set(), repeats=self.repeats, index_D=index_D)
        norms.only = self._cut.names
        self._state.listen(norms, self._behind)
        norms.streams.join()
        return norms.norms()

    def _add_sums(self, listener: PartialBookKeeping, weights: ClipWeights, scale: float) -> None:
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
