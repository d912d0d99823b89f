"""One intercepted torch function call, as the ways of consuming it see it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ghostclip.capture.tracked import TrackedTensor, plain_leaves, replace_tracked, tracked_leaves
from ghostclip.rules.registry import operation_name

__all__ = ["HOOKED", "LOOKED_AT", "Operation", "hooked", "operation_name", "sets_hook"]

# They read a parameter and compute nothing from it.
LOOKED_AT = {
    "detach", "detach_", "data", "grad", "numpy", "item", "tolist", "requires_grad_", "__deepcopy__", "__reduce_ex__",
}  # fmt: skip

# They set a hook on the gradient of a whole batch.
HOOKED = {"register_hook", "register_post_accumulate_grad_hook"}


@dataclass(frozen=True, eq=False)
class Operation:
    """A torch function with its arguments, some of them tracked."""

    func: Callable[..., Any]
    name: str  # the name under which rules know it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def tracked(self) -> list[TrackedTensor]:
        """The tracked arguments, each once, in order."""
        return list({id(t): t for t in tracked_leaves((self.args, self.kwargs))}.values())

    @cached_property
    def plain(self) -> list[Tensor]:
        """The other tensors among the arguments."""
        return list(plain_leaves((self.args, self.kwargs)))

    def run(self, replacement: Callable[[TrackedTensor], Any]) -> Any:
        """Return the function's result with ``replacement(argument)`` in the place of every tracked argument."""
        return self.func(*replace_tracked(self.args, replacement), **replace_tracked(self.kwargs, replacement))

    def run_plain(self) -> Any:
        """Return the function's result on the detached values of its tracked arguments."""
        return self.run(lambda tracked: tracked.origin.value)

    @property
    def is_in_graph(self) -> bool:
        """Whether any of the other tensors is in the graph."""
        return any(tensor.requires_grad for tensor in self.plain)

    @property
    def is_in_place(self) -> bool:
        """Whether it changes its first argument, by its name."""
        name = self.name
        if name in ("__setitem__", "index_put_") or name.startswith("__i"):
            return True
        return name.endswith("_") and not name.endswith("__")


def sets_hook(operation: Operation) -> bool:
    """Return whether an operation sets a hook that may change a gradient, unlike torch's own module trackers."""
    return operation.name in HOOKED and not any(
        getattr(arg, "__module__", None) == "torch.autograd.graph" for arg in operation.args
    )


def hooked(operation: Operation) -> str:
    """Return the error text for a forward that sets a hook on what comes from parameters alone."""
    names = ", ".join(dict.fromkeys(name for tracked in operation.tracked for name in tracked.origin.names))
    return (
        f"the forward sets a hook on the gradient of parameter '{names}' ({operation.name}): no such gradient is "
        "formed, since samples are clipped one by one. Set the hook on an activation, or scale the parameter itself."
    )
