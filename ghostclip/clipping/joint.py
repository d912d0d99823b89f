"""Layers that are computed together: those of one form, and those that read one input.

*One form* (the blocks of a transformer): factors are formed, measured and summed together. Small layers cost what
calling torch's functions costs. Their inputs and gradients are put end to end along the axis of the samples, as if one
layer had seen the samples of all: the rule is asked once, and norms and clipped sums take one operation each. What is
put together is copied, so that only small layers are; of layers that are too large for it, small gradients of one shape
(biases, affine weights) still are.

*One input* (queries, keys and values; gate and up): its Gram matrix is formed once for all. ``Σ_l Σ_{s,t}
(a_s·a_t)(g^l_s·g^l_t) = Σ_{s,t} (a_s·a_t)(Σ_l g^l_s·g^l_t)``: the layers' squared norms add up to that of one layer
with all their outputs, which costs T²·(I + Σ_l O_l) a sample in the place of Σ_l T²·(I + O_l), and a copy of what is
put side by side.

Between norm and sum a factor must stay what was measured. Changes in place to what a factor holds are counted by
autograd.

A second backward must bring what the first one brought, whose norms decide on how much is released. It does not where a
backward draws random numbers (a quantised function, checkpointing with ``preserve_rng_state=False`` around dropout) or
changes what the next one does: the coefficients of the first would then be applied to other gradients, of any norm.
Torch's generators are put back, so that both draw the same numbers; whatever else differs is refused.

Shape letters: L layers, B samples, N samples (or times slots), T positions, I inputs, O outputs (the values of what is
put beside others), ``*P`` the parameters' own shape.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.nodes import SavedTensors, first_saved, nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.checks.batches import Randomness
from ghostclip.clipping.norms import GroupNorms
from ghostclip.errors import TamperedGradientError
from ghostclip.factors import Dense, Factor, Outer
from ghostclip.factors.base import accumulation_dtype
from ghostclip.factors.outer import BYTE, formed_by, gram_flops
from ghostclip.kernels import runtime
from ghostclip.kernels.bounds import Reduced, Unfinished, dots, samples_joined
from ghostclip.kernels.gram import CACHED
from ghostclip.kernels.outer import adds_in_a_row, sums_by_kernel

_NO_TENSORS: Final = frozenset({type(None), bool, int, float, str, tuple, torch.Size, torch.dtype})
# See `RepeatCheck`.
_EVERY: Final = 8
_VALUES: Final = 64
_VALUES_EACH: Final = 8


def versions(factor: Factor) -> list[int]:
    """Return the versions of the tensors in a factor, which count changes in place."""
    if type(factor) is Dense:
        return [_torch.version(factor.grad_BP)]
    if type(factor) is Outer:
        return _torch.versions((factor.a_NTI, factor.g_NTO))
    return _torch.versions(tensors_of(factor))


def formed(factor: Factor) -> Factor:
    """Return a factor that may wait: lazy parts, of data that may change, are formed now."""
    for _ in tensors_of(factor):
        pass
    return factor


def tensors_of(factor: Factor) -> Iterator[Tensor]:
    """Yield the tensors of a factor, and of factors inside it, in a fixed order."""
    if type(factor) is Dense:
        # It may be formed by this: a sum over positions counts as what it is then.
        yield factor.grad_BP
        return
    for value in vars(factor).values():
        # What most attributes are; asking whether they are factors costs more than the rest.
        if type(value) in _NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Factor):
            yield from tensors_of(value)
        elif isinstance(value, dict):
            for part in value.values():
                if isinstance(part, Factor):
                    yield from tensors_of(part)


def tampered_message(name: str) -> str:
    """Return the text of a ``TamperedGradientError``."""
    return (
        f"parameter '{name}': what its gradient is made of was changed in place in the backward (by a hook on a "
        "layer's output, say), after its norm had been taken. Return a new tensor from the hook."
    )


class RepeatCheck:
    """Compares what the second backward through a forward brings with the first, whose norms it is clipped by.

    Cost:
        At most some hundred values of each sample for the factors that are compared; a hundredth of a small model's
        backward, nothing to speak of in a large one's.
    """

    # Of every eighth factor and of the last one, whose gradient has come through the other layers, some values of every
    # sample are stored: a change on one path through the model only, close to its beginning, may be missed. Kernels
    # that sum in an order of their own (attention on a GPU) repeat themselves up to rounding: differences up to √u of
    # the values' norm pass, u the distance from 1 to the next number of the coarsest dtype that the backward computes
    # in: what float32 adapters receive has come through layers of 16 bits.
    def __init__(self, loss: Tensor, node: Any, *, count: int) -> None:
        """Begin with the first backward; `count` factors are expected, `node` made the loss."""
        self._node, self._count = node, count
        self._randomness = Randomness([loss], only_torch=True)
        self._first: dict[int, list[Tensor]] = {}  # values of the first backward, by number of the factor
        self._names: list[str] = []  # parameter of each pair
        self._pairs: list[tuple[Tensor, Tensor]] = []  # values of both backwards
        self._unlike: str | None = None  # a parameter for which shapes differ
        self._arrived = 0  # factors of the backward that runs
        self._is_first = True  # whether the first backward runs, whose values are stored

    def begin_again(self, *, anew: bool = False) -> None:
        """Begin the next backward, compared with the first, or itself the first with ``anew``."""
        self._randomness.restore()
        self._arrived = 0
        self._is_first = anew
        if anew:
            self._first.clear()

    def compare_factor(self, name: str, factor: Factor) -> None:
        """Store or compare a factor's values, if it is one of those compared."""
        number = self._compared(1)
        if number is not None:
            self._compare(number, name, [_some(tensor) for tensor in tensors_of(factor)])

    def compare_use(self, use: ParamUse, grad: Tensor) -> None:
        """Store or compare a use's gradient and saved tensors, from which its factors follow."""
        number = self._compared(len(use.site.consumed))
        if number is None:
            return
        row_map, size = use.row_map, use.forward.batch_size
        saved = () if use.node is None else use.node.saved_tensors
        values = [_some(row_map.split(tensor, use.num_batch_dims, size)) for tensor in (grad, *saved)]
        self._compare(number, use.site.names[0], values)

    def _compared(self, factors: int) -> int | None:
        """Count factors that arrive; return the number under which they are compared, None for most."""
        number, self._arrived = self._arrived, self._arrived + factors
        if number // _EVERY == self._arrived // _EVERY and self._arrived != self._count:
            return None
        return number

    def _compare(self, number: int, name: str, values: list[Tensor]) -> None:
        """Store values in the first backward; in the second, pair them with the first one's."""
        if self._is_first:
            self._first[number] = [value.clone() for value in values]
            return
        before = self._first.get(number, [])
        if [tensor.shape for tensor in before] != [tensor.shape for tensor in values]:
            self._unlike = self._unlike or name
            return
        for was, now in zip(before, values, strict=True):
            if runtime.wait(was) or not torch.equal(was, now):
                self._pairs.append((was, now.clone()))
                self._names.append(name)

    def require(self) -> "Verdict | None":
        """Refuse a second backward that differs; if the answer is still on the device, return it as a `Verdict`."""
        # Where reading the answer would wait for a device, it is returned, to be read with the next value that is read:
        # until then the sums must become nothing where it is yes.
        verdict = None
        if self._pairs and self._unlike is None:
            verdict = _verdict(self._pairs, self._names, _coarsest(self._node))
        self._pairs.clear()
        self._names.clear()
        if self._unlike is not None:
            raise TamperedGradientError(_unlike(self._unlike))
        if verdict is not None and not runtime.wait(verdict.differs_K):
            verdict.require()
            return None
        return verdict


