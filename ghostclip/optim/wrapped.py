"""Wrappers of a torch optimizer that schedulers, checkpoints and trainers take for one; and optimizers beside them.

One that is not wrapped may step on a private model's parameters past the private optimizer, and gradients be put into
`p.grad`. Clipped sums stay with the engine until they are released, so another optimizer finds nothing to apply: its
parameters would never train, and a private optimizer that is never stepped would never release. Both are refused at the
step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ghostclip.clipper import GhostClipper
from ghostclip.errors import CopyError, InvalidOptionError, TamperedGradientError, UncoveredParameterError
from ghostclip.optim.checks import refuse_uncovered

ACCOUNT_KEY: Final = "ghostclip_account"
"""Key under which a parameter group of a saved state holds the account of a private training."""


class CarriedAccount(Protocol):
    """Account that travels with an optimizer's state."""

    def text(self) -> str:
        """Return the account as a string."""

    def load(self, text: str | None, load_inner: Callable[[], object]) -> None:
        """Load the inner optimizer, and continue from what `text` returned, None where its state had none."""


_PARAMS: Final = itemgetter("params")


@torch.enable_grad()
def evaluated(closure: Callable[[], Any]) -> Any:
    """Return what the closure of a step returns, whatever the step itself forbids."""
    return closure()


def of_torch(optimizer: Any) -> Optimizer:
    """Return a torch optimizer; refuse anything else."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise InvalidOptionError(
        f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Build one from "
        "module.parameters()."
    )


def _of_wrapped(name: str) -> Any:
    """Return a property that reads and writes the wrapped optimizer's attribute."""

    def write(wrapper: WrappedOptimizer, value: Any) -> None:
        setattr(wrapper.original_optimizer, name, value)

    return property(attrgetter(f"original_optimizer.{name}"), write)


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose parameters, state and hooks all live in another one.

    `Optimizer.__init__` is not called on purpose: it would make second homes for them. What torch looks up on the
    wrapper (its own hook tables included) is found on the wrapped optimizer through `__getattr__`, so that, for
    instance, `register_step_pre_hook` runs right before the wrapped optimizer's update.

    Args:
        optimizer: The optimizer to wrap.

    Raises:
        InvalidOptionError: If it is not a torch optimizer.
    """

    account: CarriedAccount | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = of_torch(optimizer)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups, in order."""
        return list(chain.from_iterable(map(_PARAMS, self.original_optimizer.param_groups)))

    param_groups: Any = _of_wrapped("param_groups")
    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which a plain optimizer of its kind can load too, with the account.

        Privacy:
            The account's entry in the first parameter group holds the keys that noise and batches follow from: keep the
            state as secret as the data, or take them out with `ghostclip.privacy.optimizer_state.without_keys`.

        Returns:
            The state.
        """
        state = self.original_optimizer.state_dict()
        if self.account is not None and state["param_groups"]:
            state["param_groups"][0][ACCOUNT_KEY] = self.account.text()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; in a training of `PrivacyEngine` with the account and what noise and batches follow from.

        Args:
            state_dict: What `state_dict()` gave.

        Raises:
            ResumeError: If the state holds no account, or one of another mechanism or training; nothing is changed.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        texts = [group.pop(ACCOUNT_KEY, None) for group in groups]
        load = partial(self.original_optimizer.load_state_dict, {**state_dict, "param_groups": groups})
        if self.account is None:
            load()
        else:
            self.account.load(next((text for text in texts if text is not None), None), load)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, if its trainable parameters are clipped and are in no other group of the training.

        Args:
            param_group: As torch takes it.

        Raises:
            UncoveredParameterError: If a trainable parameter of the group is not clipped.
            InvalidOptionError: If the optimizer, or another of several, holds one of them.
        """
        params = param_group["params"]
        parameters: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        release: Any = getattr(self, "release", self)
        refuse_uncovered(release.clipper, parameters)
        if not set(map(id, release.params)).isdisjoint(map(id, parameters)):
            raise InvalidOptionError("add_param_group: the training's optimizer holds one of these parameters already.")
        self.original_optimizer.add_param_group({**param_group, "params": parameters})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse an enabled `torch.amp.GradScaler`, which reads this before it steps; the only place to stop it."""
        raise InvalidOptionError(
            "GradScaler multiplies the loss, so that gradients would be clipped at the wrong norm and unscaled outside "
            "the private step. Use torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False). "
            "Lightning's clip_gradients asks for the same in 16 bits: leave it out, max_grad_norm bounds each record."
        )

    def __getattr__(self, name: str) -> Any:
        """Look up a missing attribute on the wrapped optimizer."""
        if "original_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original_optimizer, name)

    def __getstate__(self) -> NoReturn:
        """Refuse copies and pickles: a second one would release from the same clipped sums."""
        raise CopyError(f"{type(self).__name__} cannot be copied or pickled. Save its state_dict() instead.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"


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
    """The noisy gradients that a private optimizer has put into `p.grad`, to tell others' gradients from them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._ours: dict[int, weakref.ref[torch.Tensor]] = {}
        # What an ordinary training has left there is dropped, as a loop would by `zero_grad()`.
        self.note([(p, p.grad) for p in parameters if p.grad is not None])

    def note(self, released: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Record the gradients that were put into `p.grad`."""
        self._ours = {id(p): weakref.ref(gradient) for p, gradient in released}

    def refuse_strangers(self, private: WrappedOptimizer) -> None:
        """Refuse a gradient in `p.grad` that is no release: the next release would overwrite it."""
        for p in private.params:
            ours = self._ours.get(id(p))
            if p.grad is not None and p.requires_grad and (ours is None or ours() is not p.grad):
                raise TamperedGradientError(
                    f"parameter '{private.name_of(p)}': its gradient was set between backward and step. The clipped "
                    "sum stays with the private optimizer until noise is in it, and what is put into p.grad before "
                    "would be lost: add penalties to each sample's loss, use weight_decay, or change the released "
                    "gradient in a hook (optimizer.register_step_pre_hook)."
                )
