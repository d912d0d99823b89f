"""Hooks that others set on tensors, ``Tensor.register_hook``, found from the nodes of the graph that made these.

torch tells nobody which values of a graph have hooks. While anybody is attached, the method is therefore replaced by
one that leaves a note on the node; the hooks themselves are kept by torch alone.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Final

from torch import Tensor

from ghostclip import _torch

# Returns a gradient to go on with, None for the one it was given.
Hook = Callable[[Tensor], Tensor | None]
_KEY: Final = "ghostclip_hooks"
_MARK: Final = "_ghostclip_hooks"
_by_others = [0]


def install() -> None:
    """Note hooks from now on; an earlier replacement of the method is still called."""
    if not hasattr(Tensor.register_hook, _MARK):
        Tensor.register_hook = _noting(Tensor.register_hook)  # type: ignore[method-assign]


def remove() -> None:
    """Restore torch's method, unless somebody has replaced it since."""
    while hasattr(Tensor.register_hook, _MARK):
        Tensor.register_hook = getattr(Tensor.register_hook, "__wrapped__")  # type: ignore[method-assign] # noqa: B009


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: Hook) -> Any:
        handle = original(tensor, hook)
        node: Any = tensor.grad_fn
        if node is not None:
            _by_others[0] += not str(getattr(hook, "__module__", "")).startswith("ghostclip.")
            # Weakly: a hook that refers to its own tensor would otherwise keep the graph for good.
            node.metadata.setdefault(_KEY, []).append(handle.hooks_dict_ref)
        return handle

    setattr(register_hook, _MARK, True)
    return register_hook


def by_others() -> int:
    """Return how many hooks of others were noted so far: where none was since, the graph need not be searched."""
    return _by_others[0]


def hooks_at(node: Any) -> Iterator[MutableMapping[Any, Hook]]:
    """Yield the hooks of every tensor that a node made, by the increasing numbers of their handles."""
    for found in node.metadata.get(_KEY, ()):
        hooks = found()
        if hooks:
            yield hooks


def set_on(nodes: Iterable[Any]) -> list[Hook]:
    """Return the hooks on what nodes made, in the order in which they were set."""
    found = [hook for node in nodes for hooks in hooks_at(node) for hook in hooks.values()]
    return [hook.hook if isinstance(hook, _OnlyLooks) else hook for hook in found]


def guard(node: Any, refuse: Callable[[], None]) -> None:
    """Let hooks on a node's outputs look at gradients, and refuse changes: ``refuse`` raises in the backward."""
    for hooks in hooks_at(node):
        for number, hook in list(hooks.items()):
            if not isinstance(hook, _OnlyLooks):
                hooks[number] = _OnlyLooks(hook, refuse)


class _OnlyLooks:
    """A hook that may not change a gradient."""

    def __init__(self, hook: Hook, refuse: Callable[[], None]) -> None:
        self.hook, self._refuse = hook, refuse

    def __call__(self, grad: Tensor) -> None:
        version = _torch.version(grad)
        result = self.hook(grad)
        if (result is not None and result is not grad) or _torch.version(grad) != version:
            self._refuse()
