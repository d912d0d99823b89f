"""Multi-head attention under Opacus's name, and the bias that it appends to a sequence.

Shape letters: T steps, B samples, E features.
"""

import torch
from torch import Tensor, nn


class DPMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``: the same arguments, outputs and ``state_dict`` keys.

    Opacus's class of this name computes another function with ``batch_first=True`` and more than one head (it mixes
    heads with positions), refuses ``is_causal`` and 2-D masks of ``batch_first`` inputs; weights trained here are meant
    for torch's function.
    """


class SequenceBias(nn.Module):
    """Appends one learned element to the end of every sequence.

    Attributes:
        bias: The element, shape ``(E,)``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:  # noqa: FBT001, FBT002  (Opacus's)
        """Draw the element from a standard normal distribution.

        Args:
            embed_dim: E.
            batch_first: Whether sequences are ``(B, T, E)``, not ``(T, B, E)``.
        """
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim))
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequences with the element appended.

        Args:
            x: Shape ``(B, T, E)`` or ``(T, B, E)``.

        Returns:
            One step more, same dtype.
        """
        if self.batch_first:
            return torch.cat([x, self.bias.repeat(x.shape[0], 1, 1)], 1)
        return torch.cat([x, self.bias.repeat(1, x.shape[1], 1)], 0)
