"""Samples that follow their company without any gradient telling: by control flow, by counting, by the batch's size.

A mask that is left out when no sample is padded, an expert's capacity that earlier samples use up, a sum divided by
``len(x)``: no gradient leads from one sample to the other, so that the probe sees nothing. In the forwards that are
proved, the model is therefore run again without gradients and without dropout. One of every two neighbours, drawn anew,
gives way to a copy of one of the others, which all move to other places; and those that gave way run by themselves.
Every sample must come out as it did in the forward itself. So one that follows what stands at a place is seen whichever
two they are, and one that follows others by what they hold if one of them was left out and itself was not.

Where that shows anything, where samples have their places (random numbers, lists with a value for each of them, lengths
in order, flat inputs), or where the model runs on no such batch, sets of samples are replaced by copies of others with
all in their places: the drawn ones, and either half of the batch; and some samples run by themselves. Then any two
samples of different halves, and the neighbours 2k and 2k + 1, are told apart for certain, any other two with
probability 1/2 in each proof. A model that draws random numbers is run both ways: in place with its own numbers, and
elsewhere with such as are alike for all samples, unless some are drawn that no sample has of its own (an order, classes
by their weights), or by NumPy or Python. What gradients show is asked of all pairs: see `checks/probe.py`.

What lies behind closed gates, and beside samples of larger values, is looked at in a few samples alone.

Gates that are closed, what a model multiplies by zero or by a number that has not learned yet, show nothing: ``x + gate
* x.mean(0)`` keeps samples apart as long as the gate is zero, be it a parameter (ReZero, LayerScale, a projection or an
adapter that starts at zero), a buffer, or a number that a schedule changes; the graph is the same before and after. To
see what lies behind, a forward is run with every gate open: a parameter, a buffer or another tensor of a module that
holds one value everywhere holds others, and zeros among the factors of sums and products are one half. Samples that are
computed by themselves stay so whatever these values are.

The samples that are replaced are *loud* in these runs, several times as large as any of the batch may be: what only the
largest of all decides (one scale for the whole batch, a threshold) would be the same for copies of samples that stay.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.substitution import gradients_of_leaves
from ghostclip.checks.batches import AlikeDraws, Batch, OtherDraws, Randomness, WithoutDropout, unnoticed
from ghostclip.checks.dependence import batch_axis_of, rows_of_each
from ghostclip.checks.module_state import ModuleState, restored
from ghostclip.checks.unchecked import BEHIND, FEWER, REMEMBERED, REPLACED, SCALARS, Unchecked
from ghostclip.errors import GhostClipError, SampleMixingError

# Each with the places and names of its factors. ``beta`` is none of them: what it multiplies may never have been set.
_FACTORS: Final[dict[str, tuple[Sequence[int], Sequence[str]]]] = {
    "mul": ((0, 1), ()),
    "lerp": ((2,), ("weight",)),
    "add": ((), ("alpha",)),
    "sub": ((), ("alpha",)),
    "rsub": ((), ("alpha",)),
    "addcmul": ((), ("value",)),
    "addcdiv": ((), ("value",)),
    "addmm": ((), ("alpha",)),
    "addmv": ((), ("alpha",)),
    "addbmm": ((), ("alpha",)),
    "baddbmm": ((), ("alpha",)),
}
_OPEN: Final = 0.5


class OpenGates(_torch.DispatchMode):
    """Within it, values that hide a dependence are changed: constant parameters, and factors that are zero."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the model; `__enter__` changes it."""
        # What the model holds is put back at the end, without a trace in its tensors' versions.
        super().__init__()
        self._model = model
        # makes rows of a table, which were looked up by ids, louder where they are of samples that are to be
        self.louder: Callable[[Tensor, Tensor], Tensor] | None = None
        # (tensor, this rank's part of it, the value it held everywhere, its version since it was opened)
        self._closed: list[tuple[Tensor, Tensor, float, int]] = []

    def __enter__(self) -> "OpenGates":
        """Change the parameters that hold one value throughout, such as a gate of zeros; `__exit__` restores them."""
        for number, tensor in enumerate(_tensors_of(self._model)):
            # In place, unseen by graphs that keep it: it is put back before their backward.
            part = _torch.part_of(tensor).data
            value = _only_value(part)
            if value is not None:
                part.copy_(_others(part, value, seed=number))
                self._closed.append((tensor, part, value, _torch.version(tensor)))
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        """Restore what `__enter__` has changed."""
        super().__exit__(*problem)
        self._close(self._closed)

    def leave_written(self) -> bool:
        """Restore the values of gates that the forward writes itself, and return whether there were any."""
        written = [gate for gate in self._closed if _torch.version(gate[0]) != gate[-1]]
        self._closed = [gate for gate in self._closed if _torch.version(gate[0]) == gate[-1]]
        self._close(written)
        return bool(written)

    @staticmethod
    def _close(gates: Sequence[tuple[Tensor, Tensor, float, int]]) -> None:
        """Write the constant value back into each gate."""
        for _, part, value, _ in gates:
            part.fill_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation, with factors that are zero opened."""
        indices, names = _FACTORS.get(func.overloadpacket.__name__.rstrip("_"), ((), ()))
        if indices:
            args = tuple(_opened(value) if index in indices else value for index, value in enumerate(args))
        if names and kwargs:
            kwargs = {name: _opened(value) if name in names else value for name, value in kwargs.items()}
        result = func(*args, **(kwargs or {}))
        if self.louder is not None and func.overloadpacket is torch.ops.aten.embedding:
            return self.louder(result, args[1])
        return result


def _opened(factor: Any) -> Any:
    """Return a factor, or one half in the place of zero."""
    if isinstance(factor, Tensor):
        is_number = factor.dim() == 0 and factor.is_floating_point()
        return torch.where(factor == 0, _OPEN, factor) if is_number else factor
    # Not the 0 of `x.sum() * 0`, which stands in code for a zero of x's kind.
    return _OPEN if isinstance(factor, float) and factor == 0 else factor


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Go through what a model's modules hold, each tensor once."""
    seen = set[int]()
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    for tensor in (*model.parameters(), *model.buffers(), *attributes):
        plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_inference()
        plain = plain and tensor.device.type != "meta" and not _torch.is_wrapped(tensor)
        if id(tensor) not in seen and plain and tensor.element_size() > 1:
            seen.add(id(tensor))
            yield tensor


