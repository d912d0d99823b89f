"""Samples that follow their company without any gradient telling: by control flow, by counting, by the batch's size.

A mask that is left out when no sample is padded, an expert's capacity that earlier samples use up, a sum divided by
``len(x)``: no gradient leads from one sample to the other, so that the probe sees nothing. In the forwards that are
proved, the model is therefore run without gradients on the batch with one sample replaced, and on the first half of the
batch. What the other samples receive must stay the same. All runs draw the same random numbers; half of a batch would
meet others, so that it is left to models that draw none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ghostclip.capture.mixing import batch_axis_of, replaced, restored_buffers
from ghostclip.capture.randomness import Draws, Randomness, unnoticed
from ghostclip.capture.unchecked import COMPANY, FEWER, Unchecked
from ghostclip.errors import SampleMixingError

# Relative differences beyond those of another order of rounding, by the coarsest dtype in use: for as many samples,
# which the same kernels see, and for fewer.
_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FEWER: Final = {torch.float64: 1e-7, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Elements that are compared at a time.
_COMPARED: Final = 1 << 18

Run = Callable[[Any], list[Tensor]]


@dataclass(frozen=True)
class Batch:
    """What a forward was called with.

    Attributes:
        inputs: Its positional and its keyword inputs.
        size: B, at least 2.
        axis: The expected batch axis.
        routed: Whether rows were selected in it, so that data decides which random number a row meets.
        reordered: Whether they were put into another order: outputs may come in an order that follows the data.
    """

    inputs: Any
    size: int
    axis: int
    routed: bool = False
    reordered: bool = False

    def half(self) -> Any:
        """Return the inputs of the first half of the samples, the larger one."""
        return tree_map(self._first, self.inputs)

    def _first(self, leaf: Any) -> Any:
        place = batch_axis_of(leaf, batch_size=self.size, axis=self.axis)
        return leaf if place is None else leaf.detach().narrow(place, 0, _half(self.size))


def refuse_company(model: nn.Module, run: Run, batch: Batch, unchecked: Unchecked) -> None:
    """Refuse a model whose outputs for one sample change with the others.

    Args:
        model: The model, for its buffers and dtypes.
        run: Runs it on inputs and returns its output tensors.
        batch: What the forward was called with.
        unchecked: Told what could not run, and why.

    Raises:
        SampleMixingError: They do.
    """
    tensors = [*model.parameters(), *model.buffers()]
    used = [*tensors, *(leaf for leaf in tree_leaves(batch.inputs) if isinstance(leaf, Tensor))]
    try:
        with restored_buffers(model), unnoticed(used) as before:
            changed = _look(run, batch, unchecked, before=before, coarsest=_coarsest(tensors))
    except Exception as error:  # noqa: BLE001 - what it does on other batches is no reason to refuse this one
        unchecked.missed(f"the model raised {type(error).__name__} on another batch", COMPANY, FEWER)
        return
    if changed:
        raise SampleMixingError(_refusal(model, changed))


def _look(run: Run, batch: Batch, unchecked: Unchecked, *, before: Randomness, coarsest: torch.dtype) -> str:
    """Return what was done to the batch when other samples' outputs changed; empty if they never did."""
    base = run(batch.inputs)
    drawn = before.drawn()
    other = replaced(batch.inputs, 0, batch_size=batch.size, axis=batch.axis)
    before.restore()
    # One after the other: outputs may be as large as all activations of a layer.
    differ = _Outputs(batch, batch.size, 1, _TOLERANCE, coarsest).differ(base, run(other))
    if differ and drawn and _meets_other_numbers(run, batch, other, before):
        unchecked.missed("which random numbers a sample meets depends on the others", COMPANY)
    elif differ:
        return "one sample was replaced"
    _note(unchecked, COMPANY, differ)
    if drawn:
        unchecked.missed("random numbers are drawn", FEWER)
        return ""
    fewer = _Outputs(batch, _half(batch.size), 0, _FEWER, coarsest).differ(base, run(batch.half()))
    _note(unchecked, FEWER, fewer)
    return "the last samples were left out" if fewer else ""


def _note(unchecked: Unchecked, check: str, differ: bool | None) -> None:  # noqa: FBT001 - a result, no option
    if differ is None:
        unchecked.missed("no output has one row a sample", check)
    elif not differ:
        unchecked.ran(check)


