"""Factors between their norm and their sum: whether they still are what was measured.

Changes in place to what a factor holds are counted by autograd.

A second backward must bring what the first one brought, whose norms decide on how much is released. It does not where a
backward draws random numbers (a quantised function, checkpointing with ``preserve_rng_state=False`` around dropout) or
changes what the next one does: the coefficients of the first would then be applied to other gradients, of any norm.
Torch's generators are put back, so that both draw the same numbers; whatever else differs is refused.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.checks.batches import Randomness
from ghostclip.errors import TamperedGradientError
from ghostclip.factors import Dense, Factor, Outer
from ghostclip.kernels import runtime

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
