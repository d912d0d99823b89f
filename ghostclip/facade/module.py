"""`GradSampleModule` stands for the user's model; it and its base give access to the clipper under Opacus's names.

Shape legend: B samples.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn, get_args
from weakref import WeakSet

import torch
from torch import nn

from ghostclip import _torch
from ghostclip._validate import defaults, did_you_mean, takes
from ghostclip.clipper import GhostClipper, Strategy
from ghostclip.errors import InvalidOptionError, UnsupportedError, UnsupportedModelError
from ghostclip.facade.criterion import Deferral
from ghostclip.rules import registry
from ghostclip.validation.fixers import ModuleValidator

_log = logging.getLogger(__name__)


SHARDED: Final = (
    "how a model is sharded over devices is no mode here. Shard it (fully_shard, parallelize_module), then choose a "
    "mode as on one device: grad_sample_mode='ghost' for two passes"
)
NO_OP: Final = (
    "it trains without clipping while the account goes on. Use the plain model and optimizer to compare with "
    "training without privacy"
)
REFUSED_MODES: Final = {"ghost_fsdp": SHARDED, "ghost_tp": SHARDED, "no_op": NO_OP}
"""Values of `grad_sample_mode` that are refused by name."""

_STRATEGY_OF: Final[dict[str, Strategy]] = {
    **{name: name for name in get_args(Strategy)},
    # Opacus's other ways to fill p.grad_sample; what is in it is the same.
    "functorch": "hooks",
    "ew": "hooks",
}
MODES: Final = tuple(_STRATEGY_OF)


def mode_of(grad_sample_mode: str, compile: bool | None) -> str:  # noqa: A002, FBT001 - torch's word
    """Return the mode that a choice about compiling stands for."""
    fits = {True: ("auto", "graph"), False: tuple(mode for mode in MODES if mode != "graph")}
    if compile is not None and grad_sample_mode in MODES and grad_sample_mode not in fits[compile]:
        raise InvalidOptionError(
            f'compile={compile} with grad_sample_mode={grad_sample_mode!r}: only "auto" leaves it open whether the '
            "step is compiled. Leave one of them out."
        )
    return "graph" if compile else grad_sample_mode


def strategy_of(grad_sample_mode: str) -> Strategy:
    """Return the strategy of a mode; Opacus's "functorch" and "ew" stand for "hooks"."""
    if grad_sample_mode in REFUSED_MODES:
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: {REFUSED_MODES[grad_sample_mode]}.")
    if grad_sample_mode not in _STRATEGY_OF:
        listed, meant = ", ".join(map(repr, MODES)), did_you_mean(grad_sample_mode, MODES, otherwise=".")
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: must be one of {listed}{meant}")
    return _STRATEGY_OF[grad_sample_mode]


# Those that a facade was made for, so that an optimizer finds the clipper of its parameters.
_IN_USE: weakref.WeakSet[GhostClipper] = weakref.WeakSet()


def clipper_of(parameters: Sequence[nn.Parameter]) -> GhostClipper:
    """Return the clipper whose facade has an optimizer's parameters."""
    wanted = {id(p) for p in parameters if p.requires_grad}
    for clipper in _IN_USE:
        if wanted & {id(p) for p in clipper.trainable_parameters()}:
            return clipper
    raise InvalidOptionError(
        "optimizer: no GradSampleModule holds its parameters, so nobody clips their gradients. Wrap the model first "
        "(GradSampleModule(model)), pass clipper=, or use PrivacyEngine.make_private."
    )


