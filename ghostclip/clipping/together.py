"""Norms of layers that read one input (queries, keys and values; gate and up): its Gram matrix is formed once for all.

``Σ_l Σ_{s,t} (a_s·a_t)(g^l_s·g^l_t) = Σ_{s,t} (a_s·a_t)(Σ_l g^l_s·g^l_t)``: the layers' squared norms add up to that of
one layer with all their outputs, which costs T²·(I + Σ_l O_l) a sample in the place of Σ_l T²·(I + O_l), and a copy of
what is put side by side.

Shape letters: N samples, T positions, I values of the input, O values of the others.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ghostclip.capture.param_use import ParamUse
from ghostclip.clipping.held_factors import changed_in_place, versions
from ghostclip.clipping.norms import GroupNorms
from ghostclip.errors import TamperedGradientError
from ghostclip.factors import Outer, SquaredNorm, planner
from ghostclip.factors.base import end_to_end
from ghostclip.kernels.bounds import Reduced, Unfinished, samples_joined
from ghostclip.kernels.gram import CACHED

# What putting an element beside others costs, and what calling the functions of a Gram costs, in FLOPs.
_MOVED: Final = 80
_CALLS: Final = 3_000_000
# The same on matrix units: 2 bytes read and written, 8 functions of 5 microseconds.
_MOVED_BY_UNITS: Final = 4 * planner.BYTE
_CALLS_BY_UNITS: Final = 24_000_000_000
# And where a kernel forms a Gram: one function.
_CALLS_FUSED: Final = _CALLS_BY_UNITS // 8


class _SharedInput(NamedTuple):
    """One layer's gradients: a sum over positions of products of the shared tensor with another."""

    use: ParamUse
    name: str
    factor: Outer
    input_NTI: Tensor
    other_NTO: Tensor
    versions: list[int]


class Together:
    """Collects factors until all others with the same input have arrived, and adds their norms."""

    # A factor waits only where the forward said that something else reads its input, and at most until the end of the
    # backward. Which tensors are the same is read off the factors themselves, both alive.
    def __init__(self, total: GroupNorms) -> None:
        self._total = total
        self._waiting: defaultdict[Any, list[_SharedInput]] = defaultdict(list)

    def takes(self, use: ParamUse, name: str, factor: Any) -> bool:
        """Take a factor whose input others read as well; return whether its norm is added here."""
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
                place = input_NTI.data_ptr(), input_NTI.shape, input_NTI.stride()
                key = id(forward), place, input_NTI.dtype, other_NTO.dtype
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

    def _add(self, found: Sequence[_SharedInput]) -> None:
        for waiting in found:
            if versions(waiting.factor) != waiting.versions:
                raise TamperedGradientError(changed_in_place(waiting.name))
        samples, positions, inputs = found[0].input_NTI.shape
        outputs = sum(waiting.other_NTO.shape[2] for waiting in found)
        by = planner.formed_by(found[0].input_NTI, found[0].other_NTO)
        joint = planner.gram_flops(positions, inputs, outputs, **by)
        moved, calls = (_MOVED_BY_UNITS, _CALLS_BY_UNITS) if by["by_units"] else (_MOVED, _CALLS)
        if by["fused"]:
            calls = _CALLS_FUSED
        saved = samples * (_apart(found, by) - joint - moved * positions * outputs)
        saved += (len(found) - 1) * calls
        if len(found) > 1 and saved > 0:
            self._total.add(found[0].name, _joint(found[0].input_NTI, [waiting.other_NTO for waiting in found]))
            for waiting in found:
                _explain(waiting, joint * waiting.other_NTO.shape[2] // outputs, len(found))
            return
        for waiting in found:
            self._total.add_norm_of(waiting.name, waiting.factor)


def _apart(found: Sequence[_SharedInput], by: Mapping[str, bool]) -> int:
    """Return the FLOPs of the products of the norms one by one, per sample."""
    sizes = [waiting.factor.sizes for waiting in found]
    return sum(min(planner.gram_flops(*size, **by), 2 * size[0] * size[1] * size[2]) for size in sizes)


def _explain(waiting: _SharedInput, flops: int, readers: int) -> None:
    """Note, for the coverage report, a layer's share of a Gram matrix that is formed for several."""
    plan = f"symmetric Gram, its input's shared by {readers}"
    for key, arrived in waiting.use.site.statistics.items():
        if waiting.name in arrived.names and len(arrived.products) == 1 and arrived.products[0].plan != plan:
            product = replace(arrived.products[0], norm=flops, plan=plan)
            waiting.use.site.statistics[key] = replace(arrived, products=(product,))


def _joint(input_NTI: Tensor, others: Sequence[Tensor]) -> SquaredNorm | Unfinished | Reduced:
    """Return the sum of the layers' squared norms, their other tensors concatenated for a few samples at a time."""
    positions, inputs = input_NTI.shape[1:]
    outputs = sum(other_NTO.shape[2] for other_NTO in others)
    workspace = planner.workspace(input_NTI.device)
    # In the processor's cache, as the Gram reads them.
    cached = CACHED * torch.get_num_threads() if input_NTI.device.type == "cpu" else workspace
    at_once = max(1, min(workspace, cached) // (positions * (inputs + outputs)))
    parts: list[SquaredNorm] = []
    sums: list[Unfinished | Reduced] = []
    for start in range(0, max(1, input_NTI.shape[0]), at_once):
        piece = slice(start, start + at_once)
        other_NTO = torch.cat([other_NTO[piece] for other_NTO in others], 2)
        outer = Outer(input_NTI[piece], other_NTO, shape=(outputs, inputs))
        found = outer.gram_sums()
        if found is None:
            parts.append(outer.gram_sqnorm())
        else:
            sums.append(found)
    return end_to_end(parts) if parts else samples_joined(sums)
