"""Optimizers that step on a private model's parameters past the private optimizer, and gradients put into `p.grad`.

Clipped sums stay with the engine until they are released, so another optimizer finds nothing to apply: its parameters
would never train, and a private optimizer that is never stepped would never release. Both are refused at the step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ghostclip.errors import InvalidOptionError, TamperedGradientError, UncoveredParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ghostclip.clipper import GhostClipper
    from ghostclip.optim.wrapped import WrappedOptimizer


# Who releases the sums of a clipper.
_RELEASED_BY: weakref.WeakKeyDictionary[GhostClipper, weakref.ref[WrappedOptimizer]] = weakref.WeakKeyDictionary()
_HOOK: list[RemovableHandle] = []


def watch_other_optimizers(private: WrappedOptimizer) -> None:
    """Refuse, from now on, steps of other optimizers over the parameters that a private optimizer's clipper clips."""
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_before_step))
    _RELEASED_BY[private.clipper] = weakref.ref(private)


def refuse_second_optimizer(clipper: GhostClipper, optimizer: Optimizer) -> None:
    """Refuse to make a model private for another optimizer that lacks parameters of the present one."""
    released_by = _RELEASED_BY.get(clipper)
    private = None if released_by is None else released_by()
    if private is None or not clipper.attached:
        return
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [p for p in private.params if p.requires_grad and id(p) not in optimized]
    if left_out:
        raise InvalidOptionError(
            f"optimizer {type(optimizer).__name__}: this model was made private for another optimizer, which holds "
            f"{len(left_out)} parameters that this one does not. Make all of them private at once, "
            "make_private(optimizer=[first, second], ...), or call remove_hooks() on the private model first."
        )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch calls this before each step of each optimizer of the process."""
    del args, kwargs
    for clipper, released_by in list(_RELEASED_BY.items()):
        if not clipper.attached:
            continue
        private = released_by()
        if private is None or not private.owns(optimizer):
            _refuse_strange_step(clipper, private, optimizer)
        elif not (private.is_applying or _has_only_releases(clipper, optimizer)):
            raise UncoveredParameterError(
                f"{type(optimizer).__name__}.step(): this is the optimizer that was made private. Its gradients "
                "are clipped sums that wait for their noise: call step() on the optimizer that make_private() "
                "returned."
            )


def _refuse_strange_step(clipper: GhostClipper, private: WrappedOptimizer | None, optimizer: Optimizer) -> None:
    """Refuse the step of an optimizer whose parameters get their gradients from a private one, or from none."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    clipped = {id(p) for p in clipper.trainable_parameters()} & optimized
    if not clipped:
        return
    if private is None:
        raise UncoveredParameterError(
            f"{type(optimizer).__name__}.step(): {len(clipped)} of its parameters belong to a private model whose "
            "private optimizer is gone: nobody adds noise, and no gradient arrives. Step the optimizer that "
            "make_private() returned, or call remove_hooks() on the model to train it without privacy."
        )
    released = {id(p) for p in private.params}
    if clipped <= released and _has_only_releases(clipper, optimizer):
        # It applies a release once more.
        return
    raise UncoveredParameterError(
        f"{type(optimizer).__name__}.step(): {len(clipped)} of its parameters belong to a private model whose "
        "gradients another optimizer releases. Make all of them private together: "
        "make_private(optimizer=[first, second], ...) gives back as many, with one release for all."
    )


def _has_only_releases(clipper: GhostClipper, optimizer: Optimizer) -> bool:
    """Return whether a step past the private optimizer would apply a release: nothing waits, and there is one."""
    # Where there is none, a closure may be about to make clipped sums that this step would wait for in vain.
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return not clipper.has_clipped_sum and any(grad is not None for grad in grads)


class Releases:
    """The gradients that a private optimizer has put into `p.grad`, to recognise foreign ones."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._ours: dict[int, weakref.ref[torch.Tensor]] = {}
        # What an ordinary training has left there is dropped, as a loop would by `zero_grad()`.
        self.note([(p, p.grad) for p in parameters if p.grad is not None])

    def note(self, released: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Remember what was put into `p.grad`."""
        self._ours = {id(p): weakref.ref(gradient) for p, gradient in released}

    def refuse_strangers(self, private: WrappedOptimizer) -> None:
        """Refuse gradients that somebody else has put into `p.grad`, which the release would overwrite."""
        for p in private.params:
            grad = p.grad
            if grad is None or not p.requires_grad:
                continue
            ours = self._ours.get(id(p))
            if ours is None or ours() is not grad:
                raise TamperedGradientError(
                    f"parameter '{private.name_of(p)}': its gradient was set between backward and step. The clipped "
                    "sum stays with the private optimizer until noise is in it, and what is put into p.grad before "
                    "would be lost: add penalties to each sample's loss, use weight_decay, or change the released "
                    "gradient in a hook (optimizer.register_step_pre_hook)."
                )
