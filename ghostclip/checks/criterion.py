"""Losses that are known: how they were computed from outputs and targets, so that they can be with other samples.

A weight that was normalised over the batch, a rank, a threshold at the batch's median: no gradient leads through them
from one sample to the other, and the loss's graph shows a number for each sample and not where it comes from. Where the
function is known, it is called again on the outputs and targets with some samples replaced by copies of others, and on
some by themselves: neither the losses nor the gradients that the other samples' outputs receive may change.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _tree
from ghostclip.checks.batches import Batch
from ghostclip.checks.dependence import batch_axis_of
from ghostclip.checks.independence import among_larger_ones, dependence, memory, plainly, scalars_that_follow
from ghostclip.checks.module_state import ModuleState
from ghostclip.checks.unchecked import CRITERION, REPLACED, SCALARS, Unchecked

_REFUSED: Final = (
    "criterion {name}: the loss of one sample, or the gradient of its output, changed when {what}, although no "
    "gradient leads from one to the other: it weighs, centres, ranks or selects samples by what is in the batch, "
    "counts over it, or mixes targets. Without one sample all others' gradients would change, and no clipping bounds "
    "that. Compute each sample's loss from its own output and target, with weights that are public constants."
)
_REMEMBERED: Final = (
    "criterion {name}: losses, or gradients of outputs, changed when the call before was given other samples. It keeps "
    "something of a batch for later ones (a threshold, a centre, a running mean of the losses), which carries private "
    "samples into later steps without noise. Use public constants, or a schedule that counts calls."
)
_NOT_OF_HALVES: Final = (
    "the loss of a batch has another gradient than the losses of its two halves have together, as their mean or their "
    "sum: it weighs, centres, ranks, mixes or selects samples by what is in the batch. Without one sample all others' "
    "gradients would change, and no clipping bounds that. Compute each sample's loss from its own output and target, "
    "with weights that are public constants."
)
# Of larger arguments (logits of a language model) so many samples are looked at.
_LARGE: Final = 1 << 22
_FEW: Final = 8
_AS_LONG: Final = "an argument of the criterion has as many rows as there are samples, and may be none of theirs"


Copied = Callable[[], AbstractContextManager[Mapping[str, Tensor]]] | None


@_tree.leaf
@dataclass(frozen=True, eq=False)
class _Whole:
    """An argument that stays as it is when the others are exchanged for other samples."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class KnownLoss:
    """One call of a function that returned a loss for each sample, or one for all."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    criterion: Any  # the user's own, which the function calls
    node: Any  # of the graph, which made what was returned
    is_scalar: bool  # whether it was one for all
    device: str  # the type of its device
    cast: torch.dtype | None  # of autocast, where it was on

    def refusal(self, batch_size: int, axis: int, *, mean: bool, unchecked: Unchecked, copied: Copied) -> str | None:
        """Run the loss on other batches; return why it is refused, "" if samples are independent, None if undecided."""
        # `mean`: whether one loss for all is a mean over the samples, else their sum. `copied` lets leaves stand for
        # the model's parameters; None where the model must not run. Returns None where an argument may as well be as
        # long as the batch by chance: another batch tells.
        arguments = _tree.mapped(_cut_off, (self.args, self.kwargs))
        batch = Batch(arguments, batch_size, axis, seed=unchecked.forwards, autocast=self.cast, shared=copied is None)
        if sum(tensor.numel() for tensor in _tree.tensors(batch.inputs)) > _LARGE:
            batch = batch.few(_FEW)
        arguments, batch_size = batch.inputs, batch.size
        ends = [tensor for tensor in _tree.tensors(arguments) if tensor.requires_grad]
        if self.is_scalar and not ends and isinstance(self.criterion, nn.Module):
            return self._refusal_by_halves(self.criterion, batch, unchecked, copied)
        # What is learned beside the outputs, a temperature, has no samples.
        axes = [batch_axis_of(tensor, batch_size=batch_size, axis=axis) for tensor in ends]
        holder = _CriterionModule(self.criterion, ends)
        state, local_unchecked = ModuleState(holder), Unchecked()

        def run_without_reset(inputs: Any) -> list[Tensor]:
            return self._computed(inputs, axes, batch_size if mean else 0)

        def run(inputs: Any) -> list[Tensor]:
            state.restore()
            return run_without_reset(inputs)

        changed = dependence(holder, run, batch, local_unchecked)
        if not changed and True in (among_larger_ones(holder, plainly(run), batch)[0] or ()):
            changed = "others were replaced by several times larger ones"
        state.restore()
        if changed:
            whole = _as_long(batch, run)
            if not whole or dependence(holder, run, replace(batch, inputs=_with_whole(arguments, whole)), Unchecked()):
                return _REFUSED.format(name=self._name(), what=changed)
            unchecked.missed(_AS_LONG, CRITERION)
            return None
        remembers, _ = memory(holder, state, run_without_reset, batch)
        if remembers and True in remembers:
            return _REMEMBERED.format(name=self._name())
        unchecked.report(CRITERION, local_unchecked.reason(REPLACED))
        return ""

    def _refusal_by_halves(self, model: nn.Module, batch: Batch, unchecked: Unchecked, copied: Copied) -> str:
        """Return why a scalar loss that runs the model itself is refused: it is not that of its halves."""
        if copied is None:
            unchecked.missed("ranks hold the model in parts", CRITERION)
            return ""
        holder, local_unchecked = _CriterionModule(model, []), Unchecked()
        state = ModuleState(holder)

        def run(inputs: Any) -> list[Tensor]:
            state.restore()
            args, kwargs = inputs
            return [self.function(*args, **kwargs)]

        with torch.autocast(self.device, dtype=self.cast, enabled=self.cast is not None), copied() as leaves:
            follow = 0 in scalars_that_follow(holder, run, batch, local_unchecked, parameters=list(leaves.values()))
            state.restore()
        unchecked.report(CRITERION, local_unchecked.reason(SCALARS))
        return _NOT_OF_HALVES if follow else ""

    def _computed(self, inputs: Any, axes: Sequence[int | None], whole: int) -> list[Tensor]:
        """Return the gradients of the function's arguments and, where it has one for each sample, the losses."""
        # `axes`: the samples' axis of what has a gradient, None where there is none. `whole`: the number of samples
        # that one loss for all was a mean over; 0 where it was a sum.
        args, kwargs = _tree.mapped(lambda leaf: leaf.tensor if isinstance(leaf, _Whole) else leaf, inputs)
        with torch.enable_grad():
            losses = self.function(*args, **kwargs)
            ends = [tensor for tensor in _tree.tensors((args, kwargs)) if tensor.requires_grad]
            grads = torch.autograd.grad(losses.sum(), ends, allow_unused=True, materialize_grads=True) if ends else ()
        if losses.dim():
            return [losses, *grads]
        sizes = [end.shape[axis] for end, axis in zip(ends, axes, strict=True) if axis is not None]
        # A mean of fewer samples is one over fewer.
        share = sizes[0] / whole if whole and sizes else 1.0
        return [grad * share for grad in grads]

    def _name(self) -> str:
        return getattr(self.criterion, "__name__", type(self.criterion).__name__)