def _only_value(tensor: Tensor) -> float | None:
    """Return the one finite value that a tensor holds everywhere; None where there is none."""
    if not tensor.numel() or 0 in tensor.stride():
        return None
    first, last = (float(tensor[(index,) * tensor.dim()]) for index in (0, -1))
    if first != last:
        return None
    least, most = torch.aminmax(tensor)
    return first if float(least) == float(most) and abs(first) < float("inf") else None


def _others(like: Tensor, value: float, *, seed: int) -> Tensor:
    """Return values around a constant that differ from it; of a vector all to one side: a variance stays positive."""
    # A product of numbers for each place along every axis, so that next to nothing is drawn. A matrix adds up as many
    # as it has columns: its entries have both signs, and are smaller the more there are.
    generator = torch.Generator().manual_seed(seed)
    off = torch.full((), 0.5 * max(1.0, abs(value)))
    for axis, size in enumerate(like.shape):
        drawn = torch.rand(size, generator=generator) + 0.5
        if like.dim() > 1 and axis:
            drawn = torch.where(torch.rand(size, generator=generator) < 0.5, -drawn, drawn) / size**0.5
        off = off.to(like.device) * drawn.to(like.device).view(
            [size if axis == one else 1 for one in range(like.dim())]
        )
    return (value + off).to(like.dtype)


# Relative differences beyond those of another order of rounding, by the coarsest dtype in use: for as many samples,
# which the same kernels see, and for fewer. Models in float64 may compute norms and probabilities in float32.
TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
FEWER_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# No power of two, so that what is multiplied by it is rounded otherwise; so many times as far is beyond rounding.
_OTHERWISE: Final = 0.7
_BEYOND: Final = 4.0
# Sums by which a row is looked for among others, and the most pairs of rows.
_SUMS: Final = 4
_PAIRS: Final = 1 << 22
# Elements that are compared at a time.
_COMPARED: Final = 1 << 18

_BEHIND_GATES: Final = (
    "{model}: outputs of other samples changed when half of the samples were replaced by several times larger ones and "
    "every gate was open: parameters and buffers that hold one value everywhere held others, and factors of zero were "
    "not zero. The output of one sample depends on other samples behind a gate that is closed as yet (a gate or an "
    "adapter that is learned from zero, a factor that a schedule changes), or on the largest value of all (one scale "
    "or range for the batch, a threshold). Compute each sample's output from its own rows, or leave out what is "
    "multiplied by zero."
)

_REMEMBERED: Final = (
    "{model}: outputs changed when the forward before saw other samples. The forward keeps something of the batch for "
    "later ones (a queue, a memory or a cache of features, a running statistic in an attribute), so that a sample "
    "moves the sums of later steps as well, which nothing bounds. Begin every forward with nothing from the one before."
)

