"""Passes over one backward: the strategies differ in what they do with a factor when it arrives.

Every pass listens to one backward. Book-keeping and hooks need one; ghost and fast clipping listen to two: norms
first, then the clipped sums, contracted layer by layer as the same gradients arrive again.

A layer's backward runs on the stream of its forward, whoever asks for the sums. Autograd lets the stream that calls a
backward wait for those on which gradients of parameters were accumulated. Here none is: what a hook is given on another
stream must be waited for by who goes on with it, and its memory must not be used again there before that is done.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import SavedTensors
from ghostclip.capture.param_use import ParamUse
from ghostclip.clipping.decisions import ClipWeights, Sequences
from ghostclip.clipping.joint import (
    Joint,
    RepeatCheck,
    SharedInputNorms,
    SmallLayers,
    formed,
    tampered_message,
    versions,
)
from ghostclip.clipping.norms import (
    GroupNorms,
    SharedSamples,
    cross_terms,
    exact_norms,
    exact_sqnorm,
    loses_nothing,
    terms_of_uses,
)
from ghostclip.clipping.store import GradientStore
from ghostclip.errors import BatchAxisError, GhostClipError, TamperedGradientError, UnsupportedModelError
from ghostclip.factors import AtIndex, Dense, Factor, Outer, Permuted, SquaredNorm, joined
from ghostclip.factors.wrapped import sum_tensors
from ghostclip.kernels import runtime
from ghostclip.kernels.products import full_precision

KeptLayers: TypeAlias = Callable[[ParamUse, Tensor], frozenset[str]]


# More elements than any model has.
_ANY = 1 << 62


class Streams:
    """CUDA streams on which the gradients of one backward arrived."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.device, Any], Any] = {}

    def add_current(self, device: torch.device) -> None:
        """Record the stream that is current as a gradient arrives."""
        stream = _torch.current_stream(device)
        if stream is not None:
            self._seen[device, stream] = stream

    def join(self) -> None:
        """Make the current stream of each device wait for all streams that gradients arrived on."""
        for (device, _), stream in self._seen.items():
            here = _torch.current_stream(device)
            if here != stream:
                here.wait_stream(stream)

    def part(self) -> None:
        """Make the other streams wait for the current one, lest they reuse memory that it still reads."""
        for (device, _), stream in self._seen.items():
            here = _torch.current_stream(device)
            if here != stream:
                stream.wait_stream(here)
        self._seen.clear()