class Verdict(NamedTuple):
    """Answer, on the device, whether a second backward brought other gradients than the first."""

    differs_K: Tensor  # by what was compared
    names: list[str]

    def require(self) -> None:
        """Wait for the answer and refuse if it is yes."""
        differs = self.differs_K.tolist()
        if any(differs):
            raise TamperedGradientError(_unlike(self.names[differs.index(True)]))


def _unlike(name: str) -> str:
    return (
        f"parameter '{name}': the second backward brought other gradients than the first, whose norms it is clipped "
        "by. Something in it is drawn anew or changed on the way (by a hook, a function's backward, or a forward that "
        "is checkpointed). Make it repeat itself, or use strategy='bookkeeping' (one backward)."
    )


def _some(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's values, evenly spread, of all rows of its leading axis; integers as float64."""
    most = _VALUES if tensor.dim() <= 2 else _VALUES_EACH
    for axis, size in enumerate(tensor.shape[1:], start=1):
        if size > most:
            tensor = tensor[(slice(None),) * axis + (slice(None, None, -(-size // most)),)]
    return tensor if tensor.is_floating_point() else tensor.double()


def _coarsest(node: Any) -> float:
    """Return the largest distance from 1 to the next number among the dtypes of a backward's gradients."""
    types = {about.dtype for behind in nodes_behind([node]) for about in _torch.outputs_of(behind)}
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=0.0)


def _verdict(pairs: Sequence[tuple[Tensor, Tensor]], names: Sequence[str], unit: float) -> Verdict:
    """Return whether the values of each pair differ, compared in one operation per dtype and device."""
    alike: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for number, (was, _) in enumerate(pairs):
        alike[was.dtype, was.device].append(number)
    differs = [_differ([pairs[number] for number in numbers], unit) for numbers in alike.values()]
    order = [number for numbers in alike.values() for number in numbers]
    differs_K = torch.cat([one.to(differs[0].device) for one in differs])
    return Verdict(differs_K, [names[number] for number in order])


def _differ(pairs: Sequence[tuple[Tensor, Tensor]], unit: float) -> Tensor:
    """Return whether K pairs of tensors differ by more than rounding, ``(K,)``; values that are not finite never do."""
    # unit: the distance from 1 to the next number of the coarsest dtype that they were computed in.
    first_N, second_N = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    finite_N = first_N.isfinite()
    before_N, after_N = (values_N.where(finite_N, 0).double() for values_N in (first_N, second_N))
    sizes = [one.numel() for one, _ in pairs]
    off_K, whole_K = (torch.stack(_torch.norms_of(part_N.split(sizes))) for part_N in (after_N - before_N, before_N))
    tolerance = max(unit, torch.finfo(first_N.dtype).eps) ** 0.5
    # Not finite where the first was: above any tolerance.
    return ~(off_K <= tolerance * whole_K)


# Elements of a layer's input, output gradient and parameters up to which copying costs less than calls do. A GPU copies
# more in the time that it takes to be told to.
_SMALL: Final = 1 << 15
_SMALL_ON_A_GPU: Final = 1 << 21
# So few gradients of one shape cost no more by themselves.
_FEW: Final = 3
# So many of the largest small layers wait at a time.
_WAITING: Final = 32
# Rows of which all of a sample lie together, so that samples of other layers may follow.
_IN_FRONT: Final = frozenset({"axis", "major"})
_FORMS: Final = frozenset({"outer product", "dense"})
# What putting an element beside others costs, and what calling the functions of a Gram costs, in FLOPs.
_MOVED: Final = 80
_CALLS: Final = 3_000_000
# The same on matrix units: 2 bytes read and written, 8 functions of 5 microseconds.
_MOVED_BY_UNITS: Final = 4 * BYTE
_CALLS_BY_UNITS: Final = 24_000_000_000
# And where a kernel forms a Gram: one function.
_CALLS_FUSED: Final = _CALLS_BY_UNITS // 8


class _Waiting(NamedTuple):
    """Gradient of one use's output that waits for others alike, and its version when it arrived."""

    use: ParamUse
    grad: Tensor
    version: int


class _Formed(NamedTuple):
    """Per-sample gradients of one parameter that wait for others alike, with their version."""

    name: str
    factor: Dense
    version: int


@dataclass(frozen=True, eq=False)
class Joint:
    """Per-sample gradients of L parameters of one shape."""

    names: Sequence[str]
    factor: Dense | Outer  # L·B samples, those of one parameter side by side

    def parts(self) -> Iterator[tuple[str, Factor]]:
        """Return the name and the factor of every parameter, as views."""
        return zip(self.names, split_layers(self.factor, len(self.names)), strict=True)

    def masked(self, keep_B: Tensor) -> "Joint":
        """Return the same with the samples where ``keep_B`` is False set to zero for every parameter."""
        return Joint(self.names, cast("Dense | Outer", self.factor.masked(keep_B.repeat(len(self.names)))))

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return len(self.names) * torch.Size(self.factor.shape).numel()

    @property
    def like(self) -> Tensor:
        """An empty tensor of the type and on the device of the sums."""
        tensor = self.factor.grad_BP if isinstance(self.factor, Dense) else self.factor.g_NTO
        return tensor.new_empty(0, dtype=accumulation_dtype(tensor.dtype))

    def clipped_sums(self, coef_B: Tensor) -> Tensor:
        """Return ``Σ_b coef_B[b]·g_lb`` of every parameter, ``(L, *P)``, contiguous, in the coefficients' dtype."""
        factor, layers = self.factor, len(self.names)
        if isinstance(factor, Dense):
            grad_LBP = factor.grad_BP.reshape(layers, len(coef_B), -1)
            return torch.bmm(coef_B.expand(layers, 1, -1), grad_LBP.to(coef_B.dtype)).view(layers, *factor.shape)
        a_NTI, g_NTO = factor.a_NTI, factor.g_NTO
        out_LOI = coef_B.new_empty(layers, g_NTO.shape[2], a_NTI.shape[2])
        if sums_by_kernel(a_NTI, g_NTO, coef_B, out_LOI, side_by_side=False, fresh=True):
            return out_LOI.view(layers, *factor.shape)
        a_NTI, g_NTO = a_NTI.to(coef_B.dtype), g_NTO.to(coef_B.dtype)
        if adds_in_a_row(a_NTI, g_NTO):
            formed_LBP = dots(g_NTO.mT, a_NTI.mT).view(layers, len(coef_B), -1)
            return torch.bmm(coef_B.expand(layers, 1, -1), formed_LBP).view(layers, *factor.shape)
        coef_N = coef_B.repeat(layers).view(-1, 1, 1)
        if a_NTI.shape[2] < g_NTO.shape[2]:
            a_NTI = a_NTI * coef_N
        else:
            g_NTO = g_NTO * coef_N
        a_LRI, g_LRO = (x.reshape(layers, -1, x.shape[2]) for x in (a_NTI, g_NTO))
        return torch.bmm(g_LRO.mT, a_LRI).view(layers, *factor.shape)


class SmallLayers:
    """Collects uses of small layers until there are many, and forms their factors in one operation.

    Gradients of few numbers (biases, affine weights) are collected until others of their shape have come.
    """

    # Which layers are joined follows from the sizes of the batch and the form of the model alone, so that a step that
    # is made again rounds as it did.
    def __init__(
        self,
        *,
        join: Callable[[Joint], None],
        alone: Callable[[ParamUse, Tensor], None],
        single: Callable[[str, Dense], None],
        final: bool = True,
    ) -> None:
        """Set who takes what was put together and what was not; nothing waits yet."""
        # join: takes the gradients of several parameters. alone: takes a use, and its output's gradient, that no other
        # is like. single: takes one parameter's gradients. final: no other backward follows, so that what uses have
        # saved may go.
        self._join, self._alone, self._single, self._final = join, alone, single, final
        self._waiting: defaultdict[Any, list[_Waiting]] = defaultdict(list)  # by form
        self._elements = 0  # that wait
        self.full = False  # whether as many wait as may
        self._formed: defaultdict[Any, list[_Formed]] = defaultdict(list)  # by shape
        self._formed_elements = 0  # of those
        self.gradients_full = False  # whether as many gradients wait as may where they are not stored

    def hold(self, use: ParamUse, grad: Tensor, stored: frozenset[str]) -> bool:
        """Hold the output gradient of a small layer until others are alike; return whether it is held."""
        # Return whether it was taken. The gradient must not change until it was made a factor of. `stored`: parameters
        # whose gradients are stored although their factors are smaller.
        if use.alike is None:
            return False
        size, node, data, address = grad.numel(), use.node, None, 0
        elements = size + use.alike.elements
        if node is not None:
            if type(node) is not SavedTensors:
                return False
            data, address = node.shape, node.address
            elements += node.elements
        most = _SMALL if grad.is_cpu else _SMALL_ON_A_GPU
        # Layers that read one input share its Gram, see `ghostclip.clipping.joint`.
        if not size or elements > most or not use.forward.stands_alone(use.site.consumed, address):
            return False
        row_map = use.row_map
        if row_map.axis or row_map.kind not in _IN_FRONT:
            return False
        always = stored and tuple(map(stored.__contains__, use.site.names))
        # What else is to be equal follows from these: sizes of parameters, types and devices are those of the form.
        key = use.alike, row_map.kind, always, grad.shape, grad.dtype, data
        self._waiting[key].append(_Waiting(use, grad, _torch.version(grad)))
        self._elements += elements
        self.full = self._elements > most * _WAITING
        return True

    def hold_gradients(self, name: str, factor: Factor) -> bool:
        """Hold a parameter's small per-sample gradients until others are alike; return whether they are held."""
        # Return whether they were taken. Nothing else in this backward may contribute to the parameter, and the factor
        # must not change until `finish_gradients`.
        if type(factor) is not Dense:
            return False
        grad_BP = factor.grad_BP
        most = _SMALL if grad_BP.is_cpu else _SMALL_ON_A_GPU
        if grad_BP.numel() > most:
            return False
        key = grad_BP.shape, grad_BP.dtype, grad_BP.device
        self._formed[key].append(_Formed(name, factor, _torch.version(grad_BP)))
        self._formed_elements += grad_BP.numel()
        self.gradients_full = self._formed_elements > most * _WAITING
        return True

    def finish(self) -> None:
        """Form the factors of all uses that wait, together where alike, and pass them on."""
        if not self._waiting:
            return
        waiting, self._waiting, self._elements, self.full = self._waiting, defaultdict(list), 0, False
        all_train = next(iter(waiting.values()))[0].use.forward.around.all_train()
        for uses in waiting.values():
            if _torch.versions([one.grad for one in uses]) != [one.version for one in uses]:
                changed = next(one for one in uses if _torch.version(one.grad) != one.version)
                raise TamperedGradientError(tampered_message(", ".join(changed.use.site.names)))
            if len(uses) == 1 or not (all_train or _train(uses)) or not self._joined(uses):
                for use, grad, _ in uses:
                    self._alone(use, grad)
            if self._final:
                for use, _, _ in uses:
                    use.release()

    def finish_gradients(self) -> None:
        """Pass on all gradients that wait, those of one shape together unless too few."""
        self._formed_elements, self.gradients_full = 0, False
        while self._formed:
            formed = self._formed.popitem()[1]
            for name, factor, version in formed:
                if _torch.version(factor.grad_BP) != version:
                    raise TamperedGradientError(tampered_message(name))
            if len(formed) > _FEW:
                together = Dense(torch.cat([one.factor.grad_BP for one in formed]))
                self._join(Joint([one.name for one in formed], together))
                continue
            for name, factor, _ in formed:
                self._single(name, factor)

    def _joined(self, uses: Sequence[_Waiting]) -> bool:
        """Form the factors of similar uses at once; return False, with nothing done, where no form allows it."""
        first, layers = uses[0].use, len(uses)
        saved = first_saved([use.node for use, *_ in uses if use.node is not None])
        samples = layers * first.forward.batch_size
        formed = first.factors(
            [torch.cat(saved)] if saved else [],
            torch.cat([grad for _, grad, _ in uses]),
            lambda tensor, num_batch_dims: first.row_map.split(tensor, num_batch_dims, samples),
        )
        if any(
            accumulation_dtype(target.origin.value.dtype) != _dtype(formed[key])
            for key, target in first.targets.items()
        ):
            return False
        # Each target is a parameter itself.
        names = dict(zip(first.targets, zip(*[use.site.consumed for use, *_ in uses], strict=True), strict=True))
        _update_statistics(uses, formed)
        for key, factor in formed.items():
            assert isinstance(factor, (Dense, Outer))
            self._join(Joint(names[key], factor))
        return True


def _dtype(factor: Factor) -> torch.dtype | None:
    """Return the dtype of a factor's norms and sums; None where its form cannot be joined."""
    if type(factor) is Dense:
        return accumulation_dtype(factor.grad_BP.dtype)
    return accumulation_dtype(factor.g_NTO.dtype) if type(factor) is Outer and factor.slots == 1 else None


def _train(uses: Sequence[_Waiting]) -> bool:
    """Return whether all parameters of uses are still trained: one may have been frozen since the forward."""
    leaves = [leaf for one in uses for target in one.use.targets.values() for leaf in target.origin.leaves.values()]
    return all(leaf.parameter.requires_grad for leaf in leaves)


def _update_statistics(uses: Sequence[_Waiting], formed: Mapping[str, Factor]) -> None:
    """Update the statistics of call sites whose gradients are their largest so far."""
    parts: dict[str, list[Factor]] = {}
    for number, (use, grad, _) in enumerate(uses):
        if grad.numel() <= use.site.largest:
            continue
        saved = () if use.node is None else use.node.saved_tensors
        parts = parts or {key: split_layers(factor, len(uses)) for key, factor in formed.items()}
        for key, factors in parts.items():
            use.record(key, factors[number], grad, saved, factors[number])


def split_layers(factor: Factor, layers: int) -> list[Factor]:
    """Return views on the factors of several parameters that were formed as one, parameter by parameter."""
    if isinstance(factor, Outer):
        pairs = zip(factor.a_NTI.chunk(layers), factor.g_NTO.chunk(layers), strict=True)
        return [Outer(a_NTI, g_NTO, shape=factor.shape) for a_NTI, g_NTO in pairs]
    assert isinstance(factor, Dense)
    return [Dense(grad_BP) for grad_BP in factor.grad_BP.chunk(layers)]


class _SharedInput(NamedTuple):
    """A layer's factor whose norm waits for other layers with the same input."""

    use: ParamUse
    name: str
    factor: Outer
    input_NTI: Tensor
    other_NTO: Tensor
    versions: list[int]


class SharedInputNorms:
    """Collects factors until all others with the same input have arrived, and adds their norms."""

    # A factor waits only where the forward said that something else reads its input, and at most until the end of the
    # backward. Which tensors are the same is read off the factors themselves, both alive.
    def __init__(self, total: GroupNorms) -> None:
        """Add norms to `total`; nothing waits yet."""
        self._total = total
        self._waiting: defaultdict[Any, list[_SharedInput]] = defaultdict(list)  # by forward and memory of the input

    def hold(self, use: ParamUse, name: str, factor: Any) -> bool:
        """Hold a factor whose input other layers read as well; return whether its norm is added here."""
        # Nothing else in this backward contributes to its parameter, and it must not change until its norm has been
        # added.
        forward = use.forward
        if not forward.readers or forward.runs_again or len(self._total.sums) > 1:
            return False
        if type(factor) is not Outer or factor.slots > 1 or factor.sizes[0] <= 1 or self._total.is_whole(name):
            return False
        # A weight that is used transposed has its input in the place of the gradient.
        for input_NTI, other_NTO in ((factor.a_NTI, factor.g_NTO), (factor.g_NTO, factor.a_NTI)):
            readers = forward.readers.get(input_NTI.data_ptr(), 0)
            if readers > 1:
                memory = input_NTI.data_ptr(), input_NTI.shape, input_NTI.stride()
                key = id(forward), memory, input_NTI.dtype, other_NTO.dtype
                same = self._waiting[key]
                same.append(_SharedInput(use, name, factor, input_NTI, other_NTO, versions(factor)))
                if len(same) == readers:
                    self._add(self._waiting.pop(key))
                return True
        return False

    def finish(self) -> None:
        """Add the norms of all that still wait."""
        while self._waiting:
            self._add(self._waiting.popitem()[1])

    def _add(self, layers: Sequence[_SharedInput]) -> None:
        """Add the norms of layers with one input, by one joint Gram matrix where that is cheaper."""
        for waiting in layers:
            if versions(waiting.factor) != waiting.versions:
                raise TamperedGradientError(tampered_message(waiting.name))
        samples, positions, inputs = layers[0].input_NTI.shape
        outputs = sum(waiting.other_NTO.shape[2] for waiting in layers)
        by = formed_by(layers[0].input_NTI, layers[0].other_NTO)
        joint = gram_flops(positions, inputs, outputs, **by)
        moved, calls = (_MOVED_BY_UNITS, _CALLS_BY_UNITS) if by["by_units"] else (_MOVED, _CALLS)
        if by["fused"]:
            calls = _CALLS_FUSED
        saved = samples * (_separate_flops(layers, by) - joint - moved * positions * outputs)
        saved += (len(layers) - 1) * calls
        if len(layers) > 1 and saved > 0 and samples:
            self._total.add(layers[0].name, _joint(layers[0].input_NTI, [waiting.other_NTO for waiting in layers]))
            for waiting in layers:
                _record_shared_gram(waiting, joint * waiting.other_NTO.shape[2] // outputs, len(layers))
            return
        for waiting in layers:
            self._total.add_norm_of(waiting.name, waiting.factor)


def _separate_flops(layers: Sequence[_SharedInput], by: Mapping[str, bool]) -> int:
    """Return the FLOPs of the products of the norms one by one, per sample."""
    sizes = [waiting.factor.sizes for waiting in layers]
    return sum(min(gram_flops(*size, **by), 2 * size[0] * size[1] * size[2]) for size in sizes)


def _record_shared_gram(waiting: _SharedInput, flops: int, readers: int) -> None:
    """Write into a call site's statistics its share of the FLOPs of a Gram matrix formed for several layers."""
    plan = f"symmetric Gram, its input's shared by {readers}"
    for key, arrived in waiting.use.site.statistics.items():
        if waiting.name in arrived.names and len(arrived.products) == 1 and arrived.products[0].plan != plan:
            product = replace(arrived.products[0], norm=flops, plan=plan)
            waiting.use.site.statistics[key] = replace(arrived, products=(product,))


def _joint(input_NTI: Tensor, others: Sequence[Tensor]) -> Unfinished | Reduced:
    """Return the sum of the layers' squared norms, their other tensors concatenated for a few samples at a time."""
    positions, inputs = input_NTI.shape[1:]
    outputs = sum(other_NTO.shape[2] for other_NTO in others)
    workspace = runtime.elements(input_NTI.device)
    # In the processor's cache, as the Gram reads them.
    cached = CACHED * torch.get_num_threads() if input_NTI.device.type == "cpu" else workspace
    at_once = max(1, min(workspace, cached) // (positions * (inputs + outputs)))
    sums: list[Unfinished | Reduced] = []
    for start in range(0, len(input_NTI), at_once):
        piece = slice(start, start + at_once)
        other_NTO = torch.cat([other_NTO[piece] for other_NTO in others], 2)
        gram = Outer(input_NTI[piece], other_NTO, shape=(outputs, inputs)).gram_sums()
        assert gram is not None  # of several positions
        sums.append(gram)
    return samples_joined(sums)
