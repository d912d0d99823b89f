"""What scripts for Opacus put together by hand: facades, optimizers and losses, on the library's one clipper.

Opacus's optimizers and modules are names for `DPOptimizer` and the facades with another clip policy, noise source or
strategy. `isinstance` asks what an object does: what `make_private` returned is an instance of the names that fit it.

Three ways for a value to change from epoch to epoch, each for the noise multiplier and for the clip bound.
"""

# ruff: noqa: FBT001, FBT002 - positional arguments are Opacus's

from __future__ import annotations

import abc
import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer

from ghostclip import DPOptimizer, GhostClipper, GradSampleModule, PrivacyEngine, _validate
from ghostclip._validate import choice, defaults, options_of, takes
from ghostclip.assembly import Private, PrivateWithCriterion, Request
from ghostclip.capture.ranks import set_sums_added_elsewhere
from ghostclip.clipping import policies
from ghostclip.clipping.bounds import PerParameter, QuantileAdaptation
from ghostclip.distributed import SharedNoise
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.facade import (
    ClipperHandle,
    GradSampleHooks,
    PrivateCriterion,
    PrivateLoss,
    attached_clipper,
    clipper_of,
    strategy_of,
)
from ghostclip.noise import make_noise_source
from ghostclip.optim import release_of
from ghostclip.optim.dp_optimizer import private_optimizer
from ghostclip.options import Options, clip_policy
from ghostclip.privacy.budget import Budget