class Pass(ABC):
    """Receives the output gradients of one backward, and hands each parameter's factors to `consume`."""

    final = True  # whether no other backward follows, so that what uses have saved may go
    only: Collection[str] | None = None  # parameters whose factors are taken; None for all
    _arriving: Tensor | None = None  # output gradient of the use whose factors are being formed
    _alike: SmallLayers  # holds small layers until others of their form have come

    def __init__(self, ranks: SharedSamples | None = None) -> None:
        """Start a pass; `ranks` have parts of the same samples' gradients."""
        self.forwards: list[ForwardContext] = []  # the forwards whose uses arrived
        self._ranks = ranks
        self._spread: defaultdict[str, list[Factor]] = defaultdict(list)  # factors of some positions, by parameter
        runtime.renew()
        self.streams = Streams()  # the streams that their gradients arrived on

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Form the factors of a use from its output gradient, and consume them."""
        if grad.is_cuda or not self.forwards or self.forwards[-1] is not use.forward:
            self._record_arrival(use, grad)
        with undisturbed():
            self._consume_factors(use, grad)
        if self.final:
            use.release()

    def _record_arrival(self, use: ParamUse, grad: Tensor) -> None:
        """Record the forward of a use, and the stream that its gradient came on."""
        if use.forward not in self.forwards:
            self.admit(use.forward)
        if grad.is_cuda:
            self.streams.add_current(grad.device)

    def _record_held(self, use: ParamUse, grad: Tensor) -> None:
        """Record a use whose gradient is held for others alike; form the factors of all once they are many."""
        if grad.is_cuda or not self.forwards or self.forwards[-1] is not use.forward:
            self._record_arrival(use, grad)
        if self._alike.full:
            self.streams.join()
            with undisturbed():
                self._alike.finish()

    def _consume_factors(self, use: ParamUse, grad: Tensor) -> None:
        """Form the factors of a use and consume them."""
        self._arriving = grad
        for name, factor in use.parameter_factors(grad):
            if self.only is None or name in self.only:
                self.consume(use, name, factor)
        self._arriving = None

    def _may_wait(self, factor: Factor) -> bool:
        """Return whether a factor has memory of its own, so that it cannot change while it is held."""
        return (
            type(factor) is Dense
            and self._arriving is not None
            and _torch.memory_key(factor.grad_BP) != _torch.memory_key(self._arriving)
        )

    def _defers(self, use: ParamUse, name: str, factor: Factor) -> bool:
        """Hold a factor of which each rank has some positions only; return whether it is held."""
        if not use.forward.spread.get(name, False):
            return False
        self._spread[name].append(formed(factor))
        return True

    def _added_up(self) -> list[tuple[str, Factor]]:
        """Return (name, gradients) of the factors held by `_defers`, summed over all ranks in one exchange."""
        if self._ranks is None or not self.forwards:
            return []
        names = sorted({name for one in self.forwards for name, spread in one.spread.items() if spread})
        if not names:
            return []
        both = next((name for one in self.forwards for name in names if not one.spread.get(name, True)), None)
        if both is not None:
            raise UnsupportedModelError(
                f"parameter '{both}' is used with all positions in one forward and with divided ones in another of the "
                "same backward, on ranks that share samples. Let its input lie the same way in both, or run a backward "
                "for each."
            )
        batch_size, ranks = self.forwards[0].batch_size, self._ranks
        parts: list[Tensor] = []
        for name in names:
            factors = self._spread.pop(name, [])
            # Whoever has no position of any sample has nothing to add.
            nothing = torch.zeros(batch_size, ranks.shape_of(name).numel(), dtype=ranks.dtype, device=ranks.device)
            parts.append(sum_tensors([factor.materialize().flatten(1) for factor in factors]) if factors else nothing)
        whole_BP = ranks.add_up(torch.cat([part.to(nothing) for part in parts], dim=1))
        split = whole_BP.split([part.shape[1] for part in parts], dim=1)
        return [
            (name, Dense(part_BP.reshape(batch_size, *ranks.shape_of(name))))
            for name, part_BP in zip(names, split, strict=True)
        ]

    def admit(self, forward: ForwardContext) -> None:
        """Record a forward behind this backward; all must have the same number of samples."""
        if forward.consumed:
            raise GhostClipError(
                "a second backward went through the same forward: its samples would be clipped twice and contribute "
                "twice. Add the losses before one backward, or run the model again."
            )
        self.forwards.append(forward)
        refuse_two_sizes(self.forwards)

    @abstractmethod
    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Use one parameter's factor from one use: take its norm, store it, or add its sum, as the pass does."""


