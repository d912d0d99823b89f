"""Registering validators and fixers of your own modules."""

from collections.abc import Callable, Sequence
from typing import Any

from ghostclip.validation.fixers.module_validator import Fixer, ModuleValidator, Validator


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