_ANOTHER_COURSE: Final = (
    "{model}: the forward gave other outputs when it was run again on the same batch, although it draws no random "
    "numbers and what its modules hold was put back. It follows something outside (a global variable, an object that "
    "is no module, a generator of its own), so that nothing that is seen of one forward holds for another. Keep it in "
    "an attribute or a buffer of a module."
)
_REPLACED: Final = "half of the samples were replaced"
_ELSEWHERE: Final = "half of the samples were replaced and the others changed places"

Run = Callable[[Any], list[Tensor]]
# A module's identity, the name of an attribute, and the number of a tensor in it, from behind.
AttributeKey: TypeAlias = tuple[int, str, int]
# The number of an output, or where a module holds it.
ScalarKey: TypeAlias = int | AttributeKey
T = TypeVar("T")


def refuse_dependence(model: nn.Module, run: Run, batch: Batch, unchecked: Unchecked) -> None:
    """Refuse a model whose outputs for one sample change with the others."""
    changed = dependence(model, run, batch, unchecked)
    if changed:
        raise SampleMixingError(_refusal(model, changed))
    if not batch.again:
        refusal = _BEHIND_GATES.format(model=type(model).__name__)
        _judge(among_larger_ones(model, plainly(run), batch), refusal, unchecked, BEHIND, "with other parameters")


def dependence(model: nn.Module, run: Run, batch: Batch, unchecked: Unchecked) -> str:
    """Return what was done to the batch when outputs of other samples changed; "" if they never did."""
    # `run` runs the model on inputs and returns its output tensors. `unchecked` is told what could not run, and why.
    plain = plainly(run)

    def compare(before: Randomness, coarsest: torch.dtype) -> str:
        base = [output.detach() for output in batch.outputs]
        asked = replace(batch, by_place=batch.has_lists and _are_positional(model, plain, batch, before, coarsest))
        before.restore()
        if base and not _Reruns(plain, asked, base, before, coarsest).changed(unchecked):
            return ""
        before.restore()
        again = plain(batch.inputs)
        every = range(batch.size)
        if base and not before.drawn():
            outputs = _Outputs(batch, every, every, TOLERANCE, coarsest)
            if outputs.differ(base, again):
                # Kernels of a run with gradients may round otherwise than those of one without.
                before.restore()
                with torch.enable_grad():
                    graded = plain(batch.inputs)
                if outputs.differ(base, graded):
                    raise SampleMixingError(_ANOTHER_COURSE.format(model=type(model).__name__))
        return _Reruns(plain, asked, again, before, coarsest).changed(unchecked)

    changed, raised = tried(model, batch, compare, passing=GhostClipError)
    if raised:
        unchecked.missed(f"the model raised {raised} on another batch", REPLACED, FEWER)
    return changed or ""