def refuse_two_sizes(forwards: Sequence[ForwardContext]) -> None:
    """Refuse a backward through forwards of different numbers of samples."""
    if len(forwards) > 1 and len(sizes := dict.fromkeys([forward.batch_size for forward in forwards])) > 1:
        raise BatchAxisError(
            f"one backward went through forwards of {' and '.join(map(str, sizes))} samples: which sample is which "
            "is unknown. Give every call the same batch as first tensor, states later, or as many rows of other data."
        )


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Within the block no graph is made and no autocast applies."""
    with full_precision(), torch.no_grad():
        yield


def undisturbed() -> AbstractContextManager[None]:
    """Return a context without gradients and autocast, in which factors are formed and measured."""
    return _without_gradients() if torch.is_grad_enabled() else full_precision()


class BookKeeping(Pass):
    """One backward: store every factor (or the per-sample gradient where that is smaller), then contract once."""

    def __init__(
        self,
        group_of: Mapping[str, int],
        *,
        stored_layers: KeptLayers = lambda use, grad: frozenset(),
        sequences: Sequences | None = None,
        ranks: SharedSamples | None = None,
    ) -> None:
        # stored_layers: returns, when the first gradient arrives, the parameters whose per-sample gradients are stored
        # although their factors are smaller; see `Planner`.
        super().__init__(ranks)
        self._sequences = sequences
        self._stored_layers = stored_layers
        self._stored: frozenset[str] | None = None  # what `stored_layers` returned; None before the first gradient
        self.factors: defaultdict[str, list[Factor]] = defaultdict(list)
        self.total = GroupNorms(group_of, ranks)
        self._waiting: defaultdict[str, list[Factor]] = defaultdict(list)  # of parameters of several uses
        self._versions: dict[int, list[int]] = {}  # of stored factors' tensors, by `id` of the factor
        self._together = SharedInputNorms(self.total)  # layers that read one input
        self._joints: list[Joint] = []  # stored factors of parameters that were put together
        self._alike = SmallLayers(join=self._join, alone=self._consume_factors, single=self._add)
        alone = sequences is not None or ranks is not None or len(self.total.sums) > 1
        self.puts_together = type(self).puts_together and not alone

    puts_together = True

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """As in `Pass`, with small layers held for others alike; the first gradient decides what is stored."""
        if self._stored is None:
            self._stored = self._stored_layers(use, grad)
            if self._sequences is not None:
                self._sequences.begin(use.forward)
        if use.alike is None or not self.puts_together or not self._alike.hold(use, grad, self._stored):
            super().receive(use, grad)
            return
        self._record_held(use, grad)

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Store a factor and add its squared norm."""
        if self._ranks is not None and self._defers(use, name, factor):
            return
        if self._sequences is not None:
            factor = self._sequences.gather(factor)
        stored = factor if type(factor) is Dense else self._stored_form(name, factor)
        if use.forward.use_counts[name] > 1:
            # Its uses are put together first: there may be as many as steps of a sequence.
            self._waiting[name].append(formed(stored))
        # A part that runs again may bring another use yet.
        elif not self.puts_together or use.forward.runs_again or not self._alike.hold_gradients(name, stored):
            self._add(name, stored, use=use)

    def _stored_form(self, name: str, factor: Factor) -> Factor:
        """Return a factor in the form in which it is stored: per-sample gradients if smaller, or if planned."""
        stored = smaller_form(factor, always=name in (self._stored or ()))
        return stored.aligned() if type(stored) is Outer else stored

    def _join(self, joint: Joint) -> None:
        """Add the norms of parameters that were put together, and store them."""
        stored = self._stored_form(joint.names[0], joint.factor)
        assert isinstance(stored, (Dense, Outer))
        self.total.add_norms_of(joint.names, stored)
        self._joints.append(joint if stored is joint.factor else Joint(joint.names, stored))

    def _add(self, name: str, factor: Factor, *, use: ParamUse | None = None) -> None:
        """Add a factor's norm and store it with its version."""
        if use is None or not self._together.hold(use, name, factor):
            self.total.add_norm_of(name, factor)
        self.factors[name].append(factor)
        self._versions[id(factor)] = versions(factor)

    ill_conditioned_B: Tensor | None = None

    def norms(self) -> GroupNorms:
        """Return the norms of all samples; recomputed in float64 where rounding could matter."""
        self._alike.finish()
        self._alike.finish_gradients()
        for name, factor in self._added_up():
            self._add(name, factor)
        for name in list(self._waiting):
            for factor in joined(self._waiting.pop(name)):
                self._add(name, smaller_form(factor))
        self._together.finish()
        if len(self.forwards) > 1:
            # A parameter may have been used in each of them.
            self._split_joint()
        for name, factors in self.factors.items():
            crossed = cross_terms(factors) if len(factors) > 1 else None
            if crossed is not None:
                self.total.add(name, crossed)
        self._complete()
        imprecise_B = self.total.imprecise_B()
        if imprecise_B is not None:
            self._split_joint()
            index_D = imprecise_B.nonzero().squeeze(1)
            self.ill_conditioned_B = self.total.refine(self.exact(index_D), index_D)
        return self.total

    def _complete(self) -> None:
        """Add up the norms over ranks that share samples."""
        if self.forwards:
            self.total.complete(self.forwards[0].batch_size)

    def exact(self, index_D: Tensor) -> GroupNorms:
        """Return the norms of a few samples from float64."""
        norms = exact_norms(self.factors, self.total, index_D)
        norms.complete(len(index_D))
        return norms

    def add_sums(self, sums: GradientStore, weights: "ClipWeights", scale: float) -> None:
        """Contract every factor into its parameter's sum, dropping it at once."""
        # `scale` turns the arrived gradients into those of each sample's own loss. A factor that was changed in place
        # after its norm had been taken is refused.
        if weights.ill_conditioned_B is not None:
            self._split_joint()
        self._split_joint(lambda joint: not sums.fits_at_once(joint.elements))
        joints, self._joints = self._joints, []
        while joints:
            weights.into_several(sums, joints.pop(0))
        for name in sums.in_order(list(self.factors)):
            factors = self.factors.pop(name)
            while factors:
                factor = factors.pop(0)
                if self._versions.get(id(factor)) not in (None, versions(factor)):
                    raise TamperedGradientError(tampered_message(name))
                weights.into(sums, factor, name, more=bool(factors))
                del factor
            sums.complete(name)

    def _split_joint(self, which: Callable[[Joint], bool] = lambda joint: True) -> None:
        """Store parameters that were put together one by one, all or those where ``which`` holds."""
        joints, self._joints = self._joints, []
        for joint in joints:
            if not which(joint):
                self._joints.append(joint)
                continue
            for name, factor in joint.parts():
                self.factors[name].append(factor)


