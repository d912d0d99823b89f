"""Regions: parts of a private step that recur from layer to layer (the norms of a weight), compiled once.

While the step is traced, a call of a region is one operation of our own: it takes tensors and the region's number, and
is known by the shapes of its results alone. In the end the region is a graph inside the graph, and called as often.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ghostclip import _torch

_LIBRARY: Final = torch.library.Library("ghostclip", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int number) -> Tensor[]")
_CALL: Final = torch.ops.ghostclip.region.default
_numbers: Final = count()


class _Region:
    """A function of tensors of one form."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.number = function, next(_numbers)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the result, and note its other values."""
        self._leaves, self._spec = _torch.tree_flatten(self._function(*tensors))
        # Of a tuple, and no list, a compiler keeps what is known of its tensors.
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result that has these tensors, once it has run."""
        own = iter(tensors)
        return _torch.tree_unflatten([next(own) if isinstance(x, Tensor) else x for x in self._leaves], self._spec)


_known: Final[WeakValueDictionary[int, _Region]] = WeakValueDictionary()


def _shapes(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(result) for result in _known[number].run(*inputs)]


torch.library.register_fake("ghostclip::region", _shapes, lib=_LIBRARY)


class Regions:
    """The regions of one step."""

    def __init__(self) -> None:
        self._regions: dict[Hashable, _Region] = {}

    def call(self, what: Hashable, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a region, while tracing."""
        # `what` is equal for functions that do the same with tensors of equal sizes, strides and dtypes. Tensors of the
        # result share no memory, with each other or with the arguments.
        region = self._regions.setdefault(what, _Region(function))
        _known[region.number] = region
        return region.result(_CALL(list(tensors), region.number))

    def placed(self, graph: fx.GraphModule, final: Callable[..., fx.GraphModule]) -> None:
        """Insert the graphs of regions where they are called, in place; ``final`` lowers a traced graph."""
        names: dict[int, str] = {}
        for node in [node for node in graph.graph.nodes if node.target is _CALL]:
            given, number = node.args
            if number not in names:
                # By place, not by number: a step has the same names in every process.
                names[number] = f"region_{len(names)}"
                inputs = [argument.meta["val"] for argument in given]
                graph.add_submodule(names[number], final(_torch.traced(_known[number].run, inputs), inputs))
            with graph.graph.inserting_before(node):
                part = graph.graph.get_attr(names[number])
                call = graph.graph.call_function(_torch.region_call(), (part, names[number], *given))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
