"""The lengths inside a packed sequence."""

from __future__ import annotations

import torch


def compute_seq_lengths(batch_sizes: torch.Tensor) -> list[int]:
    """Return the length of every sequence.

    Args:
        batch_sizes: How many sequences are longer than each step, as `PackedSequence.batch_sizes` says.

    Returns:
        The lengths, longest first.
    """
    sizes = batch_sizes.tolist()
    return [sum(size > sequence for size in sizes) for sequence in range(sizes[0] if sizes else 0)]
