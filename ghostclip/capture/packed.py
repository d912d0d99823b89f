"""Packed sequences: which sample each row of all steps belongs to.

Packing lays the rows of all steps one after the other; step t has those of the sequences that are at least so long, in
the order in which the sequences were packed, longest first. Row by row that says the position of a sequence in the
packed batch; which sample stands there is the order in which the padded batch was sorted before.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ghostclip import _torch
from ghostclip._tree import leaves as leaves_of

PACK, PAD = _torch.PACK, _torch.PAD


def positions(batch_sizes: Tensor) -> Tensor:
    """Return the position in the packed batch of every row, ``(rows,)``, on the CPU."""
    sizes = batch_sizes.cpu()
    starts = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)


def rows_of(packed: PackedSequence) -> Tensor:
    """Return the sample of every row of a packed batch from outside the model, ``(rows,)``, on the CPU."""
    # Without `sorted_indices`, samples stand in order.
    place = positions(packed.batch_sizes)
    return place if packed.sorted_indices is None else packed.sorted_indices.cpu()[place]


def packed_inputs(tree: Any) -> Iterator[PackedSequence]:
    """Yield the packed sequences among a model's inputs, in order."""
    for leaf in leaves_of(tree, is_leaf=is_packed):
        if is_packed(leaf):
            yield leaf


def is_packed(item: Any) -> bool:
    """Return whether an input is a packed sequence, which counts as one."""
    return isinstance(item, PackedSequence)


def with_a_step(lengths: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return arguments of the packing function in which a dummy sample is not of length 0, which it refuses."""
    return lengths.clamp(min=1), *rest
