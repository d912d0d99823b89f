"""Samples that follow their company without any gradient telling: by control flow, by counting, by the batch's size.

A mask that is left out when no sample is padded, an expert's capacity that earlier samples use up, a sum divided by
``len(x)``: no gradient leads from one sample to the other, so that the probe sees nothing. In the forwards that are
proved, a model that draws no random numbers is therefore run without gradients on the batch with one sample replaced,
and on the batch without its last sample. What the others receive must stay the same.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ghostclip.capture.mixing import batch_axis_of, replaced, restored_buffers
from ghostclip.errors import SampleMixingError

# Relative differences beyond those of another order of rounding.
_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 1e-3}
# Elements that are compared at a time.
_COMPARED: Final = 1 << 18


def refuse_company(
    model: nn.Module, run: Callable[[Any], list[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> None:
    """Refuse a model whose outputs for one sample change with the others.

    Args:
        model: The model, for its buffers.
        run: Runs it on inputs and returns its output tensors.
        inputs: What the forward was called with.
        batch_size: B, at least 2.
        axis: The expected batch axis.

    Raises:
        SampleMixingError: They do.
    """
    # A GPU's rounding follows the batch's size, and a forward would use up random numbers that nobody puts back.
    if any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers())):
        return
    fewer = tree_map(lambda leaf: _without_last(leaf, batch_size=batch_size, axis=axis), inputs)
    other = replaced(inputs, 0, batch_size=batch_size, axis=axis)
    with torch.no_grad(), restored_buffers(model), torch.random.fork_rng(devices=[]):
        try:
            state = torch.get_rng_state()
            base = run(inputs)
            if not torch.equal(state, torch.get_rng_state()) or any(tensor.is_cuda for tensor in base):
                return
            # One after the other: outputs may be as large as all activations of a layer.
            replacing = _differs(base, run(other), axis=axis, sizes=(batch_size, batch_size), rows=slice(1, batch_size))
            rest = slice(0, batch_size - 1)
            leaving = _differs(base, run(fewer), axis=axis, sizes=(batch_size, batch_size - 1), rows=rest)
        except Exception:  # noqa: BLE001 - what it does on other batches is no reason to refuse this one
            return
    if replacing or leaving:
        what = "one sample was replaced" if replacing else "the last sample was left out"
        raise SampleMixingError(_refusal(model, what))


def _refusal(model: nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__}: outputs of other samples changed when {what}, although no gradient leads from one to "
        "the other, so that the output of one sample depends on other samples: the model divides by the number of "
        "samples, counts over the batch, or takes another branch for the whole batch. Compute each sample's output "
        "from its own rows; ghostclip.validate(model, batch, loss_fn) looks closer."
    )


def _without_last(leaf: Any, *, batch_size: int, axis: int) -> Any:
    place = batch_axis_of(leaf, batch_size=batch_size, axis=axis)
    return leaf if place is None else leaf.detach().narrow(place, 0, batch_size - 1)


def _differs(base: list[Tensor], outputs: list[Tensor], *, axis: int, sizes: tuple[int, int], rows: slice) -> bool:
    """Return whether rows of outputs that can be compared differ beyond rounding."""
    if len(base) != len(outputs):
        return False
    for one, two in zip(base, outputs, strict=True):
        place = batch_axis_of(one, batch_size=sizes[0], axis=axis)
        tolerance = _TOLERANCE.get(one.dtype)
        # Of states ``(layers, B, ...)`` with as many layers as samples nothing can be said.
        ambiguous = tuple(one.shape[:2]) == (sizes[0], sizes[0])
        if place is None or ambiguous or tolerance is None or one.dim() != two.dim() or two.shape[place] != sizes[1]:
            continue
        first, second = one.movedim(place, 0)[rows], two.movedim(place, 0)[rows]
        if first.shape != second.shape or not first.numel():
            continue
        if _apart(first, second, tolerance):
            return True
    return False


def _apart(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Compare a piece at a time: logits may be the largest tensors of a step, and copies of them its peak."""
    pieces = list(zip(first.reshape(-1).split(_COMPARED), second.reshape(-1).split(_COMPARED), strict=True))
    scale = max(float(one.abs().nan_to_num(posinf=0.0).max()) for one, _ in pieces)
    return any(bool(((one - two).abs().nan_to_num() > tolerance * scale).any()) for one, two in pieces)
