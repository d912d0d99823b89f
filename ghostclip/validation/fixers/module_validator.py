"""``ModuleValidator``: finds modules that cannot be trained privately, and replaces those that have a replacement."""

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ghostclip import _torch
from ghostclip.errors import InvalidOptionError, UnsupportedError, UnsupportedModuleError

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
            for found in validator(part) if validator is not None else ():
                said = f" ({type(part).__name__}): {found}"
                alike.setdefault(said, []).append(path or "model")
                errors.append(type(found)(alike[said][-1] + said))
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
        given = {"replace_bn_with_in": replace_bn_with_in, "num_groups": num_groups}
        options = {name: value for name, value in given.items() if value is not None}
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
    own = dict(old.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name in own:
                parameter.requires_grad_(own[name].requires_grad)
                if parameter.shape == own[name].shape:
                    parameter.copy_(own[name])
    new.train(old.training)
    _torch.copy_hooks(old, new)