def tried(
    model: nn.Module,
    batch: Batch,
    compare: Callable[[Randomness, torch.dtype], T],
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> tuple[T | None, str]:
    """Run ``compare`` with the model's state restored after it, with gradients where it raises without."""
    # It may differentiate within its forward. `compare` is given the states of the generators and the dtype with the
    # fewest digits in use. Returns what was found and the empty string; or None and the name of the error that the
    # model raised both times. Errors in `passing` are handed on.
    tensors, raised = [*model.parameters(), *model.buffers()], ""
    used = [*tensors, *(leaf for leaf in _tree.leaves(batch.inputs) if isinstance(leaf, Tensor))]
    for gradients in (False, True):
        try:
            with restored(model), unnoticed(used) as before, torch.set_grad_enabled(gradients):
                return compare(before, coarsest_dtype(tensors, batch.autocast)), ""
        except Exception as error:  # noqa: PERF203 - two rounds
            # What it does on other batches is no reason to refuse this one.
            if isinstance(error, passing):
                raise
            raised = type(error).__name__
    return None, raised


def scalars_that_follow(
    model: nn.Module, run: Run, batch: Batch, unchecked: Unchecked, *, parameters: Sequence[Tensor]
) -> frozenset[ScalarKey]:
    """Return the model's scalars whose gradient is neither mean nor sum of two halves' gradients."""
    # `parameters`: leaves that stand for the trainable ones. What picks samples of a batch may pick the same ones of
    # its halves, so that there are two pairs of these at first; the second one parts a rare sample and its neighbour
    # from the others, as halves may have equal shares of what is rare. Random numbers belong to places: where some are
    # drawn, the batch and one with every sample in the place before its own stand for the whole, and the same two with
    # some places exchanged for its halves.
    splits = batch.replaced[: 1 if batch.again else 2]
    if batch.rare >= 0:
        splits[1:] = [sorted([batch.rare, batch.rare - 1 if batch.rare else 1])]

    def gradients_of(samples: Sequence[int], before: Randomness, times: float = 1.0) -> dict[ScalarKey, Tensor]:
        before.restore()
        stale = scalars_of(model.modules(), [])
        with torch.enable_grad(), WithoutDropout():
            scalars = scalars_of(model.modules(), run(batch.of_samples(samples)))
        ends = {key: scalar for key, scalar in scalars.items() if stale.get(key) is not scalar}
        return {
            key: torch.stack([_shown(*pair) for pair in zip(parameters, grads, strict=True)]).transpose(0, 1)
            for key, scalar in ends.items()
            for grads in [gradients_of_leaves(scalar * times, parameters)]
        }

    def compare(before: Randomness, coarsest: torch.dtype) -> frozenset[ScalarKey] | None:
        places = range(batch.size)
        whole, follow = gradients_of(places, before), set[ScalarKey]()
        draws, after = before.drawn(), Randomness(parameters)
        moved = gradients_of([*places[1:], 0], before) if draws else dict.fromkeys(whole, 0.0)
        # How far a backward in 16 bits is from one that rounds otherwise, as it does for fewer samples.
        rounded = gradients_of(places, before, _OTHERWISE) if TOLERANCE[coarsest] > TOLERANCE[torch.float32] else {}
        for samples in splits:
            others = batch.others(samples)
            pair = [[(place + (place in some)) % batch.size for place in places] for some in (samples, others)]
            one, other = (gradients_of(each, before) for each in (pair if draws else (samples, others)))
            if draws and after.drawn():
                return None
            for key in whole.keys() & moved.keys() & one.keys() & other.keys():
                about = len(samples) / batch.size, _tolerance(whole[key], rounded.get(key), coarsest)
                if not _is_of_both(whole[key] + moved[key], one[key], other[key], *about):
                    follow.add(key)
        return frozenset(follow)

    following, raised = tried(model, batch, compare)
    why = f"the model raised {raised} on another batch" if raised else "random numbers are drawn"
    unchecked.report(SCALARS, why if following is None else "")
    return following or frozenset()


def _tolerance(whole: Tensor, rounded: Tensor | None, coarsest: torch.dtype) -> float:
    """Return how far gradients of two parts may be from the whole's, relative: by many times what rounding does."""
    if rounded is None:
        return TOLERANCE[coarsest]
    noise = float((rounded / _OTHERWISE - whole)[0].norm() / whole[1].norm().clamp(min=1e-30))
    return min(TOLERANCE[coarsest], TOLERANCE[torch.float32] + _BEYOND * noise)


def _is_of_both(whole: Tensor, first: Tensor, second: Tensor, share: float, tolerance: float) -> bool:
    """Return whether a gradient is the mean, the sum, or either one, of the gradients of two parts of the batch."""
    # As a mean, a sum, or what depends on no sample, and is the same of either part.
    sought = first * share + second * (1 - share), first + second, first, second
    off_mean, off_sum, *off_one = [float((whole - each)[0].norm()) for each in sought]
    largest = max(float(each[1].norm()) for each in (whole, first, second))
    return min(off_mean, off_sum, max(off_one)) <= tolerance * largest


def scalars_of(modules: Iterable[nn.Module], outputs: Sequence[Tensor]) -> dict[ScalarKey, Tensor]:
    """Return scalars with a graph among outputs, by number, and in modules' attributes, by module, name and index."""
    candidates: list[tuple[ScalarKey, Tensor]] = [*tensors_in(modules).items(), *enumerate(outputs)]
    return {key: one for key, one in candidates if not one.dim() and one.grad_fn is not None}


def tensors_in(modules: Iterable[nn.Module]) -> dict[AttributeKey, Tensor]:
    """Return the tensors in modules' attributes, by module, name and place, from behind: lists may grow."""
    return {
        (id(module), name, index): tensor
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, (Tensor, list, tuple, dict)) and value is not _torch.child_table(module)
        for index, tensor in enumerate(reversed(list(_tree.tensors(value))))
    }


def _shown(parameter: Tensor, grad: Tensor | None) -> Tensor:
    """Return two sums over a gradient that change with it, each with its norm: ``(2, 2)``, float64."""
    if grad is None:
        return torch.zeros(2, 2, dtype=torch.float64, device=parameter.device)
    # Of a table a gradient may be sparse. Entries round independently of each other.
    dense = grad.to_dense() if grad.is_sparse else grad
    both = [part.double() for part in (dense, dense * parameter.detach())]
    return torch.stack([torch.stack([part.sum() for part in both]), torch.stack([part.norm() for part in both])])


