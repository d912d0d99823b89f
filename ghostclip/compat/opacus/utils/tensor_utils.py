"""Norms and sums of tensors whose leading axis is the samples.

Shape letters: B samples.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ghostclip.compat.opacus._refused import refusing

__getattr__ = refusing(__name__)


def calc_sample_norms(named_params: Iterable[tuple[str, torch.Tensor]], *, flat: bool = True) -> list[torch.Tensor]:
    """Return the norm of every sample's gradient.

    Args:
        named_params: (name, per-sample gradient `[B, ...]`) of each parameter.
        flat: Over all parameters together, or of each by itself.

    Returns:
        One tensor `[B]`, or one for each parameter; float32 at least.
    """
    norms = [calc_sample_norms_one_layer(grad_sample) for _, grad_sample in named_params]
    return [torch.stack(norms).norm(dim=0)] if flat else norms


def calc_sample_norms_one_layer(param: torch.Tensor) -> torch.Tensor:
    """Return the norm of every sample's gradient of one parameter.

    Args:
        param: `[B, ...]`.

    Returns:
        `[B]`, float32 at least.
    """
    wide = param.to(torch.promote_types(param.dtype, torch.float32))
    return wide.reshape(len(param), -1 if param.numel() else 0).norm(dim=1)


def sum_over_all_but_batch_and_last_n(tensor: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Add up what lies between the samples and the last axes.

    Args:
        tensor: `[B, ..., last n_dims axes]`.
        n_dims: How many axes at the end stay.

    Returns:
        `[B, last n_dims axes]`.
    """
    between = tuple(range(1, tensor.dim() - n_dims))
    return tensor.sum(dim=between) if between else tensor