class Hooks(BookKeeping):
    """Per-sample gradients materialised for every parameter, as Opacus's hooks do."""

    puts_together = False

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Materialise a factor and add it to the parameter's per-sample gradients, one `Dense` each."""
        # A part of one, on ranks that share samples, is added up over them in `_added_up`.
        if self._ranks is not None and self._defers(use, name, factor):
            return
        # A gradient may be that of the output itself, which the user must not get to change.
        grad_BP = factor.materialize().contiguous()
        if isinstance(factor, Dense):
            grad_BP = grad_BP.clone()
        before = self.factors[name]
        if before:
            grad_BP = before.pop().materialize() + grad_BP
        before.append(Dense(grad_BP))

    def norms(self) -> GroupNorms:
        """Return the norms of the materialised gradients."""
        for name, factor in self._added_up():
            self.factors[name].append(factor)
        for name, (factor,) in self.factors.items():
            self.total.add_norm_of(name, factor)
        self._complete()
        return self.total

    def add_sums(self, sums: GradientStore, weights: "ClipWeights", scale: float) -> None:
        """Leave the per-sample gradients to the user and add the clipped sums."""
        # An empty batch has none: the sample that stands in for it is nobody's.
        end = 0 if any(forward.is_dummy for forward in self.forwards) else None
        for name, (factor,) in self.factors.items():
            grad_BP = factor.materialize()[:end]
            sums.store_sample_gradients(name, grad_BP if scale == 1 else grad_BP * scale)
        super().add_sums(sums, weights, scale)


