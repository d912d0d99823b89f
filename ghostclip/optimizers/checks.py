"""What a private optimizer refuses or warns about before it releases anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip.errors import InvalidOptionError, UncoveredParameterError

if TYPE_CHECKING:
    from ghostclip.clipping.clipper import GhostClipper

_NAMES_SHOWN = 5


def refuse_repeated_evaluation(optimizer: Optimizer) -> None:
    """Refuse optimizers that ask for more than one gradient per step.

    Args:
        optimizer: The optimizer to wrap.

    Raises:
        InvalidOptionError: If it is one of them.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidOptionError(
            "optimizer=LBFGS evaluates the loss several times in one step, and each evaluation would be a release of "
            "its own. Use an optimizer that takes one gradient per step."
        )


def refuse_uncovered(clipper: GhostClipper, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse trainable parameters that would be updated from gradients nobody clipped.

    Args:
        clipper: What clips.
        parameters: Parameters of the optimizer, or about to join it.

    Raises:
        UncoveredParameterError: If one of them is trainable and not clipped.
    """
    covered = {id(p) for p in clipper.trainable_parameters()}
    stray = [p for p in parameters if p.requires_grad and id(p) not in covered]
    if stray:
        names = {id(p): name for name, p in clipper.model.named_parameters()}
        listed = ", ".join(
            names.get(id(p), f"one of shape {tuple(p.shape)} outside the model") for p in stray[:_NAMES_SHOWN]
        )
        raise UncoveredParameterError(
            f"optimizer: {len(stray)} trainable parameter(s) are not clipped per sample ({listed}). Take them out of "
            "the optimizer, freeze them, or make the model private again now that they are trainable."
        )


def warn_about_parameters_left_out(clipper: GhostClipper, parameters: Sequence[nn.Parameter]) -> None:
    """Say that some parameters count in every sample's norm and are never updated.

    Args:
        clipper: What clips.
        parameters: The parameters of the optimizer.
    """
    own = {id(p) for p in parameters}
    missing = sum(id(p) not in own for p in clipper.trainable_parameters())
    if missing:
        warnings.warn(
            f"{missing} trainable parameter(s) of the model are not in the optimizer. Their gradients count in every "
            "sample's norm but are never released. Freeze them (requires_grad_(False)), or add them.",
            stacklevel=4,
        )
