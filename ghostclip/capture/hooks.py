"""Hooks: ours on modules, and a forward that runs between them; those that others set on tensors.

Hooks on modules tell of every call that begins and ends, and know nothing of what is made of it. The one after the
forward ends it, also after an exception, but not after ``KeyboardInterrupt``: torch calls no hook then. Two safety nets
catch that. A token among the forward's arguments notices when the call's frames are gone, and whoever enters next looks
whether the call is still on the stack.

``torch.compile`` traces Python frames ahead of time; what a clipper does in a forward (substituting parameters,
following rows, keeping inputs) happens as it runs. A compiled model therefore runs eagerly while a clipper watches it,
and compiled otherwise: in evaluation, without gradients, or once the clipper is removed. Where a user compiles a whole
step, what the library does in its backward and its update is left out.

torch tells nobody which values of a graph have hooks. While anybody is attached, ``Tensor.register_hook`` is therefore
replaced by one that leaves a note on the node that made the tensor; the hooks themselves are kept by torch alone. Hooks
on saved tensors are counted as they are set.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch, _tree
from ghostclip.errors import GhostClipError, UnsupportedModelError

# What a step calls outside of a forward, during which the compiler is stopped.
_STEP: Final = "accounting capture checks clipper clipping data distributed factors kernels noise optim privacy rules"
_UNTRACED = [f"ghostclip.{room}" for room in _STEP.split()]
# Called with a module and its positional and keyword inputs; returns what to run it on, None to keep them.
Enter = Callable[[nn.Module, Any, Any], Any]
# Called with these and the output, None where it raised; returns what to return in its place, None to keep it.
Leave = Callable[[nn.Module, Any, Any, Any], Any]
# Returns a gradient to go on with, None for the one it was given.
GradientHook = Callable[[Tensor], Tensor | None]
_NOTES: Final = "ghostclip_hooks"  # in the metadata of a node
_NOTING: Final = "_ghostclip_hooks"  # attribute of the method in the place of torch's
_by_others = [0]


def suspend_compiler() -> Any:
    """Stop the compiler from taking further frames; return the state to resume, None if it was never loaded."""
    return _torch.stop_compiler(_UNTRACED)


def untraced(function: Any) -> Any:
    """Mark a function that the compiler must not look into, also when it is loaded later."""
    _torch.mark_untraced(function, reason="it substitutes parameters in a forward, which cannot be compiled")
    return function


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

    # A call inside a call begins and ends nothing (where there is no sampler, no rank and no unit of its own), and a
    # module without hooks is called ten times as quickly.
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
        entry = next((watched for watched in self._watched if watched[0] is module), None)
        return module.forward(*args, **kwargs) if entry is None else _torch.call_between_hooks(entry, args, kwargs)

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
        raise GhostClipError(
            f"{type(model).__name__} has a clipper already, on it or on a part of it. Call remove() on that one "
            "first, or remove_hooks() on the private model."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise UnsupportedModelError(
                f"{path or 'model'} is a scripted or traced module, whose operations on parameters cannot be seen. "
                "Give the original module to ghostclip; the trained one can be scripted."
            )
    for module in model.modules():
        if module not in watched and next(module.parameters(), None) is not None:
            watch.add(module, enter, leave)


def attach_inside(
    module: nn.Module,
    begins: Callable[[nn.Module], None],
    ends: Callable[[nn.Module], None],
    after: Callable[[nn.Module, Any], None],
) -> list[RemovableHandle]:
    """Register hooks that run after all others before a module's forward, and before and after all others after it."""
    # `ends` is called also when the forward raised, `after` with the output.
    ending = _Hook(lambda module, args, output: ends(module))
    return [
        module.register_forward_pre_hook(_Hook(lambda module, args: begins(module))),
        module.register_forward_hook(ending, prepend=True, always_call=True),
        module.register_forward_hook(_Hook(lambda module, args, output: after(module, output))),
    ]


def _is_watched(module: nn.Module) -> bool:
    return any(isinstance(hook, _Hook) and hook.active for hook in _torch.forward_hooks(module))


