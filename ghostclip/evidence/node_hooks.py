"""Hooks that stand on nodes of autograd's graph, where no layer's parameters can follow what they do to gradients.

A hook on a tensor is called before the gradient is delivered to the layer that made it. One on the node itself
(``y.grad_fn.register_prehook``, and what the first kind of module hooks sets, ``register_backward_hook``) is called
later, or changes what has passed the layer.
"""

from collections.abc import Iterable
from typing import Any, Final

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.row_origin import METADATA_KEY
from ghostclip.errors import UnsupportedModelError

_REFUSED: Final = (
    "{place}: a hook stands on the node that computed {site} ({node}). It changes gradients beside the layer's "
    "parameters, which cannot follow it. Set it on the layer's output, output.register_hook, or on the module, "
    "register_full_backward_hook or register_full_backward_pre_hook."
)


def refuse_node_hooks(roots: Iterable[Any], forward: ForwardContext) -> None:
    """Refuse hooks on the nodes of layers.

    Args:
        roots: The nodes that a backward starts from.
        forward: The forward that it goes through.

    Raises:
        UnsupportedModelError: There is one.

    Cost:
        A look at every node of the graph.
    """
    for node in nodes_behind(roots):
        use = node.metadata.get(METADATA_KEY)
        if use is not None and _torch.has_hooks(node):
            place = forward.around.describe(use.site.names[0])
            raise UnsupportedModelError(
                _REFUSED.format(place=place, site=use.site.describe(), node=type(node).__name__)
            )