class ClipperHandle:
    """The part of a facade that is about clipping.

    Attributes:
        clipper: The clipper, or None in a copy of a facade.
        GRAD_SAMPLERS: Registered samplers of gradients by module class.
        NORM_SAMPLERS: Registered samplers of norms by module class.
    """

    clipper: GhostClipper | None
    _hooks_enabled = True
    GRAD_SAMPLERS = registry.GRAD_SAMPLERS
    NORM_SAMPLERS = registry.NORM_SAMPLERS

    @property
    def batch_first(self) -> bool:
        """Whether the leading axis of the model's inputs is the batch; a copy, which has no clipper, does not say."""
        return self._attached().batch_first

    @property
    def loss_reduction(self) -> str:
        """The declared reduction of the loss, "mean" or "sum"; a copy, which has no clipper, does not say."""
        return self._attached().loss_reduction

    @property
    def max_grad_norm(self) -> float:
        """C, which the clip policy holds."""
        return self._attached().policy.max_grad_norm

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """Norm of every sample's whole gradient in the last backward, `[B]`. Not private."""
        return self._attached().per_sample_norms

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped."""
        return list(self._attached().trainable_parameters())

    @property
    def hooks_enabled(self) -> bool:
        """What `disable_hooks()` or `enable_hooks()` has said last; gradients are clipped until `remove_hooks()`."""
        return self._hooks_enabled and self.clipper is not None and self.clipper.attached

    def get_norm_sample(self) -> torch.Tensor:
        """Return the norms of the last backward.

        Returns:
            Shape `[B]`. Not private.
        """
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> torch.Tensor:
        """Return the share that the last backward kept of every sample's gradient.

        Returns:
            Shape `[B]`, or `[B, groups]`. Not private.
        """
        return self._attached().clip_coefficients

    def remove_hooks(self) -> None:
        """Detach the clipper from the model."""
        if self.clipper is not None:
            _IN_USE.discard(self.clipper)
            self.clipper.remove()

    cleanup = remove_hooks

    def set_grad_sample_to_none(self) -> None:
        """Drop the per-sample gradients of the last backward; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            p.grad_sample = None  # type: ignore[attr-defined]

    def del_grad_sample(self) -> None:
        """Take the attribute `grad_sample` off the parameters; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def allow_grad_accumulation(self) -> None:
        """Nothing to allow: several backwards before a step are always possible, and accounted as what they are."""

    def forbid_grad_accumulation(self) -> None:
        """Nothing to forbid: k backwards before a step are accounted as what they are, and warned of."""

    def disable_hooks(self) -> None:
        """Warn that nothing is switched off; `hooks_enabled` is False from now on.

        Privacy:
            A gradient that is not clipped per sample never reaches a parameter while the model is private.
        """
        warnings.warn(
            "disable_hooks(): nothing is switched off. Evaluation and gradients of inputs leave no state; a backward "
            "to parameters is still clipped and counts. For gradients that are not private use to_standard_module(), "
            "or a copy of the model.",
            stacklevel=2,
        )
        self.__dict__["_hooks_enabled"] = False

    def enable_hooks(self) -> None:
        """Let `hooks_enabled` be True again; see `disable_hooks`."""
        self.__dict__["_hooks_enabled"] = True

    def add_hooks(self, *, strict: bool = True, force_functorch: bool = False) -> NoReturn:
        """Refuse to attach again: an optimizer holds on to the clipper that it was made with.

        Args:
            strict: As Opacus takes it.
            force_functorch: As Opacus takes it.

        Raises:
            InvalidOptionError: Always.
        """
        raise InvalidOptionError(
            "add_hooks(): a clipper is attached once, when the model is wrapped. After remove_hooks() make the model "
            "private again: engine.make_private, or GradSampleModule(model)."
        )

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Say whether a module can be clipped as far as its class tells.

        Args:
            module: The module.

        Returns:
            False for one that mixes samples.
        """
        return not cls.validate(module)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """Check a model for modules that mix samples; see `ghostclip.validate` for a check that runs it.

        Args:
            module: The model.
            strict: Raise what was found instead of returning it.

        Returns:
            One error for each module that cannot be trained privately.
        """
        return ModuleValidator.validate(module, strict=strict)

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """List the modules that own trainable parameters.

        Args:
            module: The model.

        Yields:
            The modules.
        """
        for part in module.modules():
            if any(p.requires_grad for p in part.parameters(recurse=False)):
                yield part

    def _attached(self) -> GhostClipper:
        if self.clipper is None:
            # A copy of a facade is the model alone, which has no such attribute.
            raise AttributeError("batch_first, loss_reduction and clipping belong to the original, not to a copy of it")
        return self.clipper


# Options of a clipper that a facade makes; `force_functorch` has no effect.
_WRAPPING: Final = defaults({"batch_first": True, "loss_reduction": "mean", "strict": True, "force_functorch": False})