def refuse_memory(model: nn.Module, state: ModuleState, run: Run, batch: Batch, unchecked: Unchecked) -> None:
    """Refuse a model whose outputs follow the samples of the forward before."""
    refusal = _REMEMBERED.format(model=type(model).__name__)
    _judge(memory(model, state, run, batch), refusal, unchecked, REMEMBERED, "after another batch")


def memory(model: nn.Module, state: ModuleState, run: Run, batch: Batch) -> tuple[tuple[bool | None, ...] | None, str]:
    """Return whether outputs follow the samples of the run before (None: unknown), and the error as in `tried`."""
    # Empty where nothing is left behind. `state`: what the model held before a forward. `run` runs it with what it
    # holds from the run before.
    every, plain = range(batch.size), plainly(run)

    def compare(before: Randomness, coarsest: torch.dtype) -> tuple[bool | None, ...]:
        outputs = _Outputs(batch, every, every, TOLERANCE, coarsest)
        differ, base = list[bool | None](), list[Tensor]()
        for earlier in (batch.inputs, *batch.exchanged()):
            before.restore()
            state.restore()
            plain(earlier)
            if not state.changed():
                return ()
            found = plain(batch.inputs)
            moved = outputs.differ(base := base or found, found)
            unknown = moved and before.drawn() and _meets_other_numbers(run, batch, earlier, before)
            differ.append(None if unknown else moved)
        return tuple(differ)

    return tried(model, batch, compare)


def among_larger_ones(model: nn.Module, run: Run, batch: Batch) -> tuple[list[bool | None] | None, str]:
    """Return whether outputs change beside larger samples with gates open (None: unknown), as `tried` does."""
    few = batch.few()
    outcome = tried(model, batch, partial(_differ_behind, model, run, few, loud=not batch.shared))
    for asked, differs in ((few, not batch.shared), (batch, few is not batch)):
        # It does not run on such numbers, or on fewer samples, or shows nothing.
        if differs and (outcome[1] or None in (outcome[0] or ())):
            outcome = tried(model, batch, partial(_differ_behind, model, run, asked, loud=False))
    return outcome


def _judge(
    outcome: tuple[Sequence[bool | None] | None, str], refusal: str, unchecked: Unchecked, check: str, when: str
) -> None:
    """Refuse the model if outputs differed, else report to ``unchecked`` whether the check ran."""
    differ, raised = outcome
    if differ and True in differ:
        raise SampleMixingError(refusal)
    if raised:
        unchecked.missed(f"the model raised {raised} {when}", check)
    elif differ:
        _report(unchecked, check, differ)


def _differ_behind(
    model: nn.Module, run: Run, batch: Batch, before: Randomness, coarsest: torch.dtype, *, loud: bool
) -> list[bool | None]:
    """Return for two sets of replaced samples whether the others' outputs changed, with `OpenGates`."""
    # `loud`: the replaced samples have larger values, so that what reaches the others shows. None: cannot be told.

    def moved(samples: Sequence[int]) -> bool | None:
        inputs = batch.copied(samples)
        if loud:
            inputs = _tree.mapped(lambda x: batch.louder(samples, x) if isinstance(x, Tensor) else x, inputs)
            gates.louder = partial(batch.looked_up_louder, samples, set(map(_torch.memory_key, _tree.tensors(inputs))))
        differ = _Reruns(run, batch, base, before, coarsest).differ_in_place(samples, inputs)
        unknown = differ and before.drawn() and _meets_other_numbers(run, batch, batch.copied(samples), before)
        return None if unknown else differ

    with OpenGates(model) as gates:
        base = run(batch.of_samples(range(batch.size)))
        if gates.leave_written():
            before.restore()
            base = run(batch.of_samples(range(batch.size)))
        return [moved(batch.drawn), moved(batch.others(batch.drawn))]


def plainly(run: Run) -> Run:
    """Return a run without dropout, whose outputs keep no graph."""

    def plain(inputs: Any) -> list[Tensor]:
        with WithoutDropout():
            outputs = run(inputs)
        return [output.detach() for output in outputs]

    return plain


