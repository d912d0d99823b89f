"""Run an operation whose use is described, and attach the use to its output."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ghostclip.capture.nodes import enter_graph, keep, own
from ghostclip.capture.provenance import METADATA_KEY, leads_to
from ghostclip.capture.usage import Use

if TYPE_CHECKING:
    from ghostclip.capture.session import Session


def carry_out(
    session: "Session",
    use: Use,
    run: Callable[[], Tensor],
    *,
    rows: Tensor,
    saved: Sequence[Tensor],
    order: tuple[int, ...],
) -> Tensor:
    """Run an operation and register its use.

    Args:
        session: Who lent the parameters.
        use: The use.
        run: Runs the operation on detached parameters.
        rows: The data that it consumes them with.
        saved: What the backward will want back.
        order: Axes of the output, those of its rows first; empty where rows lead already.

    Returns:
        The operation's output, in the graph, with the use on its node.
    """
    # Kept before the operation runs, which may change its input in place (then reading it back is an error).
    use.node = keep(saved) if saved else None
    return attached(session, use, run(), rows=rows, hook=delivery(session, use, order))


def attached(session: "Session", use: Use, output: Tensor, *, rows: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """Register a use and attach it to the output it has made.

    Args:
        session: Who lent the parameters.
        use: The use.
        output: What it computed.
        rows: The data behind it in the graph.
        hook: Hands the output's gradient on.

    Returns:
        The output, in the graph, with the use on its node.
    """
    if output.requires_grad:
        output = own(output, session.anchor, anchored=leads_to(rows, session.anchor))
    else:
        output = enter_graph(output, session.anchor)
    session.register(use)
    output.register_hook(hook)
    node: Any = output.grad_fn
    node.metadata[METADATA_KEY] = use
    return output


def delivery(session: "Session", use: Use, order: tuple[int, ...] = ()) -> Callable[[Tensor], Tensor]:
    """Return the hook that hands the gradient of a use's output to the session.

    Args:
        session: Who is told.
        use: The use.
        order: As for `carry_out`.

    Returns:
        A hook for ``Tensor.register_hook``.
    """

    def hook(grad: Tensor) -> Tensor:
        # Handed on to autograd as well: one copy serves the norm, the clipped sum and the layer's own backward.
        grad = grad.contiguous()
        session.deliver(use, grad.permute(order) if order else grad)
        return grad

    return hook
