"""Hooks on modules: they tell of every call that begins and ends, and know nothing of what is made of it."""

from collections.abc import Callable, Mapping, Sequence
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


def is_own(hook: Any) -> bool:
    """Return whether a hook is one of ours.

    Args:
        hook: Of a module.

    Returns:
        False for those of others.
    """
    return isinstance(hook, _Hook)


class Watch:
    """The hooks on the modules of a model; those of inner modules are off while the outermost one runs.

    A call inside a call begins and ends nothing, and a module without hooks is called ten times as quickly.

    Attributes:
        kinds: The classes of the modules.
    """

    def __init__(self) -> None:
        """Watch no module yet."""
        self.kinds: set[type[nn.Module]] = set()
        self._handles: list[RemovableHandle] = []
        self._watched: list[_torch.Watched] = []
        self._off: list[Any] = []
        self._after: dict[nn.Module, int] = {}

    def __bool__(self) -> bool:
        """Return whether any module is watched."""
        return bool(self._handles)

    def add(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        """Register hooks on a module.

        Args:
            module: The module.
            enter: Called as a call of it begins, before any other hook.
            leave: Called as it ends, after any other hook, also when it raised.
        """
        before = module.register_forward_pre_hook(_Hook(enter), with_kwargs=True, prepend=True)
        # ``always_call`` runs it after an exception as well; it cannot tell, but a module that raised has no output.
        after = module.register_forward_hook(_Hook(leave), with_kwargs=True, always_call=True)
        self._handles += [before, after]
        self._watched.append(_torch.watched(module, before.id, after.id))
        self._after[module] = after.id
        self.kinds.add(_torch.class_of(module))

    def extend(self, handles: list[RemovableHandle]) -> None:
        """Remove other hooks together with these."""
        self._handles += handles

    def put_last(self, module: nn.Module) -> None:
        """Let our hook after a module's forward be behind those that others have registered since.

        Args:
            module: The module.
        """
        if module in self._after:
            _torch.put_hook_last(module, self._after[module])

    def inner_off(self, outermost: nn.Module) -> None:
        """Take the hooks off all modules but the one whose call has begun.

        Args:
            outermost: The module.
        """
        self._off += _torch.take_hooks(self._watched, outermost)

    def inner_on(self) -> None:
        """Put them back, each where it was: before, and after, all others."""
        off, self._off = self._off, []
        _torch.put_hooks_back(off)

    def call_inside(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module without these hooks, and without those of others that are called around them.

        Args:
            module: The module.
            args: Positional inputs.
            kwargs: Keyword inputs.

        Returns:
            Its output.
        """
        own = next((watched for watched in self._watched if watched[0] is module), None)
        return module.forward(*args, **kwargs) if own is None else _torch.call_between_hooks(own, args, kwargs)

    def remove(self) -> None:
        """Remove all hooks."""
        self.inner_on()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._after.clear()


def attach(model: nn.Module, enter: Enter, leave: Leave, watch: Watch) -> None:
    """Register hooks on every module that has parameters in its tree and none of these hooks yet.

    Args:
        model: The model.
        enter: As for `Watch.add`.
        leave: As for `Watch.add`.
        watch: Holds the hooks.

    Raises:
        GhostClipError: The model or a part of it has a clipper already.
        UnsupportedModelError: A part of it is scripted.
    """
    watched = {module for module in model.modules() if _is_watched(module)}
    if watched and not watch:
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
    for module in model.modules():
        if module not in watched and next(module.parameters(), None) is not None:
            watch.add(module, enter, leave)


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


def attach_after(module: nn.Module, ended: Callable[[nn.Module, Any], None]) -> list[RemovableHandle]:
    """Register a hook that runs after all others at the end of a module's call.

    Args:
        module: The module.
        ended: Called with it and its output.

    Returns:
        Handles that remove the hook.
    """

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ended(module, output)

    return [module.register_forward_hook(_Hook(after))]


def _is_watched(module: nn.Module) -> bool:
    return any(isinstance(hook, _Hook) and hook.active for hook in _torch.forward_hooks(module))