class _CriterionModule(nn.Module):
    """Module that holds a criterion, so that its state is restored as a model's is."""

    def __init__(self, criterion: Any, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.criterion = criterion
        for number, output in enumerate(outputs):
            # Where, and how precisely, it computes.
            self.register_buffer(f"place_{number}", output.new_empty(0))


def _cut_off(leaf: Any) -> Any:
    """Return a tensor outside the graph, which is asked for a gradient if it was in it."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _as_long(batch: Batch, run: Callable[[Any], Any]) -> list[Tensor]:
    """Return arguments that merely have as many rows as samples: the loss runs with them beside fewer samples."""
    whole = []
    for leaf in _tree.tensors(batch.inputs):
        if leaf.requires_grad or batch_axis_of(leaf, batch_size=batch.size, axis=batch.axis) is None:
            continue
        try:
            run(replace(batch, inputs=_with_whole(batch.inputs, [leaf])).of_samples(batch.subset))
        except Exception:  # noqa: BLE001 - it belongs to the samples
            continue
        whole.append(leaf)
    return whole


def _with_whole(arguments: Any, whole: Sequence[Tensor]) -> Any:
    """Return the arguments with some tensors marked to stay as they are when the others are exchanged."""
    ids = set(map(id, whole))
    return _tree.mapped(lambda leaf: _Whole(leaf) if id(leaf) in ids else leaf, arguments)