class OneOfTwo(Pass):
    """One of two backwards that must repeat each other; small gradients wait for similar ones."""

    def __init__(self, repeats: RepeatCheck, *, puts_together: bool, ranks: SharedSamples | None) -> None:
        super().__init__(ranks)
        self._comparison, self._puts_together = repeats, puts_together
        self._alike = SmallLayers(join=self._join, alone=self._consume_alone, single=self._add, final=self.final)

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """As in `Pass`, with small layers held for others alike, and what arrives compared between the backwards."""
        if self._is_compared_by_use(use):
            # With the other backward's: the output gradient and what was saved stand for all factors.
            self._comparison.compare_use(use, grad)
        if not (self._puts_together and self._puts_aside(use, grad)):
            super().receive(use, grad)
            return
        self._record_held(use, grad)

    def _is_compared_by_use(self, use: ParamUse) -> bool:
        """Return whether a use's gradient and saved tensors are compared, instead of its factors."""
        # What hooks on saved tensors pack can be asked for once.
        return use.alike is not None and self.only is None and (use.node is None or type(use.node) is SavedTensors)

    def _compare_factor(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Compare a factor with the other backward's, where its use is not compared."""
        if not self._is_compared_by_use(use):
            self._comparison.compare_factor(name, factor)

    def _waits(self, name: str, factor: Factor) -> bool:
        """Hold a small gradient for others alike; return whether it is held."""
        if not (self._puts_together and self._may_wait(factor) and self._alike.hold_gradients(name, factor)):
            return False
        if self._alike.gradients_full:
            self.streams.join()
            self._alike.finish_gradients()
        return True

    def _finish_waiting(self) -> None:
        """Form and pass on all that is held for others alike."""
        self._alike.finish()
        self._alike.finish_gradients()

    def _puts_aside(self, use: ParamUse, grad: Tensor) -> bool:
        """Hold a small layer's gradient for others alike; return whether it is held."""
        return self.only is None and self._ranks is None and self._alike.hold(use, grad, frozenset())

    def _consume_alone(self, use: ParamUse, grad: Tensor) -> None:
        """Consume a held use for which nothing alike came."""
        self._consume_factors(use, grad)

    @abstractmethod
    def _join(self, joint: Joint) -> None:
        """Consume the factors of several parameters that were put together, each used once."""

    @abstractmethod
    def _add(self, name: str, factor: Factor) -> None:
        """Consume the factor of one parameter."""


class NormPass(OneOfTwo):
    """First of two backwards, for norms: a factor is dropped once measured, that of a shared parameter at the end."""

    final = False

    def __init__(
        self,
        group_of: Mapping[str, int],
        *,
        shared: set[str],
        repeats: RepeatCheck,
        instantiate: bool = False,
        index_D: Tensor | None = None,
        ranks: SharedSamples | None = None,
    ) -> None:
        # shared: parameters known to be used more than once. instantiate: form each layer's per-sample gradient for its
        # norm (fast gradient clipping). index_D: samples whose norms rounding may have changed; only theirs are
        # computed then, in float64.
        self.total = GroupNorms(group_of, ranks)
        super().__init__(repeats, puts_together=index_D is None and len(self.total.sums) == 1, ranks=ranks)
        self.seen: set[int] = set()  # `id` of the uses that arrived
        self.arrived: set[str] = set()  # parameters that were measured at their first use
        self.late: set[str] = set()  # those whose second use came after that: the pass must be run again
        self.several: set[str] = set()  # parameters with several uses
        self.order: list[str] = []  # parameters in the order in which uses arrived
        self._shared = shared
        self._instantiate, self._index_D = instantiate, index_D
        self._together = SharedInputNorms(self.total)  # layers that read one input
        self._waiting: defaultdict[str, list[Factor]] = defaultdict(list)  # of parameters of several uses

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """As in `OneOfTwo`, with uses recorded for the second backward to compare."""
        self.seen.add(id(use))
        self.order += use.site.consumed
        super().receive(use, grad)

    def _puts_aside(self, use: ParamUse, grad: Tensor) -> bool:
        """As in `OneOfTwo`, but not for parameters with several uses."""
        names = use.site.names
        # A second use is measured again together with the first one.
        met = self._instantiate or not (self._shared.isdisjoint(names) and self.arrived.isdisjoint(names))
        if met or not super()._puts_aside(use, grad):
            return False
        self.arrived.update(names)
        return True

    def _consume_alone(self, use: ParamUse, grad: Tensor) -> None:
        """Consume a held use by itself, as one that has not arrived yet."""
        self.arrived.difference_update(use.site.names)
        super()._consume_alone(use, grad)

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Add a factor's squared norm and drop it, or store it for cross terms; small ones wait for similar ones."""
        self._compare_factor(use, name, factor)
        if self._ranks is not None and self._defers(use, name, factor):
            return
        if name not in self.arrived and (name in self._shared or use.forward.use_counts[name] > 1):
            self._waiting[name].append(formed(factor))
            return
        # A second use came after the first one was dropped: only the whole pass again can give the cross term.
        (self.late if name in self.arrived else self.arrived).add(name)
        if not self._waits(name, factor):
            self._add(name, factor, use=use)

    def _join(self, joint: Joint) -> None:
        """Add the norms of several parameters that were put together."""
        self.total.add_norms_of(joint.names, joint.factor)

    def norms(self) -> GroupNorms:
        """Return the norms of all samples, or of the few in `index_D`; shared parameters' cross terms included."""
        self._finish_waiting()
        self.several = set(self._waiting)
        for name, factor in self._added_up():
            self._add(name, factor)
        if self._index_D is not None:
            self.total.merge(exact_norms(self._waiting, self.total, self._index_D))
            self.total.complete(len(self._index_D))
            return self.total
        self._together.finish()
        for name, waiting in self._waiting.items():
            factors = joined(waiting)
            for factor in factors:
                self._add(name, factor)
            crossed = cross_terms(factors)
            if crossed is not None:
                self.total.add(name, crossed)
            elif len(waiting) > 1 and not isinstance(factors[0], Outer):
                # The second backward adds them one by one, whatever cancels between them; an outer product says so.
                terms = factors[0].terms() or terms_of_uses(waiting)
                self.total.add(name, SquaredNorm(torch.zeros_like(terms.mass_B), None, terms))
        self._waiting.clear()
        if self.forwards:
            self.total.complete(self.forwards[0].batch_size)
        return self.total

    def _add(self, name: str, factor: Factor, *, use: ParamUse | None = None) -> None:
        """Add a factor's squared norm, in the form that this pass measures."""
        inside = factor
        while isinstance(inside, (Permuted, AtIndex)):
            inside = inside.inner
        if self._index_D is not None:
            self.total.add(name, exact_sqnorm(factor, self._index_D))
        elif self._instantiate and isinstance(inside, Outer):
            self.total.add(name, inside.instantiated_sums() or inside.instantiated_sqnorm())
        elif use is None or not self._together.hold(use, name, factor):
            self.total.add_norm_of(name, factor)


class SumPass(OneOfTwo):
    """Second of two backwards: each factor is added to its parameter's clipped sum as it arrives, and dropped."""

    def __init__(
        self,
        sums: GradientStore,
        weights: "ClipWeights",
        *,
        repeats: RepeatCheck,
        expected: set[int] | None,
        several: set[str],
        ranks: SharedSamples | None = None,
    ) -> None:
        # Where sums are sent on as they come, none waits.
        # expected: uses that the norm pass has met; None where recomputation makes new ones. several: parameters that
        # it met more than once.
        combine = weights.ill_conditioned_B is None and len(weights.coef_GB) == 1 and sums.fits_at_once(_ANY)
        super().__init__(repeats, puts_together=combine, ranks=ranks)
        self._sums, self._weights = sums, weights
        self._expected, self._several = expected, several

    def _puts_aside(self, use: ParamUse, grad: Tensor) -> bool:
        """As in `OneOfTwo`, but not for parameters with several uses."""
        if not (self._several.isdisjoint(use.site.names) and super()._puts_aside(use, grad)):
            return False
        self._expect(use)
        return True

    def consume(self, use: ParamUse, name: str, factor: Factor) -> None:
        """Contract a factor into its parameter's sum."""
        self._expect(use)
        self._compare_factor(use, name, factor)
        if self._ranks is not None and self._defers(use, name, factor):
            return
        several = name in self._several
        if several or not self._waits(name, factor):
            self._add(name, factor, more=several)

    def _expect(self, use: ParamUse) -> None:
        """Refuse a use that had no norm in the first backward."""
        if self._expected is not None and id(use) not in self._expected:
            message = f"{use.site.describe()}: its gradient arrived in the second backward only, so it has no norm."
            raise GhostClipError(message)

    def _join(self, joint: Joint) -> None:
        """Add the clipped sums of several parameters that were put together."""
        self._weights.into_several(self._sums, joint)

    def _add(self, name: str, factor: Factor, *, more: bool = False) -> None:
        """Add a factor's clipped sum, and complete the parameter unless ``more`` uses follow."""
        self._weights.into(self._sums, factor, name, more=more)
        if not more:
            self._sums.complete(name)

    def finish(self) -> None:
        """Add all that was held: for layers alike, for all uses of a parameter, for other ranks."""
        self._finish_waiting()
        for name, factor in self._added_up():
            self._add(name, factor)
        self._weights.finish(self._sums)


def smaller_form(factor: Factor, *, always: bool = False) -> Factor:
    """Return the formed per-sample gradient in the place of a factor where it is no larger, or ``always``."""
    # Where that depends on the size of the batch, factors of gradients that nearly cancel are stored instead: what is
    # left of these is rounded differently in either form, and no sample's contribution may depend on how many there
    # are.
    if type(factor) is Dense:
        return factor
    if isinstance(factor, AtIndex):
        return AtIndex(smaller_form(factor.inner, always=always), factor.index, shape=factor.shape)
    if isinstance(factor, Permuted):
        return Permuted(smaller_form(factor.inner, always=always), factor.order)
    if not isinstance(factor, Outer) or not (always or factor.stores_gradient()):
        return factor
    instantiated = factor.instantiated()
    return instantiated if factor.stores_in_any_batch() or loses_nothing(factor, instantiated) else factor