@dataclass(frozen=True)
class _Reruns:
    """Runs of a model on other batches, whose outputs are compared with those of one batch."""

    run: Run
    batch: Batch
    base: list[Tensor]  # the outputs of the batch itself
    before: Randomness  # the states of the generators that each run begins with
    coarsest: torch.dtype  # the dtype with the fewest digits in use

    def differ_in_place(self, samples: Sequence[int], inputs: Any) -> bool | None:
        """Return whether others' outputs change on inputs with some replaced; None where that cannot be told."""
        batch = self.batch
        others = _Outputs(batch, batch.copies(samples), batch.others(samples), TOLERANCE, self.coarsest)
        self.before.restore()
        return others.differ(self.base, self.run(inputs))

    def differ_among(self, samples: Sequence[int]) -> bool | None:
        """Return whether these samples, run as a batch of their own, come out otherwise; None if unknown."""
        try:
            return self.differ_or_raise(samples)
        except Exception:  # noqa: BLE001 - it may take its samples in their order alone, or as many as there are
            return None

    def differ_or_raise(self, samples: Sequence[int]) -> bool | None:
        """Return whether these samples, run as a batch of their own, come out otherwise; errors pass."""
        batch = self.batch
        tolerances = TOLERANCE if len(samples) == batch.size else FEWER_TOLERANCE
        others = _Outputs(batch, samples, range(len(samples)), tolerances, self.coarsest)
        if any(rows_of_each(leaf, batch_size=batch.size, axis=batch.axis) for leaf in _tree.tensors(batch.inputs)):
            # Inputs with several rows for each sample may hold samples, or what all of them share.
            with suppress(Exception):
                self.before.restore()
                if others.differ(self.base, self.run(batch.of_samples(samples, folded=True))) is False:
                    return False
        self.before.restore()
        return others.differ(self.base, self.run(batch.of_samples(samples)))

    def changed(self, unchecked: Unchecked) -> str:
        """Try batches from cheap to exact; return what was done when other samples' outputs changed, else ""."""
        moved: bool | None = None
        batch, draws = self.batch, self.before.drawn()
        in_place = batch.by_place or batch.shared
        if not (in_place or draws):
            moved = self.differ_among(batch.shuffled)
            if moved is False and self.differ_among(batch.drawn) is False:
                unchecked.ran(REPLACED, FEWER)
                return ""
        # What lies in inputs by the samples' places, as the patches of all images do, did not move with them.
        elsewhere = _ELSEWHERE if moved and not batch.has_places else ""
        changed = self._changed_in_place(unchecked) or elsewhere
        return changed if changed or in_place or not draws else self._changed_with_alike_draws(unchecked)

    def _changed_with_alike_draws(self, unchecked: Unchecked) -> str:
        """As `changed`, for a model that draws random numbers: every sample gets the same ones."""
        # Which rows were selected may have been drawn.
        batch = replace(self.batch, maps=[row_map and row_map.of_first(0) for row_map in self.batch.maps])
        self.before.restore()
        with AlikeDraws(batch.axis) as draws:
            reruns = replace(self, batch=batch, base=self.run(batch.inputs))
        differ, alike = list[bool | None](), not (self.before.drawn(outside=True) or batch.has_places)
        for samples in (batch.shuffled, batch.drawn, batch.left):
            with AlikeDraws(batch.axis) as others:
                differ.append(reruns.differ_among(samples))
            alike = alike and others.seen == draws.seen
        if not alike:
            unchecked.missed("random numbers are drawn", FEWER)
            return ""
        with OtherDraws(batch.axis, batch.copies(batch.drawn), draws.shapes, others.shapes):
            if not batch.gathered and self.differ_in_place(batch.drawn, batch.inputs):
                return "half of the samples met other random numbers"
        moved, *alone = differ
        if moved:
            return _ELSEWHERE
        fewer = None if None in alone else all(alone)
        _report(unchecked, FEWER, [fewer])
        return "half of the samples were left out" if fewer else ""

    def _changed_in_place(self, unchecked: Unchecked) -> str:
        """As `changed`, with samples replaced while the others keep their places."""
        fewer, differ, batch, before = None, list[bool | None](), self.batch, self.before

        def moved(samples: Sequence[int]) -> bool:
            differ.append(self.differ_in_place(samples, batch.copied(samples)))
            if differ[-1] and before.drawn() and _meets_other_numbers(self.run, batch, batch.copied(samples), before):
                unchecked.missed("which random numbers a sample meets depends on the others", REPLACED)
                return False
            return bool(differ[-1])

        # One after the other: outputs may be as large as all activations of a layer.
        if any(map(moved, batch.replaced)):
            return _REPLACED
        _report(unchecked, REPLACED, differ)
        if not before.drawn():
            try:
                for some in (batch.subset, batch.left):
                    # What is rounded otherwise in a batch of another size is not in every one.
                    fewer = self.differ_or_raise(some)
                    if not fewer:
                        break
                _report(unchecked, FEWER, [fewer])
            except Exception as error:  # noqa: BLE001 - what it does with fewer samples is no reason to refuse it
                unchecked.missed(f"the model raised {type(error).__name__} on another batch", FEWER)
        return "half of the samples were left out" if fewer else ""


