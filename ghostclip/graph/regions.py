"""Regions: parts of a private step that recur from layer to layer (the norms of a weight), compiled once.

While the step is traced, a region is one operation of our own: it takes tensors and the region's number, and is known
by the shapes of its results alone. A region that is called often becomes a graph inside the graph, called in as many
places; of one that is called seldom the operations stand where it was called, as nothing is saved then, and a compiler
fuses them with those beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ghostclip import _torch

FEWEST: Final = 4
"""Calls from which a region is a graph of its own."""

_LIBRARY: Final = torch.library.Library("ghostclip", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int number) -> Tensor[]")
_CALL: Final = torch.ops.ghostclip.region.default
_numbers: Final = count()


class _Region:
    """A function of tensors of one form.

    Attributes:
        number: Which region.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Give a function a number.

        Args:
            function: From tensors to a result with tensors in it.
        """
        self._function, self.number = function, next(_numbers)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the result, and note what else there is."""
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
        """Know of none."""
        self._regions: dict[Hashable, _Region] = {}
        self._graphs: dict[int, fx.GraphModule] = {}
        self._given: dict[int, list[Tensor]] = {}
        self._apart: set[int] = set()

    def call(self, what: Hashable, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a region; only where operations are written down.

        Args:
            what: The same for functions that do the same with tensors of one form.
            function: From tensors to a result whose tensors share no memory, with each other or with what is given.
            *tensors: What it is given.

        Returns:
            Its result.
        """
        key = what, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
        region = self._regions.setdefault(key, _Region(function))
        _known[region.number] = region
        return region.result(_CALL(list(tensors), region.number))

    def inlined(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs a graph, and of regions that it seldom calls the operations themselves.

        Args:
            graph: The step as it was traced.

        Returns:
            A function of the graph's inputs.
        """
        calls = [node for node in graph.graph.nodes if node.target is _CALL]
        often = Counter(node.args[1] for node in calls)
        self._apart = {number for number, calls_of in often.items() if calls_of >= FEWEST}
        for number in often:
            node = next(node for node in calls if node.args[1] == number)
            self._given[number] = [argument.meta["val"] for argument in node.args[0]]
            self._graphs[number] = _torch.traced(_known[number].run, self._given[number])
        return _Inlined(graph, {number: self._graphs[number] for number in often.keys() - self._apart}).run

    def placed(self, graph: fx.GraphModule, final: Callable[..., fx.GraphModule]) -> None:
        """Put the graphs of regions in the places where they are called.

        Args:
            graph: The step, as `inlined` was traced; changed in place.
            final: From a traced graph and tensors of the shapes it is for to the graph as it is compiled.
        """
        # By place, not by number: a step has the same names in every process.
        names = {number: f"region_{place}" for place, number in enumerate(sorted(self._apart))}
        for number, name in names.items():
            graph.add_submodule(name, final(self._graphs[number], self._given[number]))
        for node in [node for node in graph.graph.nodes if node.target is _CALL]:
            with graph.graph.inserting_before(node):
                name = names[node.args[1]]
                part = graph.graph.get_attr(name)
                call = graph.graph.call_function(_torch.region_call(), (part, name, *node.args[0]))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)


class _Inlined(fx.Interpreter):
    """Runs a graph, with the operations of some regions in the place of their calls."""

    def __init__(self, graph: fx.GraphModule, inlined: Mapping[int, fx.GraphModule]) -> None:
        super().__init__(graph)
        self._own = inlined

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _CALL and args[1] in self._own:
            return self._own[args[1]](*args[0])
        return super().call_function(target, args, kwargs)
