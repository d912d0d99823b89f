"""A picture of one linear layer's operations, before and after a private step is made of them."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

import ghostclip
from ghostclip.graph.trace import operation

# Operations that move no number, or make a constant.
_PLAIN = frozenset(
    {
        *("view", "reshape", "t", "transpose", "permute", "detach", "unsqueeze", "expand", "ones_like", "empty"),
        *("to", "to_copy", "scalar_tensor", "cat", "bitwise_and", "bitwise_or", "bitwise_not", "lt", "nan_to_num"),
    }
)
_WIDTH, _HEIGHT, _STEP, _COLUMN = 210, 26, 40, 300


def draw() -> str:
    """Trace a linear layer, and draw both graphs side by side."""
    model = nn.Linear(24, 16)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph")

    def losses(model: nn.Module, x_BTI: Tensor) -> Tensor:
        return model(x_BTI).square().sum((1, 2))

    step = ghostclip.GraphStep(clipper, losses, options=ghostclip.GraphOptions(backend="aten"))
    step(torch.randn(8, 32, 24))
    columns = [_column(step.graphs[0].joint.graph, 0), _column(step.graphs[0].graph, 1)]
    height = 60 + _STEP * max(len(boxes) for _, boxes in columns)
    width = 2 * _COLUMN + 20
    titles = "".join(
        f'<text x="{20 + place * _COLUMN}" y="24" font-weight="bold">{title}</text>'
        for place, title in enumerate(("before", "after"))
    )
    lines = "".join(line for own, _ in columns for line in own)
    boxes = "".join(box for _, own in columns for box in own)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{titles}{lines}{boxes}</svg>\n'
    )


def _column(graph: fx.GraphModule, place: int) -> tuple[list[str], list[str]]:
    """Return the lines and the boxes of one graph, operations below each other in their order."""
    shown = [node for node in graph.graph.nodes if node.op == "call_function" and operation(node) not in _PLAIN]
    heights = {node: 40 + _STEP * row for row, node in enumerate(shown)}
    left = 20 + place * _COLUMN
    lines, boxes = [], []
    for row, node in enumerate(shown):
        for source in _sources(node):
            near = shown.index(source) == row - 1
            x = left + _WIDTH / 2 if near else left + _WIDTH
            start, end = heights[source] + (_HEIGHT if near else _HEIGHT / 2), heights[node] + (0 if near else 9)
            bend = x if near else x + 10 + 5 * (row - shown.index(source))
            lines.append(f'<path d="M{x} {start} C{bend} {start} {bend} {end} {x} {end}" fill="none" stroke="#888"/>')
        colour = "#dce9f7" if node.meta["val"].shape[:1] in ((8,), (256,)) else "#f7dcc4"
        shape = "×".join(map(str, node.meta["val"].shape))
        boxes.append(
            f'<rect x="{left}" y="{heights[node]}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{colour}"/>'
            f'<text x="{left + 8}" y="{heights[node] + 17}">{operation(node)}</text>'
            f'<text x="{left + _WIDTH - 8}" y="{heights[node] + 17}" text-anchor="end">{shape}</text>'
        )
    return lines, boxes


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return the operations that are shown whose results lead to a node."""
    found, pending = set[fx.Node](), list(node.all_input_nodes)
    while pending:
        one = pending.pop()
        if one.op != "call_function":
            continue
        if operation(one) in _PLAIN:
            pending += one.all_input_nodes
        else:
            found.add(one)
    return found