class Schedule(abc.ABC):
    """Sets one value of a private optimizer after every epoch (or whatever `step()` is called after)."""

    attribute = ""

    # As in torch's schedulers, `last_epoch` is -1 at the beginning; the optimizer's present value is that of this
    # epoch, and the next one's is set at once.
    def __init__(self, optimizer: DPOptimizer, *, last_epoch: int = -1) -> None:
        optimizer = private_optimizer(optimizer)
        if self.attribute == "max_grad_norm" and optimizer.clipper.policy.adaptation is not None:
            raise InvalidOptionError("optimizer with clipping='adaptive': its bound moves by itself; use no schedule.")
        self.optimizer = optimizer
        optimizer.scheduled.add(self.attribute)
        self.last_epoch = last_epoch
        self.step()

    @abc.abstractmethod
    def next_value(self, current: float) -> float:
        """Return the value for epoch `last_epoch`, from that of the epoch before."""

    def step(self) -> None:
        """Go on to the next epoch; nothing changes where that is refused."""
        self.last_epoch += 1
        try:
            setattr(self.optimizer, self.attribute, self.next_value(getattr(self.optimizer, self.attribute)))
        except BaseException:
            self.last_epoch -= 1
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the value in force and the schedule's own numbers; functions are left out."""
        numbers = {name: value for name, value in vars(self).items() if name != "optimizer" and not callable(value)}
        return {**numbers, "value": getattr(self.optimizer, self.attribute)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, and set the optimizer's value."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ResumeError(f"schedule state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        setattr(self.optimizer, self.attribute, state["value"])
        for name in self.state_dict().keys() - {"value"}:
            setattr(self, name, state[name])


class _Exponential(Schedule):
    """Multiplies the value by γ every `step_size` epochs, here every one."""

    step_size = 1

    def __init__(self, optimizer: DPOptimizer, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = _validate.positive(gamma, "gamma")
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self, current: float) -> float:
        changes = self.last_epoch != 0 and self.last_epoch % self.step_size == 0
        return self.gamma * current if changes else current


class _Step(_Exponential):
    """Multiplies the value by γ every `step_size` epochs."""

    def __init__(self, optimizer: DPOptimizer, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        self.step_size = _validate.positive_int(step_size, "step_size")
        super().__init__(optimizer, gamma=gamma, last_epoch=last_epoch)


class _Lambda(Schedule):
    """Multiplies the first value by a function of the epoch; factors do not accumulate."""

    def __init__(self, optimizer: DPOptimizer, *, function: Callable[[int], float], last_epoch: int = -1) -> None:
        self._function = function
        self.base_value = float(getattr(optimizer, self.attribute, 0.0))
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self, current: float) -> float:
        del current
        return self.base_value * self._function(self.last_epoch)


class ExponentialNoise(_Exponential):
    """Multiplies the noise multiplier by γ every epoch; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"


class StepNoise(_Step):
    """Multiplies the noise multiplier by γ every `step_size` epochs; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"


class LambdaNoise(_Lambda):
    """Multiplies the first noise multiplier by a function of the epoch; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"

    def __init__(self, optimizer: DPOptimizer, *, noise_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        super().__init__(optimizer, function=noise_lambda, last_epoch=last_epoch)


class ExponentialGradClip(_Exponential):
    """Multiplies the clip bound (of all groups) by γ every epoch; the noise follows the bound."""

    attribute = "max_grad_norm"


class StepGradClip(_Step):
    """Multiplies the clip bound (of all groups) by γ every `step_size` epochs; the noise follows the bound."""

    attribute = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """Multiplies the first clip bound (of all groups) by a function of the epoch; the noise follows the bound."""

    attribute = "max_grad_norm"

    def __init__(
        self, optimizer: DPOptimizer, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, function=scheduler_function, last_epoch=last_epoch)


class Described(type):
    """Metaclass of a name for a part of its base's instances: those of which `describes` says so, however made."""

    def __instancecheck__(cls, instance: Any) -> bool:
        describes = vars(cls).get("describes")
        if describes is None:
            return type.__instancecheck__(cls, instance)
        return type.__instancecheck__(cls.__mro__[1], instance) and bool(describes(instance))


# ---------------------------------------------------------------- facades

_WRAPPING = options_of(GradSampleModule, "batch_first", "loss_reduction", "strict", "force_functorch")


def _attached(m: nn.Module, strategy: Any, bound: float | None, wrap: dict) -> GhostClipper:
    clipper = attached_clipper(m, wrap, strategy=strategy, max_grad_norm=bound)
    for parameter in clipper.trainable_parameters():
        # Scripts ask for it in every mode.
        parameter.grad_sample = None  # type: ignore[attr-defined]
    return clipper


def _takes_two_passes(facade: ClipperHandle) -> bool:
    return facade.clipper is not None and facade.clipper.strategy in ("ghost", "fast")


class GradSampleModuleFastGradientClipping(GradSampleModule, metaclass=Described):
    """A `GradSampleModule` whose clipper takes two backwards; train it with `DPLossFastGradientClipping`.

    Args:
        m: The model.
        max_grad_norm: C.
        use_ghost_clipping: Norms without per-sample gradients ("ghost"), or with those of one layer at a time ("fast").
        wrap: As for `GradSampleModule`.
    """

    describes = staticmethod(_takes_two_passes)

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, max_grad_norm: float = 1, use_ghost_clipping: bool = True, wrap: dict) -> None:
        super().__init__(m, clipper=_attached(m, "ghost" if use_ghost_clipping else "fast", max_grad_norm, wrap))


class GradSampleHooksFastGradientClipping(GradSampleHooks, metaclass=Described):
    """As `GradSampleModuleFastGradientClipping`, without wrapping the model.

    Args:
        m: The model.
        max_grad_norm: C.
        use_ghost_clipping: "ghost" or "fast".
        wrap: As for `GradSampleModule`.
    """

    describes = staticmethod(_takes_two_passes)

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, max_grad_norm: float = 1, use_ghost_clipping: bool = True, wrap: dict) -> None:
        super().__init__(m, clipper=_attached(m, "ghost" if use_ghost_clipping else "fast", max_grad_norm, wrap))