@contextmanager
def in_place_of(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module, not of its class, within the block."""
    previous = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    try:
        yield
    finally:
        if previous is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = previous


class Token(dict[str, Any]):
    """The keyword arguments of the outermost call: they live as long as its frames do."""


class Running:
    """The outermost module call."""

    def __init__(self, module: Any, token: Token | None = None, expired: Callable[[], None] = lambda: None) -> None:
        # `token`: referred to by the call's frames and by nobody else. `expired` is called when these are gone and the
        # call was never ended.
        def gone(_: Any) -> None:
            # Somebody else's hook may have put other arguments in the token's place.
            if not _calls_of(module):
                expired()

        self.module, self._token = module, None if token is None else ref(token, gone)

    def was_broken_off(self, module: Any) -> bool:
        """Return whether a new call of the same module, which has begun, shows that this one is over."""
        return module is self.module and _calls_of(module) == 1


def _calls_of(module: Any) -> int:
    """Return how many calls of a module this thread is executing."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += _torch.is_call_of(frame, module)
        frame = frame.f_back
    return count


def note_tensor_hooks() -> None:
    """Note hooks from now on; an earlier replacement of the method is still called."""
    if not hasattr(Tensor.register_hook, _NOTING):
        Tensor.register_hook = _noting(Tensor.register_hook)  # type: ignore[method-assign]
    if not hasattr(saved_tensors_hooks.__enter__, _NOTING):
        saved_tensors_hooks.__enter__ = _noting_packing(saved_tensors_hooks.__enter__)  # type: ignore[method-assign]


def stop_noting_tensor_hooks() -> None:
    """Restore torch's method, unless somebody has replaced it since."""
    for owner, name in ((Tensor, "register_hook"), (saved_tensors_hooks, "__enter__")):
        while hasattr(getattr(owner, name), _NOTING):
            setattr(owner, name, getattr(owner, name).__wrapped__)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: GradientHook) -> Any:
        handle = original(tensor, hook)
        node: Any = tensor.grad_fn
        if node is not None:
            # Fabric's on outputs looks at no gradient, only at who began the backward.
            module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
            _by_others[0] += not module.startswith(("ghostclip.", "lightning.fabric.", "lightning_fabric."))
            # Weakly: a hook that refers to its own tensor would otherwise keep the graph for good.
            node.metadata.setdefault(_NOTES, []).append(handle.hooks_dict_ref)
        return handle

    setattr(register_hook, _NOTING, True)
    return register_hook


def _noting_packing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(hooks: Any) -> Any:
        _by_others[0] += _packs(hooks.pack_hook)
        return original(hooks)

    setattr(enter, _NOTING, True)
    return enter


def _packs(hook: Any) -> bool:
    """Return whether a hook that packs saved tensors is neither torch's (a checkpoint, an offload) nor ours."""
    return not str(getattr(hook, "__module__", "")).startswith(("torch.", "ghostclip."))


def hooks_of_others() -> int:
    """Return how many hooks of others were noted so far: where none was since, the graph need not be searched."""
    return _by_others[0]


def hooks_before_now() -> int:
    """Return the same, without what packs the tensors that are saved from now on."""
    packing = _torch.saving_hooks()
    return _by_others[0] - (packing is not None and _packs(packing[0]))


def hooks_at(node: Any) -> Iterator[MutableMapping[Any, GradientHook]]:
    """Yield the hooks of every tensor that a node made, by the increasing numbers of their handles."""
    for reference in node.metadata.get(_NOTES, ()):
        hooks = reference()
        if hooks:
            yield hooks


def hooks_set_on(nodes: Iterable[Any]) -> list[GradientHook]:
    """Return the hooks on what nodes made, in the order in which they were set."""
    all_hooks = [hook for node in nodes for hooks in hooks_at(node) for hook in hooks.values()]
    return [hook.hook if isinstance(hook, _OnlyLooks) else hook for hook in all_hooks]


def refuse_changes(node: Any, error: Callable[[], Exception]) -> None:
    """Let hooks on a node and its outputs look at gradients, and refuse changes in the backward, by an error."""
    for hooks in (*hooks_at(node), *_torch.hooks_of_node(node)):
        for number, hook in list(hooks.items()):
            if not isinstance(hook, _OnlyLooks):
                hooks[number] = _OnlyLooks(hook, error)


class _OnlyLooks:
    """A hook that may not change a gradient; one on a node is given several, and those that it makes of them."""

    def __init__(self, hook: Callable[..., Any], error: Callable[[], Exception]) -> None:
        self.hook, self._error = hook, error

    def __call__(self, *given: Any) -> None:
        before = [(grad, _torch.version(grad)) for grad in _tree.tensors(given)]
        result = self.hook(*given)
        kept = result is None or [*map(id, _tree.leaves(result))] == [*map(id, _tree.leaves(given[0]))]
        if not kept or any(_torch.version(grad) != version for grad, version in before):
            raise self._error()