def _meets_other_numbers(run: Run, batch: Batch, other: Any, before: Randomness) -> bool:
    """Return whether rows of samples may have met other random numbers than in the batch as it was."""
    seen = []
    for inputs in (batch.inputs, other):
        before.restore()
        with Draws() as draws:
            run(inputs)
        seen.append(draws.seen)
    return batch.routed or seen[0] != seen[1]


def _half(size: int) -> int:
    return (size + 1) // 2


def _refusal(model: nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__}: outputs of other samples changed when {what}, although no gradient leads from one to "
        "the other, so that the output of one sample depends on other samples: the model divides by the number of "
        "samples, counts over the batch, or takes another branch for the whole batch. Compute each sample's output "
        "from its own rows; ghostclip.validate(model, batch, loss_fn) looks closer."
    )


def _coarsest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype with the fewest digits among those of a model and of autocast, where it is on."""
    devices = {tensor.device.type for tensor in tensors}
    used = {tensor.dtype for tensor in tensors if tensor.dtype in _TOLERANCE}
    used |= {torch.get_autocast_dtype(kind) for kind in devices if kind != "meta" and torch.is_autocast_enabled(kind)}
    return max(used, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


@dataclass(frozen=True)
class _Outputs:
    """Outputs for some samples of a batch, to be held against those for all.

    Attributes:
        batch: The batch.
        size: How many samples the others are for.
        replaced: How many of them, the first ones, may come out differently.
        tolerances: Relative differences that are rounding, by dtype.
        coarsest: The dtype with the fewest digits on the way to them.
    """

    batch: Batch
    size: int
    replaced: int
    tolerances: dict[torch.dtype, float]
    coarsest: torch.dtype

    def differ(self, base: list[Tensor], outputs: list[Tensor]) -> bool | None:
        """Return whether rows differ beyond rounding; None where none can be compared."""
        if len(base) != len(outputs):
            return None
        pairs = [pair for pair in map(self._rows, base, outputs) if pair is not None]
        return any(self._is_apart(*pair) for pair in pairs) if pairs else None

    def _rows(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return two outputs with their samples first."""
        size, axis = self.batch.size, self.batch.axis
        place = batch_axis_of(one, batch_size=size, axis=axis)
        if place is None or one.dtype not in self.tolerances:
            return None
        # Of states ``(layers, B, ...)`` with as many layers as samples nothing can be said.
        ambiguous = tuple(one.shape[:2]) == (size, size)
        if ambiguous or one.dim() != two.dim() or two.shape[place] != self.size:
            return None
        first, second = one.movedim(place, 0), two.movedim(place, 0)
        return (first, second) if first.shape[1:] == second.shape[1:] and first.numel() else None

    def _is_apart(self, first: Tensor, second: Tensor) -> bool:
        tolerance = max(self.tolerances[first.dtype], self.tolerances[self.coarsest])
        if not _apart(first[self.replaced : self.size], second[self.replaced :], tolerance):
            return False
        if not self.batch.reordered:
            return True
        # The same rows in another order: each of the smaller batch, but those replaced, is found in the other.
        return _unmatched(second, first, tolerance) > self.replaced


def _unmatched(rows: Tensor, among: Tensor, tolerance: float) -> int:
    """Return how many rows have no counterpart among others, by a few sums over each."""
    sums, others = _sums(rows), _sums(among)
    scale = others.abs().amax(0)
    found = ((sums[:, None] - others[None]).abs() <= tolerance * scale).all(2).any(1)
    return int((~found).sum())


def _sums(rows: Tensor) -> Tensor:
    """Return three sums over each row that tell rows apart, shape ``(rows, 3)``, float64."""
    flat = rows.flatten(1).nan_to_num()
    ramp = torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    sums = (flat.sum(1), flat.abs().sum(1), flat @ ramp)
    return torch.stack(sums, 1).double()


def _apart(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Compare a piece at a time: logits may be the largest tensors of a step, and copies of them its peak."""
    pieces = list(zip(first.reshape(-1).split(_COMPARED), second.reshape(-1).split(_COMPARED), strict=True))
    scale = max(float(one.abs().nan_to_num(posinf=0.0).max()) for one, _ in pieces)
    return any(bool(((one - two).abs().nan_to_num() > tolerance * scale).any()) for one, two in pieces)