def _are_positional(model: nn.Module, run: Run, batch: Batch, before: Randomness, coarsest: torch.dtype) -> bool:
    """Return whether a list with as many values as samples may hold one for each of them."""
    # It does if the values of replaced samples move no other sample's output. Then all samples are put in another
    # order, with their values. It does not if they do: lists are then what all samples share. False where such values
    # are all the same, too: then nothing goes by them. Outputs that follow the samples' places are refused.
    sets = [samples for samples in (batch.drawn, batch.others(batch.drawn)) if _shows(batch, batch.copies(samples))]
    before.restore()
    base = run(batch.inputs)
    if before.drawn():
        return bool(sets)

    def differ(samples: Sequence[int], places: Sequence[int]) -> bool | None:
        before.restore()
        try:
            outputs = run(batch.with_lists(samples))
        except Exception:  # noqa: BLE001 - what it does with other lists is no reason to refuse this one
            return None
        return _Outputs(batch, samples, places, TOLERANCE, coarsest).differ(base, outputs)

    moved = [differ(batch.copies(samples), batch.others(samples)) for samples in sets]
    order = [*batch.drawn, *batch.others(batch.drawn)]
    if not set(moved) - {False} and differ(order, range(batch.size)):
        raise SampleMixingError(_refusal(model, "the samples were put in another order"))
    return bool(moved) and True not in moved


def _shows(batch: Batch, samples: Sequence[int]) -> bool:
    """Return whether replacing samples changes some value in the lists among the inputs."""
    one, other = (_tree.leaves(inputs) for inputs in (batch.inputs, batch.with_lists(samples)))
    values = [pair for pair in zip(one, other, strict=True) if pair[0] is not pair[1]]
    return any(batch_axis_of(leaf, batch_size=batch.size, axis=batch.axis) is None for leaf, _ in values)


def _report(unchecked: Unchecked, check: str, differ: Sequence[bool | None]) -> None:
    """Report whether a check ran: not where some comparison was impossible."""
    if None in differ:
        unchecked.missed("rows of an output cannot be told apart in another batch, or met other random numbers", check)
    elif True not in differ:
        unchecked.ran(check)


def _meets_other_numbers(run: Run, batch: Batch, other: Any, before: Randomness) -> bool:
    """Return whether a sample may get other random numbers in another batch."""
    seen = []
    for inputs in (batch.inputs, other):
        before.restore()
        with AlikeDraws(batch.axis) as draws:
            run(inputs)
        seen.append(draws.shapes)
    return batch.gathered or seen[0] != seen[1]


def _refusal(model: nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__}: outputs of other samples changed when {what}, although no gradient leads from one to "
        "the other, so that the output of one sample depends on other samples: the model divides by their number, "
        "counts over the batch, follows a sample's place in it (positions along the samples' axis), or takes another "
        "branch for the whole batch. Compute each sample's output from its own rows. What all samples share, and is as "
        "long as a batch may be (a graph's matrix), is no input but a buffer. validate(model, batch, loss_fn) looks on."
    )


