"""Between two forwards: what a loop, or a method of the model, makes of one's outputs and hands to the next.

A forward is proved from its inputs on, and a loss down to outputs. Where a model is called part by part (an encoder,
then a decoder), samples may also meet on the way from one to the other: rows that were centred over the batch, or put
into another order.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ghostclip.capture.backward_entry import forward_at
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.row_maps import WHOLE, RowMap, candidates
from ghostclip.errors import SampleMixingError
from ghostclip.evidence.custom_backwards import is_linear
from ghostclip.evidence.loss_graph import Unheard, proved_outputs, separates_samples
from ghostclip.evidence.probe import GradientSource, Start, weightings

_MIXED: Final = (
    "an input of shape {shape} of {module}, which was computed from outputs of an earlier forward, brings samples "
    "together (a mean over the batch, rows in another order): the gradient of one sample would depend on others, and "
    "no clipping bounds that. Compute each sample's input from that sample's outputs alone, its row in its place."
)


def refuse_mixed_inputs(capture: CaptureContext, inputs: Iterable[Tensor], module: str) -> None:
    """Refuse a forward in whose inputs samples of earlier forwards' outputs have met.

    Cost:
        A few backwards, for each input in the graph, down to the outputs that it was computed from.
    """
    for tensor in inputs:
        if tensor.grad_fn is not None and tensor.is_floating_point() and not _separates_samples(capture, tensor):
            raise SampleMixingError(_MIXED.format(shape=tuple(tensor.shape), module=module))


def _separates_samples(capture: CaptureContext, tensor: Tensor) -> bool:
    """Return whether one sample's rows of an input lead to that sample's rows of outputs alone, by any row map."""
    size, source = capture.forward.batch_size, GradientSource.of(tensor)
    found = proved_outputs([Start(source, WHOLE)])
    # Rows of batches of another size belong to another number of samples, which the backward refuses.
    sizes = {edge: forward_at(edge[0]) for edge in found}
    ends = {edge: rows for edge, rows in found.items() if (own := sizes[edge]) is not None and own.batch_size == size}
    if not ends:
        return True
    linear = is_linear([tensor], capture, capture.forward)
    with capture.listening(Unheard()):
        return any(
            separates_samples(
                [Start(source, row_map)], ends, weightings(size, linear=linear), batch_size=size, linear=linear
            )
            for row_map in _maps_of(tensor, size, capture.axis)
        )


def _maps_of(tensor: Tensor, size: int, axis: int) -> Sequence[RowMap]:
    """List the ways in which an input may belong to the samples; one without rows of theirs belongs to none of them."""
    # Of the first sample there is no gradient in some of the backwards that tell samples apart.
    return candidates(tensor.shape, size, axis=axis) or [RowMap("one", 0, torch.tensor([1]))]
