"""Optimizers that step on a private model's parameters past the private optimizer, and gradients put into `p.grad`.

Clipped sums stay with the engine until they are released, so another optimizer finds nothing to apply: its parameters
would never train, and a private optimizer that is never stepped would never release. Both are refused at the step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ghostclip.errors import TamperedGradientError, UncoveredParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ghostclip.optimizers.dp_optimizer import DPOptimizer

_WATCHING: weakref.WeakSet[DPOptimizer] = weakref.WeakSet()
_HOOK: list[RemovableHandle] = []


def watch_other_optimizers(private: DPOptimizer) -> None:
    """Refuse, from now on, steps of other optimizers over the parameters that a private optimizer's clipper clips.

    Args:
        private: The private optimizer; watched for as long as it lives and its clipper is attached.
    """
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_before_step))
    _WATCHING.add(private)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch calls this before each step of each optimizer of the process."""
    del args, kwargs
    for private in list(_WATCHING):
        if not private.clipper.attached:
            _WATCHING.discard(private)
        elif private.owns(optimizer):
            if not private.is_applying and private.clipper.has_clipped_sum:
                raise UncoveredParameterError(
                    f"{type(optimizer).__name__}.step(): this is the optimizer that was made private. Its gradients "
                    "are clipped sums that wait for their noise: call step() on the optimizer that make_private() "
                    "returned."
                )
        else:
            _refuse_strange_step(private, optimizer)


def _refuse_strange_step(private: DPOptimizer, optimizer: Optimizer) -> None:
    """Refuse the step of an optimizer whose parameters get their gradients from a private one, or none at all."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    clipped = {id(p) for p in private.clipper.trainable_parameters()} & held
    if not clipped:
        return
    released = {id(p) for p in private.params}
    if clipped <= released and not private.clipper.has_clipped_sum:
        # It applies a release once more.
        return
    raise UncoveredParameterError(
        f"{type(optimizer).__name__}.step(): {len(clipped)} of its parameters belong to a private model whose "
        "gradients another optimizer releases. Make all of them private together: "
        "make_private(optimizer=[first, second], ...) gives back as many, with one release for all."
    )


class Releases:
    """The gradients that a private optimizer has put into `p.grad`, so that strange ones are known."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._ours: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        # What an ordinary training has left there is dropped, as a loop would by `zero_grad()`.
        self.note([(p, p.grad) for p in parameters if p.grad is not None])

    def note(self, released: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Remember what was put into `p.grad`.

        Args:
            released: Parameters and their gradients.
        """
        self._ours = {p: weakref.ref(gradient) for p, gradient in released}

    def refuse_strangers(self, private: DPOptimizer) -> None:
        """Refuse gradients that somebody else has put into `p.grad`, which the release would overwrite.

        Args:
            private: Is about to release.

        Raises:
            TamperedGradientError: If there is one.
        """
        for p in private.params:
            grad = p.grad
            if grad is None or not p.requires_grad:
                continue
            ours = self._ours.get(p)
            if ours is None or ours() is not grad:
                raise TamperedGradientError(
                    f"parameter '{private.name_of(p)}': its gradient was set between backward and step. The clipped "
                    "sum stays with the private optimizer until noise is in it, and what is put into p.grad before "
                    "would be lost: add penalties to each sample's loss, use weight_decay, or change the released "
                    "gradient in a hook (optimizer.register_step_pre_hook)."
                )
