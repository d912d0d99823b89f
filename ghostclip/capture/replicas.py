"""A model inside a DistributedDataParallel that adds up gradients: there are none that autograd would make."""

import weakref

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.errors import UnsupportedModelError

# Models whose clipped sums meet elsewhere, so that the wrapper has nothing to add up.
_ADDED_UP: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def sums_meet_elsewhere(model: nn.Module, *, shared: bool) -> None:
    """Set whether the clipped sums of all ranks are added up where they are released."""
    (_ADDED_UP.add if shared else _ADDED_UP.discard)(model)


def quieten_wrapper(model: nn.Module) -> None:
    """Keep a DistributedDataParallel that is running the model from adding up gradients; called in a forward."""
    # Refused if nobody else adds up the ranks' clipped sums, or the wrapper cannot be told not to.
    wrapper = _torch.running_wrapper()
    if wrapper is None or not torch.is_grad_enabled():
        return
    if wrapper.static_graph:
        raise UnsupportedModelError(
            f"DistributedDataParallel(static_graph=True) around {type(model).__name__}: it adds up gradients after the "
            "first backward whatever it is told. Leave static_graph, or the wrapper, out."
        )
    if not wrapper.require_backward_grad_sync:
        return
    if model not in _ADDED_UP and wrapper.process_group.size() > 1:
        raise UnsupportedModelError(
            f"DistributedDataParallel around {type(model).__name__}: it waits for gradients that autograd never makes "
            "here, and nothing adds up the ranks' clipped sums. Leave the wrapper out and pass model, optimizer and "
            "loader to PrivacyEngine.make_private on every rank, or add up with ghostclip.distributed.SharedNoise."
        )
    # As in its no_sync(). It is read once the forward has ended.
    wrapper.require_backward_grad_sync = False
