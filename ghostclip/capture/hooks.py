"""Hooks on modules: they tell of every call that begins and ends, and know nothing of what is made of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch
from ghostclip.capture.eager import untraced
from ghostclip.errors import GhostClipError, UnsupportedModelError

# Called with a module and its positional and keyword inputs; returns what to run it on, None to keep them.
Enter = Callable[[nn.Module, Any, Any], Any]
# Called with these and the output, None where it raised; returns what to return in its place, None to keep it.
Leave = Callable[[nn.Module, Any, Any, Any], Any]


class _Hook:
    """A hook that a copy or a pickle of the model does not carry along."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @property
    def active(self) -> bool:
        return self._call is not _nothing

    @untraced
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    return None


def attach(model: nn.Module, enter: Enter, leave: Leave, *, attached: bool) -> list[RemovableHandle]:
    """Register hooks on every module that has parameters in its tree.

    Args:
        model: The model.
        enter: Called as a module call begins, before any other hook.
        leave: Called as it ends, after any other hook, also when it raised.
        attached: Whether hooks are on some modules already.

    Returns:
        Handles that remove the hooks.

    Raises:
        GhostClipError: The model or a part of it has a clipper already.
        UnsupportedModelError: A part of it is scripted.
    """
    watched = {module for module in model.modules() if _is_watched(module)}
    if watched and not attached:
        message = (
            f"{type(model).__name__} has a clipper already, on it or on a part of it. Call remove() on that one "
            "first, or remove_hooks() on the private model."
        )
        raise GhostClipError(message)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            message = (
                f"{path or 'model'} is a scripted or traced module, whose operations on parameters cannot be seen. "
                "Give the original module to ghostclip; the trained one can be scripted."
            )
            raise UnsupportedModelError(message)
    handles = []
    for module in model.modules():
        if module in watched or next(module.parameters(), None) is None:
            continue
        handles.append(module.register_forward_pre_hook(_Hook(enter), with_kwargs=True, prepend=True))
        # ``always_call`` runs it after an exception as well; it cannot tell, but a module that raised has no output.
        handles.append(module.register_forward_hook(_Hook(leave), with_kwargs=True, always_call=True))
    return handles


def attach_inside(
    module: nn.Module, begins: Callable[[nn.Module], None], ends: Callable[[nn.Module], None]
) -> list[RemovableHandle]:
    """Register hooks that run after all others before a module's forward, and before all others after it.

    Args:
        module: The module.
        begins: Called right before its forward.
        ends: Called right after it, also when it raised.

    Returns:
        Handles that remove the hooks.
    """

    def before(module: nn.Module, args: Any) -> None:
        begins(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ends(module)

    return [
        module.register_forward_pre_hook(_Hook(before)),
        module.register_forward_hook(_Hook(after), prepend=True, always_call=True),
    ]


def _is_watched(module: nn.Module) -> bool:
    return any(isinstance(hook, _Hook) and hook.active for hook in _torch.forward_hooks(module))
