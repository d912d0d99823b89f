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
    """A hook that is left out of copies and pickles of the model."""

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
    """Return whether a module's hook is one of ours."""
    return isinstance(hook, _Hook)


class Watch:
    """The hooks on the modules of a model; those of inner modules are off while the outermost one runs."""

    # A call inside a call begins and ends nothing, and a module without hooks is called ten times as quickly.
    def __init__(self) -> None:
        self.kinds: set[type[nn.Module]] = set()  # classes of the modules
        self._handles: list[RemovableHandle] = []
        self._watched: list[_torch.Watched] = []
        self._off: list[Any] = []
        self._after: dict[nn.Module, int] = {}

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        """Register hooks: ``enter`` before any other hook, ``leave`` after any other, also when the call raised."""
        before = module.register_forward_pre_hook(_Hook(enter), with_kwargs=True, prepend=True)
        # ``always_call`` runs it after an exception as well; it cannot tell, but a module that raised has no output.
        after = module.register_forward_hook(_Hook(leave), with_kwargs=True, always_call=True)
        self._handles += [before, after]
        self._watched.append(_torch.watched(module, before.id, after.id))
        self._after[module] = after.id
        self.kinds.add(_torch.class_of(module))

    def extend(self, handles: list[RemovableHandle]) -> None:
        """Let `remove` take off other hooks as well."""
        self._handles += handles

    def put_last(self, module: nn.Module) -> None:
        """Move our hook after a module's forward behind those that others have registered since."""
        if module in self._after:
            _torch.put_hook_last(module, self._after[module])

    def inner_off(self, outermost: nn.Module) -> None:
        """Remove the hooks of all modules but the one whose call has begun."""
        self._off += _torch.take_hooks(self._watched, outermost)

    def inner_on(self) -> None:
        """Restore them, each in its place among other hooks."""
        off, self._off = self._off, []
        _torch.put_hooks_back(off)

    def call_inside(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module without these hooks, and without others' hooks that are called around them."""
        own = next((watched for watched in self._watched if watched[0] is module), None)
        return module.forward(*args, **kwargs) if own is None else _torch.call_between_hooks(own, args, kwargs)

    def remove(self) -> None:
        self.inner_on()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._after.clear()


def attach(model: nn.Module, enter: Enter, leave: Leave, watch: Watch) -> None:
    """Register hooks on every module that has parameters in its tree and none of these hooks yet."""
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
    """Register hooks that run after all others before a module's forward, and before all others after it."""

    # `ends` is called also when the forward raised.
    def before(module: nn.Module, args: Any) -> None:
        begins(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ends(module)

    return [
        module.register_forward_pre_hook(_Hook(before)),
        module.register_forward_hook(_Hook(after), prepend=True, always_call=True),
    ]


def attach_after(module: nn.Module, ended: Callable[[nn.Module, Any], None]) -> list[RemovableHandle]:
    """Register a hook, called with module and output, that runs after all others at the end of a module's call."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ended(module, output)

    return [module.register_forward_hook(_Hook(after))]


def _is_watched(module: nn.Module) -> bool:
    return any(isinstance(hook, _Hook) and hook.active for hook in _torch.forward_hooks(module))
