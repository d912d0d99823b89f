"""Rows of a model's outputs, as a proved forward has shown them: as far as these a loss has to be followed.

The forward's own proof says which inner rows each row of an output leads to. A loss whose every way into the model
leads through such outputs is therefore proved by the gradient of these outputs alone; no layer runs backward again.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip.capture import backward_entry
from ghostclip.capture.nodes import Edge, edge_of
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.row_origin import METADATA_KEY
from ghostclip.evidence.probe import Company, Start, Weights, repeated, roots_of, touches_others

# On the node of a proved output: how its rows map to samples, by the number of the node's output.
_KEY: Final = "ghostclip_proved_rows"
# How rows map to samples, in an order of the axes; empty where they are as they come.
_Rows = tuple[RowMap, tuple[int, ...]]


class Unheard:
    """Lets the layer go unheard whose output is the model's own: its hooks run where a gradient is taken."""

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Do nothing.

        Args:
            use: The layer's use of its parameters.
            grad: Gradient of what it made.
        """


def note(begun: Sequence[Start]) -> None:
    """Note the outputs of a forward that was proved.

    Args:
        begun: Where the backwards of its proof began.
    """
    for start in begun:
        if start.edge.tensor is not None and start.edge.tensor.grad_fn is not None:
            node, number = edge_of(start.edge.tensor)
            node.metadata.setdefault(_KEY, {})[number] = start.row_map


def reached(begun: Sequence[Start]) -> dict[Edge, _Rows]:
    """Find the proved outputs, and the layers beside them, that some values of a loss were computed from.

    Args:
        begun: The values.

    Returns:
        Each with its row map: an output's as it was noted, a layer's as its rows were read.
    """
    pending, seen, found = [edge_of(start.edge.source) for start in begun], set[Edge](), dict[Edge, _Rows]()
    while pending:
        edge = pending.pop()
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        row_map, use = edge[0].metadata.get(_KEY, {}).get(edge[1]), edge[0].metadata.get(METADATA_KEY)
        if row_map is not None:
            found[edge] = row_map, ()
        elif use is not None:
            found[edge] = use.row_map, use.order
        else:
            pending += [one for one in edge[0].next_functions if one[0] is not None]
    return found


def keeps_apart(
    begun: Sequence[Start], ends: dict[Edge, _Rows], weights: Sequence[Weights], *, batch_size: int, linear: bool
) -> bool:
    """Return whether samples leave zeros in the other samples' rows of proved outputs, and move none of these.

    Args:
        begun: Values of a loss, and how their rows map to samples.
        ends: The outputs, as `reached` finds them.
        weights: What samples are multiplied by in each backward.
        batch_size: B.
        linear: Whether all of the backward is torch's.

    Returns:
        False where some sample's values touch another sample's row, or another one's gradient changes with them; hooks
        between, and on the outputs, have run.

    Cost:
        For each of them a backward from the values to the outputs; three where gradients differ.
    """
    company = Company(linear=linear)
    # What leads to no layer, such as a parameter that is used outside the forward, is refused where it arrives.
    if ends and not all(_keeps_apart(begun, ends, chosen, company, batch_size) for chosen in weights):
        return False
    if company.differing():
        for chosen in repeated(weights, batch_size):
            _keeps_apart(begun, ends, chosen, company, batch_size)
    return not company.differing()


def _keeps_apart(
    begun: Sequence[Start], ends: dict[Edge, _Rows], weights: Weights, company: Company, batch_size: int
) -> bool:
    """Return whether samples leave zeros in the other samples' rows; what arrives is compared in company."""
    edges: list[Any] = [GradientEdge(*edge) for edge in ends]
    roots, given = roots_of(begun, batch_size, weights)
    with backward_entry.unseen():
        grads = torch.autograd.grad(roots, edges, given, retain_graph=True, allow_unused=True)
    for place, (grad, (row_map, order)) in enumerate(zip(grads, ends.values(), strict=True)):
        if grad is None:
            continue
        ordered = grad.permute(order) if order else grad
        if touches_others(row_map, ordered, ordered.dim(), weights, batch_size):
            return False
        company.take(place, row_map, row_map.split(ordered, ordered.dim(), batch_size), weights)
    return True