def coarsest_dtype(tensors: Iterable[Tensor], autocast: torch.dtype | None) -> torch.dtype:
    """Return the dtype with the fewest digits among those of a model and of autocast, where it is on."""
    used = {tensor.dtype for tensor in tensors if tensor.dtype in TOLERANCE}
    used |= set() if autocast is None else {autocast}
    return max(used, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


@dataclass(frozen=True)
class _Outputs:
    """Compares outputs for other batches with those of the batch itself, sample by sample."""

    batch: Batch
    order: Sequence[int]  # which sample of the batch stands at each place of the others
    places: Sequence[int]  # where samples must come out as they did
    tolerances: dict[torch.dtype, float]  # relative differences that are rounding, by dtype
    coarsest: torch.dtype  # the dtype with the fewest digits on the way to them

    def differ(self, base: list[Tensor], outputs: list[Tensor]) -> bool | None:
        """Return whether rows differ beyond rounding; None where it is unknown whose some of them are."""
        if len(base) != len(outputs):
            return None
        known = self.batch.maps_of(base)
        maps = [row_map or self.batch.map_by_shape(one) for row_map, one in zip(known, base, strict=True)]
        rows = list(map(self._rows, base, outputs, maps))
        pairs = [pair for pair in rows if pair is not None]
        if any(self._differs(*pair) for pair in pairs):
            return True
        lost = {n for n, row_map in enumerate(maps) if rows[n] is None and (not row_map or row_map.kind == "gathered")}
        if any(self._is_missing(base[n], outputs[n], maps[n]) for n in lost & self.batch.trained):
            return True
        return False if pairs and self.batch.trained.isdisjoint(lost) else None

    def _rows(self, one: Tensor, two: Tensor, row_map: RowMap | None) -> tuple[Tensor, Tensor] | None:
        """Return two outputs with samples first; None where they cannot be split into samples."""
        size, of_two = self.batch.size, self._other_map(row_map, one)
        if row_map is None or of_two is None:
            return None
        axis = row_map.axis
        if one.is_complex() and two.is_complex():
            one, two = torch.view_as_real(one), torch.view_as_real(two)
        compared = one.dtype in self.tolerances or self.batch.hands_on
        if not compared or one.dim() != two.dim() or not one.numel():
            return None
        if row_map.kind == "whole":
            alike = one.shape == two.shape
            return (one.expand(size, *one.shape), two.expand(len(self.order), *two.shape)) if alike else None
        if [*one.shape[:axis], *one.shape[axis + 1 :]] != [*two.shape[:axis], *two.shape[axis + 1 :]]:
            return None
        many = one.shape[axis] * len(self.order) if of_two.samples is None else size * len(of_two.samples)
        if two.shape[axis] * size != many:
            return None
        second = of_two.split(two, two.dim(), len(self.order))
        # Of gathered rows there are as many as the sample has that has most.
        return row_map.split(one, one.dim(), size)[:, : second.shape[1]], second

    def _other_map(self, row_map: RowMap | None, one: Tensor) -> RowMap | None:
        """Return how the rows of the other output map to its samples; None where that is not known."""
        if row_map is None or row_map.samples is None:
            return row_map
        # Selected rows that lie in the samples' order do so in other batches, unless inputs say by place which.
        moved = any(self.order[place] != place for place in self.places)
        if row_map.gathering != "in order" or len(row_map.samples) != one.shape[0] or (moved and self.batch.has_places):
            return None
        counts = torch.bincount(row_map.samples.cpu(), minlength=self.batch.size)[torch.tensor(self.order)]
        return RowMap("gathered", 0, torch.arange(len(self.order)).repeat_interleave(counts))

    def _is_missing(self, one: Tensor, two: Tensor, row_map: RowMap | None) -> bool:
        """Return whether a row that data has put in its place is nowhere among those of another batch."""
        # Of each row a few sums with random signs are looked for: few others have them all.
        if row_map is None or row_map.samples is None or len(row_map.samples) != len(one):
            return False
        if one.dtype not in self.tolerances or one.shape[1:] != two.shape[1:]:
            return False
        stays = torch.isin(row_map.samples.cpu(), torch.tensor([self.order[place] for place in self.places]))
        rows, others = (x.detach().unsqueeze(-1).flatten(1).nan_to_num() for x in (one[stays.to(one.device)], two))
        if not rows.numel() or not len(others):
            return False
        signs = torch.randint(2, (rows.shape[1], _SUMS), generator=torch.Generator().manual_seed(0)) * 2 - 1
        signs = signs.to(rows) / rows.shape[1] ** 0.5
        looked_at = rows[:: -(-len(rows) * len(others) // _PAIRS)]
        near = max(self.tolerances[one.dtype], self.tolerances[self.coarsest]) * float(rows.abs().max())
        apart = (looked_at @ signs).unsqueeze(1) - others @ signs
        return bool((apart.abs().amax(2).amin(1) > near).any())

    def _differs(self, first: Tensor, second: Tensor) -> bool:
        """Return whether rows of the same samples differ by more than the tolerance."""
        if first.dtype in self.tolerances:
            tolerance = max(self.tolerances[first.dtype], self.tolerances[self.coarsest])
        else:
            # What is counted or chosen is the same or another.
            tolerance, first, second = 0.0, first.double(), second.double()
        pieces = partial(_pieces, first, second, [self.order[place] for place in self.places], self.places)
        scale = max(float(one.abs().nan_to_num(posinf=0.0).max()) for one, _ in pieces())
        return any(bool(((one - two).abs().nan_to_num() > tolerance * scale).any()) for one, two in pieces())


def _pieces(
    first: Tensor, second: Tensor, first_rows: Sequence[int], second_rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of the same samples in flat chunks of `_COMPARED` values: logits may be a step's largest tensors."""
    rows = max(1, _COMPARED // max(1, first[:1].numel()))
    for start in range(0, len(first_rows), rows):
        taken = [
            tensor.index_select(0, torch.tensor(numbers[start : start + rows], device=tensor.device))
            if rows > 1
            else tensor[numbers[start]]
            for tensor, numbers in ((first, first_rows), (second, second_rows))
        ]
        yield from zip(*(rows.reshape(-1).split(_COMPARED) for rows in taken), strict=True)
