"""Modules that cannot be trained privately as they are, and their replacements: ``ModuleValidator``.

Batch norm is refused in training mode and replaced by group norm (or instance norm); running statistics of instance
norm, counts and renormalised rows of embeddings are switched off. Recurrent layers and attention need no replacement:
they are captured as they are. Validators and fixers of your own modules are registered here.

Shape letters: N samples, C channels, `...` positions.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from math import gcd
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from ghostclip import _torch
from ghostclip.errors import (
    IllegalModuleConfigurationError,
    InvalidOptionError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)

_log = logging.getLogger(__name__)


Validator = Callable[[Any], Sequence[UnsupportedError]]
# Called with the module, and with those options of ``fix`` that were given and that it names.
Fixer = Callable[..., nn.Module]


class ModuleValidator:
    """Checks modules against registered validators and replaces them by registered fixers, as Opacus's does.

    It looks at the modules alone and runs nothing: `ghostclip.validate` runs the model and finds what no class name
    shows. An evaluation-mode batch norm is fine here, and so are recurrent layers and attention.

    Attributes:
        VALIDATORS: Validators by module class.
        FIXERS: Fixers by module class.
        ANY_FORWARD: Those that are asked also where a derived class has a forward of its own.
    """

    VALIDATORS: ClassVar[dict[type, Validator]] = {}
    FIXERS: ClassVar[dict[type, Fixer]] = {}
    ANY_FORWARD: ClassVar[set[Fixer]] = set()

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """Check a module and everything in it.

        Args:
            module: The model.
            strict: Raise what was found instead of returning it.

        Returns:
            What is wrong: one error for each, which names the module's path, what it has and the remedy.

        Raises:
            UnsupportedModuleError: With ``strict``, where anything is wrong; all of it in one text.

        Example:
            >>> [error] = ghostclip.ModuleValidator.validate(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
            >>> type(error).__name__
            'ShouldReplaceModuleError'
        """
        errors: list[UnsupportedError] = []
        alike: dict[str, list[str]] = {}
        for path, part in module.named_modules():
            validator = _registered(cls.VALIDATORS, type(part))
            for error in validator(part) if validator is not None else ():
                said = f" ({type(part).__name__}): {error}"
                alike.setdefault(said, []).append(path or "model")
                errors.append(type(error)(alike[said][-1] + said))
        if strict and errors:
            raise UnsupportedModuleError("\n".join(f"{', '.join(paths)}{said}" for said, paths in alike.items()))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether nothing is wrong with a module and what is in it.

        Args:
            module: The module.

        Returns:
            True if `validate` finds nothing.

        Example:
            >>> ghostclip.ModuleValidator.is_valid(nn.BatchNorm1d(8))
            False
        """
        return not cls.validate(module)

    @classmethod
    def fix(
        cls, module: nn.Module, *, replace_bn_with_in: bool | None = None, num_groups: int | None = None
    ) -> nn.Module:
        """Return a copy of a module in which everything that has a fixer was replaced.

        Replacements keep the training mode, the device, the dtype, ``requires_grad``, hooks, and the weights that they
        have in common with what they replace. A module that is used in several places is replaced by one module.

        Args:
            module: The model; it is not changed.
            replace_bn_with_in: Replace batch norm by instance norm (default: by group norm).
            num_groups: Groups of a group norm that replaces a batch norm (default: gcd(32, channels), fewer in 1-D).

        Returns:
            The copy.

        Raises:
            InvalidOptionError: Both options were given.
            UnsupportedModuleError: Lazy modules have no parameters yet.

        Example:
            >>> model = ghostclip.ModuleValidator.fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
            >>> type(model[1]).__name__
            'GroupNorm'
        """
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise UnsupportedModuleError(
                "model with lazy modules: call it once on a batch, so that they have parameters."
            )
        if replace_bn_with_in and num_groups is not None:
            raise InvalidOptionError("replace_bn_with_in=True and num_groups: instance norm has no groups. Give one.")
        requested = {"replace_bn_with_in": replace_bn_with_in, "num_groups": num_groups}
        options = {name: value for name, value in requested.items() if value is not None}
        fixed = copy.deepcopy(module)
        replaced: dict[nn.Module, nn.Module] = {}
        for path, part in list(fixed.named_modules()):
            replaced[part] = cls._fix_one(path, part, options)
        for parent in list(fixed.modules()):
            for name, child in _torch.child_table(parent).items():
                if child is not None and replaced.get(child, child) is not child:
                    _torch.child_table(parent)[name] = replaced[child]
        return replaced[fixed]

    @classmethod
    def fix_and_validate(
        cls, module: nn.Module, *, replace_bn_with_in: bool | None = None, num_groups: int | None = None
    ) -> nn.Module:
        """Fix a module, then check the result.

        Args:
            module: The model; it is not changed.
            replace_bn_with_in: As for ``fix``.
            num_groups: As for ``fix``.

        Returns:
            The fixed copy. Something that has no fixer raises as ``validate(strict=True)`` does.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            >>> model = ghostclip.ModuleValidator.fix_and_validate(model)
            >>> type(model[1]).__name__
            'GroupNorm'
        """
        fixed = cls.fix(module, replace_bn_with_in=replace_bn_with_in, num_groups=num_groups)
        cls.validate(fixed, strict=True)
        return fixed

    @classmethod
    def _fix_one(cls, path: str, part: nn.Module, options: dict[str, Any]) -> nn.Module:
        fixer = _registered(cls.FIXERS, type(part), same_forward=True, unless=cls.ANY_FORWARD)
        if fixer is None:
            return part
        taken = inspect.signature(fixer).parameters.values()
        everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        names = {parameter.name for parameter in taken}
        new = fixer(part, **{key: value for key, value in options.items() if everything or key in names})
        if new is part:
            return part
        _carry_over(part, new)
        _log.info("%s: replaced %s by %s.", path or "model", part, new)
        return new


def _registered(
    registry: dict[type, Any], kind: type, *, same_forward: bool = False, unless: Collection[Any] = ()
) -> Any:
    """Return the entry of a class or of the nearest class it derives from, or None."""
    for base in kind.__mro__:
        if base in registry:
            unchanged = getattr(kind, "forward", None) is getattr(base, "forward", None)
            return registry[base] if unchanged or not same_forward or registry[base] in unless else None
    return None


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give a replacement the state of what it replaces."""
    tensors = [tensor for tensor in (*old.parameters(), *old.buffers()) if tensor.is_floating_point()]
    if tensors:
        new.to(device=tensors[0].device, dtype=tensors[0].dtype)
    parameters = dict(old.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name in parameters:
                parameter.requires_grad_(parameters[name].requires_grad)
                if parameter.shape == parameters[name].shape:
                    parameter.copy_(parameters[name])
    new.train(old.training)
    _torch.copy_hooks(old, new)


def register_module_validator(
    target_class_or_classes: type | Sequence[type], validator_class: type[ModuleValidator] = ModuleValidator
) -> Callable[[Validator], Validator]:
    """Register the decorated function as the validator of one or several module classes, and of those derived from it.

    Args:
        target_class_or_classes: The classes.
        validator_class: Whose registry it enters.

    Returns:
        The decorator; it leaves the function as it is.

    Example:
        >>> from ghostclip.errors import IllegalModuleConfigurationError
        >>> class Mixer(nn.Module):
        ...     causal = False
        >>> @register_module_validator(Mixer)
        ... def validate(module):
        ...     return [] if module.causal else [IllegalModuleConfigurationError("set causal=True")]
        >>> ghostclip.ModuleValidator.is_valid(Mixer())
        False
    """
    return _into(validator_class.VALIDATORS, target_class_or_classes)


def register_module_fixer(
    target_class_or_classes: type | Sequence[type],
    validator_class: type[ModuleValidator] = ModuleValidator,
    *,
    any_forward: bool = False,
) -> Callable[[Fixer], Fixer]:
    """Register the decorated function as the fixer of one or several module classes.

    It also serves derived classes that have the same ``forward``; where that was written anew, a replacement would
    change what the model computes.

    Args:
        target_class_or_classes: The classes.
        validator_class: Whose registry it enters.
        any_forward: Also serve derived classes with a ``forward`` of their own, which the fixer looks at itself.

    Returns:
        The decorator; it leaves the function as it is.
    """
    register = _into(validator_class.FIXERS, target_class_or_classes)

    def register_fixer(fixer: Fixer) -> Fixer:
        if any_forward:
            validator_class.ANY_FORWARD.add(fixer)
        return register(fixer)

    return register_fixer


def _into(registry: dict[type, Any], classes: type | Sequence[type]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for target in [classes] if isinstance(classes, type) else classes:
            registry[target] = function
        return function

    return register


_MAX_GROUPS: Final = 32
# A group of one channel has nothing but itself to be normalised by where there are no positions: its output is zero.
_MIN_CHANNELS: Final = 8
_INSTANCE_NORMS: Final = (
    (nn.BatchNorm1d, nn.InstanceNorm1d),
    (nn.BatchNorm2d, nn.InstanceNorm2d),
    (nn.BatchNorm3d, nn.InstanceNorm3d),
)


# By name too, since scripts look the entry of a class up.
_BATCH_NORMS: Final = (_torch.AnyBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_POSITIONS: Final = ((3, 3), (3,), (3, 3, 3), ())
"""Shapes of positions that one of the batch norms takes."""


class GroupNormThen(nn.GroupNorm):
    """Group norm, then its children in their order: what a batch norm with an activation inside becomes."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's signature
        """Normalise, then call the children."""
        # Shape ``(N, C, ...)``.
        return _then(self, super().forward(input))


@register_module_validator(_BATCH_NORMS)
def validate_batch_norm(module: _torch.AnyBatchNorm) -> list[UnsupportedModuleError]:
    """Return what is wrong with a batch norm in training mode."""
    # In evaluation mode samples do not depend on each other.
    if not module.training:
        return []
    if not _is_plain(module) and not _is_norm_then_children(module):
        remedy = (
            "Its forward is its own, and more than a batch norm followed by the modules in it: replace it by hand, or "
            "register a fixer (register_module_fixer)"
        )
    else:
        remedy = "Replace it by GroupNorm (ModuleValidator.fix does)"
    message = (
        "in training mode every sample's output depends on the whole batch, so that there are no per-sample gradients. "
        f"{remedy}, or put the layer in eval mode."
    )
    return [ShouldReplaceModuleError(message)]


@register_module_fixer(_BATCH_NORMS, any_forward=True)
def fix_batch_norm(
    module: _torch.AnyBatchNorm, *, replace_bn_with_in: bool = False, num_groups: int | None = None
) -> nn.Module:
    """Replace a batch norm that is in training mode.

    Reference: group norm, Wu and He 2018 (arXiv 1803.08494).
    """
    # `num_groups` must divide the channels; by default gcd(32, channels), as Opacus has it, but of at least 8 channels
    # each for ``BatchNorm1d``: a group of one channel without positions is normalised to zero. A group norm has as many
    # parameters and the modules inside the batch norm; `module` itself is returned in evaluation mode, and where its
    # forward is its own and more than that.
    plain = _is_plain(module)
    if not module.training or not (plain or _is_norm_then_children(module)):
        return module
    channels = module.num_features
    if replace_bn_with_in:
        kind = next((norm for batch_norm, norm in _INSTANCE_NORMS if isinstance(module, batch_norm)), None)
        if kind is None or not plain:
            name = type(module).__name__
            raise UnsupportableModuleError(f"{name}: no instance norm is of its kind. Leave replace_bn_with_in out.")
        return kind(channels, eps=module.eps, affine=module.affine)
    flat = isinstance(module, nn.BatchNorm1d)
    default = _groups_without_space(channels) if flat else gcd(_MAX_GROUPS, channels)
    groups = default if num_groups is None else num_groups
    if groups < 1 or channels % groups:
        raise InvalidOptionError(f"num_groups={groups} does not divide the {channels} channels of a batch norm.")
    if plain:
        return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    norm = GroupNormThen(groups, channels, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        norm.add_module(name, child)
    return norm


def _groups_without_space(channels: int) -> int:
    """Return the most groups that divide the channels: at most 32, of at least 8 channels each, else one."""
    most = max(1, min(_MAX_GROUPS, channels // _MIN_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def _then(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module's children one after another."""
    for child in module.children():
        x = child(x)
    return x


def _is_plain(module: _torch.AnyBatchNorm) -> bool:
    """Return whether a batch norm's forward is torch's."""
    return type(module).forward in (_torch.AnyBatchNorm.forward, nn.SyncBatchNorm.forward)


def _is_norm_then_children(module: _torch.AnyBatchNorm) -> bool:
    """Return whether a batch norm with its own forward computes a batch norm, then what its children make of it."""
    # A copy is tried on random numbers with fixed statistics, its children in training mode, so that dropout counts.
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return False
    trial = copy.deepcopy(module).cpu().double().train()
    trial.training = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in (*trial.parameters(), *trial.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
        return any(_agree(trial, torch.randn(4, module.num_features, *shape).double()) for shape in _POSITIONS)


def _agree(trial: _torch.AnyBatchNorm, x: Tensor) -> bool:
    """Return whether a forward gives what the norm and the children give; False where it does not take the shape."""
    norm = functional.batch_norm(
        x,
        trial.running_mean,
        trial.running_var,
        trial.weight,
        trial.bias,
        training=not trial.track_running_stats,
        eps=trial.eps,
    )
    try:
        torch.manual_seed(0)
        output = trial.forward(x.clone())
        torch.manual_seed(0)
        return bool(torch.allclose(output, _then(trial, norm)))
    except Exception:  # noqa: BLE001 - whatever a forward that is not known raises means the same
        return False


_ANY_INSTANCE_NORMS: Final = (_torch.AnyInstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@register_module_validator(_ANY_INSTANCE_NORMS)
def validate_instance_norm(module: _torch.AnyInstanceNorm) -> list[UnsupportedModuleError]:
    """Refuse an instance norm that updates running statistics."""
    if not (module.track_running_stats and module.training):
        return []
    message = (
        "track_running_stats=True keeps averages over samples in buffers that are neither clipped nor noised. Set "
        "track_running_stats=False (ModuleValidator.fix does)."
    )
    return [IllegalModuleConfigurationError(message)]


@register_module_fixer(_ANY_INSTANCE_NORMS)
def fix_instance_norm(module: _torch.AnyInstanceNorm) -> nn.Module:
    """Replace an instance norm by one without running statistics."""
    # `module` itself where nothing is wrong.
    if not validate_instance_norm(module):
        return module
    kind = type(module)
    return kind(module.num_features, eps=module.eps, affine=module.affine)


@register_module_validator([nn.Embedding, nn.EmbeddingBag])
def validate_embedding(module: nn.Embedding | nn.EmbeddingBag) -> list[UnsupportedModuleError]:
    """Refuse an embedding whose gradients are divided by counts over the batch, or that changes rows it looks up."""
    errors: list[UnsupportedModuleError] = []
    if module.max_norm is not None:
        message = (
            f"max_norm={module.max_norm} renormalises, in the table itself, the rows that a batch looks up, which "
            "tells without noise which ids were in it. Set max_norm=None (ModuleValidator.fix does), and renormalise "
            "the whole table after step(): with torch.no_grad(): "
            f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm}))."
        )
        errors.append(IllegalModuleConfigurationError(message))
    if not (module.scale_grad_by_freq and module.weight.requires_grad):
        return errors
    message = (
        "scale_grad_by_freq=True divides each gradient by counts over the whole batch, so that samples depend on each "
        "other. Set scale_grad_by_freq=False (ModuleValidator.fix does)."
    )
    return [*errors, IllegalModuleConfigurationError(message)]


@register_module_fixer([nn.Embedding, nn.EmbeddingBag])
def fix_embedding(module: nn.Embedding | nn.EmbeddingBag) -> nn.Module:
    """Switch both off, in place."""
    module.scale_grad_by_freq, module.max_norm = False, None
    return module
