"""`GradSampleModule`: stands for the user's model, and gives access to the clipper that is attached to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.errors import UnsupportedModelError
from ghostclip.facade.criterion import PrivateCriterion
from ghostclip.facade.deferred import Deferral
from ghostclip.facade.handle import ClipperHandle, attached_clipper
from ghostclip.graph.takeover import Takeover

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper

_log = logging.getLogger(__name__)
_PREFIX = "_module."
# Copies that were said to be ordinary models.
_TOLD: WeakSet[GradSampleModule] = WeakSet()


class GradSampleHooks(ClipperHandle):
    """Handle that `make_private(wrap_model=False)` returns instead of a model, and that ends the clipping."""

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        clipper: GhostClipper | None = None,
    ) -> None:
        del force_functorch
        self._module = m
        self.clipper = attached_clipper(
            m, clipper, strict=strict, batch_first=batch_first, loss_reduction=loss_reduction
        )


class GradSampleModule(ClipperHandle, nn.Module):
    """Stands for a model whose gradients are clipped per sample.

    Every attribute is the model's own (`config`, `generate`, `save_pretrained`, a submodule by its name), assignments
    reach the model, and `state_dict()` has the model's keys unchanged. States with Opacus's `_module.` prefix load too.
    A copy (as an exponential moving average makes one) or a pickle carries the model alone: its `clipper` is None.

    Without a clipper it makes one that leaves every sample's gradient in `p.grad_sample` and, until a private optimizer
    takes them over, in `p.grad` what autograd computes.

    Args:
        m: The model.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
        strict: Whether modules that `ModuleValidator` finds are refused at once; what cannot be clipped exactly is
            refused when it runs, whatever this says.
        force_functorch: Of no effect: per-sample gradients are the same however they are formed.
        clipper: The clipper attached to the model already; it says what the arguments above do.

    Example:
        >>> wrapped = ghostclip.GradSampleModule(model)
        >>> criterion(wrapped(x), y).backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([8, 8, 4])
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        clipper: GhostClipper | None = None,
    ) -> None:
        del force_functorch
        super().__init__()
        attached = attached_clipper(m, clipper, strict=strict, batch_first=batch_first, loss_reduction=loss_reduction)
        self.__dict__["clipper"] = attached
        self.__dict__["deferral"] = self.__dict__["around"] = self.__dict__["watch"] = None
        self.train(m.training)
        self.add_module("_module", m)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            *args: The model's own arguments.
            **kwargs: The model's own keyword arguments.

        Returns:
            What the model returns.
        """
        deferral = self.__dict__.get("deferral")
        if deferral is not None and deferral.defers(self):
            return deferral.output(args, kwargs)
        if self.clipper is None and self.training and torch.is_grad_enabled() and self not in _TOLD:
            _TOLD.add(self)
            _log.warning(
                "a copy of a private %s is an ordinary model: no clipper is attached to it, and what trains it is not "
                "private",
                type(self._module).__name__,
            )
        watch = self.__dict__.get("watch")
        with nullcontext() if watch is None else watch(), self._around():
            return self._module(*args, **kwargs)

    def _around(self) -> AbstractContextManager[None]:
        """Return the context that a private forward runs in."""
        around = self.__dict__.get("around")
        clips = self.clipper is not None and self.clipper.attached and self.training and torch.is_grad_enabled()
        return around() if around is not None and clips else nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step, per-sample gradients included.

        Args:
            set_to_none: Whether gradients become None or zeros, as in torch.
        """
        self._module.zero_grad(set_to_none)
        for p in self._module.parameters():
            if getattr(p, "grad_sample", None) is not None:
                p.grad_sample = None

    @property
    def compile(self) -> Any:
        """The model's own `compile`: it runs as it is while the clipper is attached, and compiled without."""
        return self._module.compile

    def to_standard_module(self) -> nn.Module:
        """Detach the clipper and return the model as it was.

        Returns:
            The model.
        """
        self.remove_hooks()
        return self._module

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state under the model's own keys.

        Args:
            destination: Where to add it, as torch takes it.
            prefix: What every key begins with.
            keep_vars: Whether tensors stay attached to the graph.

        Returns:
            The state.
        """
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a state with the model's own keys, or with Opacus's `_module.` prefix.

        Args:
            state_dict: The state.
            strict: Whether missing or unexpected keys are an error.
            assign: Whether tensors are taken over instead of copied into.

        Returns:
            Missing and unexpected keys, as torch returns them.
        """
        own = {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}
        return self._module.load_state_dict(own, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        """Look up on the model the attributes that the facade lacks."""
        module = _torch.child_of(self, "_module")
        if module is None:
            raise AttributeError(name)
        return module if name == "_module" else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model; a layer or parameter set here would neither be run nor clipped."""
        # What wraps a method of the facade (a `forward` under autocast, a compiled call) stays with the facade: on the
        # model it would call itself.
        if name == "__class__":
            raise UnsupportedModelError(
                f"{value.__name__} in place of a private model's class: a model is divided (fully_shard) before its "
                "optimizer is made. Divide the model, build the optimizer from its parameters, then call make_private."
            )
        own = name in self.__dict__ or name == "training" or _is_method(type(self), name)
        if own or getattr(value, "__self__", None) is self or _torch.child_of(self, "_module") is None:
            super().__setattr__(name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __getstate__(self) -> dict[str, Any]:
        """Leave the clipper out of copies and pickles: a second model must not write into the first one's sums."""
        return {**super().__getstate__(), "clipper": None, "deferral": None, "around": None, "watch": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _is_method(kind: type, name: str) -> bool:
    """Return whether a class defines a name itself, as anything but a property."""
    return hasattr(kind, name) and not isinstance(getattr(kind, name), property)


def _with_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put our keys where torch looks for them when the module is part of another one."""
    inside = prefix + _PREFIX
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(inside)]:
        state_dict[inside + key[len(prefix) :]] = state_dict.pop(key)


def defer(module: GradSampleModule, criterion: PrivateCriterion, takeover: Takeover) -> None:
    """Let a private model and its criterion compute forward, loss and backward as one graph, once that takes over."""
    assert module.clipper is not None
    module.__dict__["deferral"] = criterion.deferral = Deferral(module.clipper, criterion, takeover)


def run_in(module: GradSampleModule, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Let every private forward of a model run in a context; its other forwards do not."""
    module.__dict__["around"] = around


def watch_forwards(module: GradSampleModule, watch: Callable[[], AbstractContextManager[None]]) -> None:
    """Let every forward of a model run in a context that sees its errors."""
    module.__dict__["watch"] = watch