def attached_clipper(
    m: nn.Module, options: dict[str, Any], *, strategy: Strategy = "hooks", max_grad_norm: float | None = None
) -> GhostClipper:
    """Attach a clipper; without a bound it clips nothing yet, or by 1 in two passes, and leaves plain gradients."""
    if options["strict"]:
        ModuleValidator.validate(m, strict=True)
    bound = math.inf if strategy in ("hooks", "auto", "bookkeeping") else 1.0
    clipper = GhostClipper(
        m, max_grad_norm=bound if max_grad_norm is None else max_grad_norm, strategy=strategy,
        batch_first=options["batch_first"], loss_reduction=options["loss_reduction"],
    )  # fmt: skip
    if max_grad_norm is None:
        clipper.leave_plain_gradients()
    return clipper


_PREFIX = "_module."
# Copies that were said to be ordinary models.
_TOLD: WeakSet[GradSampleModule] = WeakSet()


class GradSampleHooks(ClipperHandle):
    """Handle that `make_private(wrap_model=False)` returns instead of a model, and that ends the clipping."""

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, clipper: GhostClipper | None = None, options: dict[str, Any]) -> None:
        self._module = m
        self.clipper = clipper or attached_clipper(m, options)
        _IN_USE.add(self.clipper)


class GradSampleModule(ClipperHandle, nn.Module):
    """Stands for a model whose gradients are clipped per sample.

    Every attribute is the model's own (`config`, `generate`, `save_pretrained`, a submodule by its name), assignments
    reach the model, and `state_dict()` has the model's keys unchanged. States with Opacus's `_module.` prefix load too.
    A copy (as an exponential moving average makes one) or a pickle carries the model alone: its `clipper` is None.

    Without a clipper it makes one that leaves every sample's gradient in `p.grad_sample` and, until a private optimizer
    takes them over, in `p.grad` what autograd computes.

    Args:
        m: The model.
        clipper: The clipper attached to the model already; it says what the options do.
        options: `batch_first`, whether the leading axis of the model's inputs is the batch; `loss_reduction`, "mean" or
            "sum", as the loss is reduced over the batch; `strict`, whether modules that `ModuleValidator` finds are
            refused at once (what cannot be clipped exactly is refused when it runs, whatever this says);
            `force_functorch`, of no effect: per-sample gradients are the same however they are formed.

    Example:
        >>> wrapped = ghostclip.GradSampleModule(model)
        >>> criterion(wrapped(x), y).backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([8, 8, 4])
    """

    # A context of every private forward, one of every forward, which sees its errors, and what lets the model and its
    # criterion compute forward, loss and backward as one graph, once that takes over.
    around: Callable[[], AbstractContextManager[None]] | None
    watch: Callable[[], AbstractContextManager[None]] | None
    deferral: Deferral | None

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, clipper: GhostClipper | None = None, options: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["clipper"] = attached = clipper or attached_clipper(m, options)
        _IN_USE.add(attached)
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
        if self.deferral is not None and self.deferral.defers(self):
            return self.deferral.output(args, kwargs)
        if self.clipper is None and self.training and torch.is_grad_enabled() and self not in _TOLD:
            _TOLD.add(self)
            _log.warning(
                "a copy of a private %s is an ordinary model: no clipper is attached to it, and what trains it is not "
                "private",
                type(self._module).__name__,
            )
        clips = self.clipper is not None and self.clipper.attached and self.training and torch.is_grad_enabled()
        around = self.around if clips else None
        with (self.watch or nullcontext)(), (around or nullcontext)():
            return self._module(*args, **kwargs)

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
        state = {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}
        return self._module.load_state_dict(state, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        """Look up on the model the attributes that the facade lacks."""
        module = _torch.child_of(self, "_module")
        if module is None:
            raise AttributeError(name)
        return module if name == "_module" else getattr(module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return a part of a model that is a container of modules."""
        return self._module[key]

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model; a layer or parameter set here would neither be run nor clipped."""
        # What wraps a method of the facade (a `forward` under autocast, a compiled call) stays with the facade: on the
        # model it would call itself.
        if name == "__class__":
            raise UnsupportedModelError(
                f"{value.__name__} in place of a private model's class: a model is divided (fully_shard) before its "
                "optimizer is made. Divide the model, build the optimizer from its parameters, then call make_private."
            )
        on_facade = name in self.__dict__ or name == "training" or _is_method(type(self), name)
        if on_facade or getattr(value, "__self__", None) is self or _torch.child_of(self, "_module") is None:
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