@takes(*_WRAPPING)
def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *, max_grad_norm: float | None = None, wrap: dict
) -> GradSampleModule | GradSampleHooks:
    """Attach a clipper to a model and return what stands for it.

    Args:
        model: The model.
        grad_sample_mode: A strategy, or one of Opacus's names for them.
        wrap_model: False returns a handle and leaves the model to the user.
        max_grad_norm: C; by default an optimizer sets it, and 1 is the bound of "ghost" until then.
        wrap: As for `GradSampleModule`.

    Returns:
        The facade, or the handle.

    Raises:
        InvalidOptionError: If the mode is unknown or refused.
        UnsupportedModuleError: With ``strict``, if there are modules that mix samples.
    """
    clipper = _attached(model, strategy_of(grad_sample_mode), max_grad_norm, wrap)
    return (GradSampleModule if wrap_model else GradSampleHooks)(model, clipper=clipper)


def get_gsm_class(grad_sample_mode: str) -> Callable[..., Any]:
    """Return what wraps a model in a mode: "hooks", "functorch", "ew" or "ghost"; there is no class for others."""
    return _class_of(grad_sample_mode, GradSampleModule, GradSampleModuleFastGradientClipping)


def get_hooks_class(grad_sample_mode: str) -> Callable[..., Any]:
    """Return what attaches to a model in a mode without wrapping it; see `get_gsm_class`."""
    return _class_of(grad_sample_mode, GradSampleHooks, GradSampleHooksFastGradientClipping)


def _class_of(grad_sample_mode: str, hooks: Callable[..., Any], ghost: Callable[..., Any]) -> Callable[..., Any]:
    strategy = strategy_of(grad_sample_mode)
    if strategy not in ("hooks", "ghost"):
        raise InvalidOptionError(
            f"grad_sample_mode={grad_sample_mode!r}: has no class of its own; use prepare_module(model, mode)."
        )
    return ghost if strategy == "ghost" else hooks


def make_functional(mod: nn.Module, disable_autograd_tracking: bool = False) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a module as a function of its parameters, and the parameters, for `torch.func`.

    Args:
        mod: The module, private or not; the function runs a copy without a clipper.
        disable_autograd_tracking: Detach the parameters that are returned.

    Returns:
        `function(parameters, *inputs)`, and the parameters in the order of `mod.named_parameters()`.

    Privacy:
        Gradients of the function are not clipped.
    """
    module = mod._module if isinstance(mod, GradSampleModule) else mod
    stateless, named = copy.deepcopy(module), dict(module.named_parameters())

    def function(parameters: Sequence[torch.Tensor], *inputs: Any) -> Any:
        return functional_call(stateless, dict(zip(named, parameters, strict=True)), inputs)

    return function, tuple(p.detach() if disable_autograd_tracking else p for p in named.values())


# ---------------------------------------------------------------- optimizers

_RELEASE = options_of(
    DPOptimizer, "noise_multiplier", "expected_batch_size", "loss_reduction", "generator", "secure_mode"
)
_ADAPTATION = list(inspect.signature(QuantileAdaptation).parameters)


def _clipper(optimizer: Optimizer) -> GhostClipper:
    return clipper_of([p for group in optimizer.param_groups for p in group["params"]])


class DPPerLayerOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer that clips every parameter's gradient by itself.

    Args:
        optimizer: The optimizer over the parameters of a `GradSampleModule`.
        max_grad_norm: One bound C_l for each trainable parameter, in the model's order; σ is in units of √(Σ_l C_l²).
        release: As for `DPOptimizer`.
    """

    describes = staticmethod(lambda optimizer: isinstance(optimizer.clipper.policy.grouping, PerParameter))

    @takes(*_RELEASE)
    def __init__(self, optimizer: Optimizer, *, max_grad_norm: Sequence[float], release: dict) -> None:
        _clipper(optimizer).policy = policies.per_layer(max_grad_norm)
        super().__init__(optimizer, **release)


class AdaClipDPOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer whose bound follows a quantile of the norms.

    Args:
        optimizer: The optimizer over the parameters of a `GradSampleModule`.
        max_grad_norm: C of the first step.
        options: As for `QuantileAdaptation` and `DPOptimizer`; σ is that of a step, noisy count included.
    """

    describes = staticmethod(lambda optimizer: optimizer.clipper.policy.adaptation is not None)

    @takes(*options_of(QuantileAdaptation, *_ADAPTATION, required=True), *_RELEASE)
    def __init__(self, optimizer: Optimizer, *, max_grad_norm: float, options: dict) -> None:
        adaptation = QuantileAdaptation(**{name: options.pop(name) for name in _ADAPTATION})
        _clipper(optimizer).policy = policies.adaptive(max_grad_norm, adaptation)
        super().__init__(optimizer, **options)


class DistributedDPOptimizer(DPOptimizer, metaclass=Described):
    """A private optimizer that adds up the ranks' clipped sums and adds noise once.

    Privacy:
        A record must be in one rank's part of a logical batch only, as `DPDataLoader` and
        `DistributedUniformWithReplacementSampler` see to.

    Args:
        optimizer: Each rank's optimizer over the parameters of its `GradSampleModule`; called on all ranks.
        max_grad_norm: C, or one bound for each trainable parameter.
        release: As for `DPOptimizer`; of the step of all ranks together.

    Raises:
        InvalidOptionError: If torch.distributed is not running.
    """

    describes = staticmethod(lambda optimizer: isinstance(optimizer.noise_source, SharedNoise))

    @takes(*_RELEASE)
    def __init__(self, optimizer: Optimizer, *, max_grad_norm: float | Sequence[float], release: dict) -> None:
        level = "secure" if release.pop("secure_mode") else "fast"
        source = make_noise_source(level=level, generator=release.pop("generator"))
        policy = policies.per_layer if isinstance(max_grad_norm, Sequence) else policies.ClipPolicy
        _clipper(optimizer).policy = policy(max_grad_norm)
        set_sums_added_elsewhere(_clipper(optimizer).model, shared=True)
        super().__init__(optimizer, noise_source=SharedNoise(source), **release)


def get_optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str | None = None) -> type[DPOptimizer]:
    """Return what makes a private optimizer; clipping works with every mode here.

    Args:
        clipping: "flat", "per_layer" or "adaptive".
        distributed: Whether several ranks train together.
        grad_sample_mode: Only checked.

    Returns:
        `DPOptimizer`, or a name for one.

    Raises:
        InvalidOptionError: If there is none for the combination.
    """
    if grad_sample_mode is not None:
        strategy_of(grad_sample_mode)
    by_clipping = {"flat": DPOptimizer, "per_layer": DPPerLayerOptimizer, "adaptive": AdaClipDPOptimizer}
    choice(clipping, "clipping", tuple(by_clipping))
    if distributed and clipping == "adaptive":
        raise InvalidOptionError(
            f"clipping={clipping!r} with distributed={distributed}: use PrivacyEngine.make_private, which shares the "
            "loader's batches and the noise among ranks."
        )
    return DistributedDPOptimizer if distributed else by_clipping[clipping]


# ---------------------------------------------------------------- losses of two passes


class DPLossFastGradientClipping(PrivateCriterion, metaclass=Described):
    """A criterion whose `loss.backward()` clips every sample's gradient; every private criterion is one.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        criterion: The loss function.
        loss_reduction: As the facade was told.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """

    describes = staticmethod(lambda criterion: True)

    def __init__(self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean") -> None:
        super().__init__(common_clipper(module, optimizer, loss_reduction), criterion)


class DPTensorFastGradientClipping(PrivateLoss, metaclass=Described):
    """The losses of a batch as one loss, whose `backward()` clips every sample's gradient; every private loss is one.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        loss_per_sample: The losses, `[B]`.
        loss_reduction: As the facade was told.

    Raises:
        InvalidOptionError: If the three do not belong together.
    """

    describes = staticmethod(lambda loss: True)

    def __init__(
        self, module: Any, optimizer: Any, loss_per_sample: torch.Tensor, loss_reduction: str = "mean"
    ) -> None:
        super().__init__(common_clipper(module, optimizer, loss_reduction), loss_per_sample)


def common_clipper(module: Any, optimizer: Any, loss_reduction: str) -> GhostClipper:
    """Return the clipper that a facade and a private optimizer share; refuse two that do not belong together."""
    if not isinstance(module, ClipperHandle):
        raise InvalidOptionError(
            f"module {type(module).__name__}: not wrapped. Give what make_private() returned in its place, or "
            "GradSampleModuleFastGradientClipping(module)."
        )
    optimizer = release_of(optimizer)
    if not isinstance(optimizer, DPOptimizer):
        raise InvalidOptionError(
            f"optimizer {type(optimizer).__name__}: not private. Give what make_private() returned in its place, or "
            "DPOptimizerFastGradientClipping(optimizer, ...)."
        )
    if optimizer.clipper is not module.clipper:
        raise InvalidOptionError(
            "optimizer: it is not the private optimizer of this module. Make it from the module's parameters after the "
            "module was wrapped."
        )
    declared = optimizer.clipper.loss_reduction
    if choice(loss_reduction, "loss_reduction", ("mean", "sum")) != declared:
        raise InvalidOptionError(f"loss_reduction={loss_reduction!r}: the module was told {declared!r}; use one.")
    return optimizer.clipper


_FOLLOWING = (
    *defaults({"target_unclipped_quantile": 0.5, "min_clipbound": 1.0, "max_clipbound": 1e8}),
    *defaults({"clipbound_learning_rate": 0.2, "initial_noise_multiplier": 1.0}),
)


def _adapt(optimizer: Any, asked: dict) -> None:
    """Let the optimizer's bound follow the quantile, unless it does already: then it stays where it has got to."""
    del asked["initial_noise_multiplier"]
    adaptation = optimizer.clipper.policy.adaptation
    if adaptation is not None and asked.items() <= adaptation.describe().items():
        return
    if optimizer.expected_batch_size is None:
        raise InvalidOptionError(
            "optimizer with expected_batch_size=None: an adaptive clip bound divides its count by it."
        )
    bound = optimizer.max_grad_norm
    options = Options(clipping="adaptive", max_grad_norm=bound, **asked)
    optimizer.clipper.policy = clip_policy(
        options, expected_batch_size=optimizer.expected_batch_size, noise_multiplier=optimizer.noise_multiplier
    )


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """Lets the bound adapt, and returns a criterion whose `loss.backward()` clips every sample's gradient.

    Privacy:
        The private optimizer moves the bound in its step, from a noisy count that is a part of the step's release, so
        that σ is the whole step's. The criterion itself releases nothing.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters; its C is the first one.
        criterion: The loss function.
        loss_reduction: As the facade was told.
        asked: As for `QuantileAdaptation`; `initial_noise_multiplier` has no effect: σ is the optimizer's.
    """

    @takes(*_FOLLOWING)
    def __init__(
        self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean", *, asked: dict
    ) -> None:
        super().__init__(module, optimizer, criterion, loss_reduction)
        _adapt(optimizer, asked)


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """Lets the bound adapt, and stands for the losses of a batch; see `DPLossFastGradientAdaptiveClipping`.

    Args:
        module: The facade of the model.
        optimizer: The private optimizer over its parameters.
        loss_per_sample: The losses, `[B]`.
        loss_reduction: As the facade was told.
        asked: As for `QuantileAdaptation`.
    """

    @takes(*_FOLLOWING)
    def __init__(
        self, module: Any, optimizer: Any, loss_per_sample: torch.Tensor, loss_reduction: str = "mean", *, asked: dict
    ) -> None:
        super().__init__(module, optimizer, loss_per_sample, loss_reduction)
        _adapt(optimizer, asked)


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """`PrivacyEngine` with `clipping="adaptive"` where `clipping` is not given.

    Privacy:
        The noisy count that moves the bound is part of each step's release, in every strategy; σ is the whole step's.
    """

    def _assemble(self, request: Request, budget: Budget | None) -> Private | PrivateWithCriterion:
        if request.options.clipping == "flat":
            adaptive = dataclasses.replace(request.options, clipping="adaptive")
            request = dataclasses.replace(request, options=adaptive)
        return super()._assemble(request, budget)
