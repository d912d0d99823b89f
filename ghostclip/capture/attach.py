"""Run an operation whose use is described, and attach the use to its output."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.casts import may_cast
from ghostclip.capture.nodes import enter_graph, keep, own
from ghostclip.capture.param_use import ParamUse, register
from ghostclip.capture.row_origin import METADATA_KEY, leads_to


def carry_out(
    use: ParamUse,
    run: Callable[[], Tensor],
    *,
    rows: Tensor,
    saved: Sequence[Tensor],
    order: tuple[int, ...],
    product: bool = False,
) -> Tensor:
    """Run an operation and register its use.

    Args:
        use: The use.
        run: Runs the operation on detached parameters.
        rows: The data that it consumes them with.
        saved: What the backward will want back.
        order: Axes of the output, those of its rows first; empty where rows lead already.
        product: Whether it is a product of matrices, which autocast forms in 16 bits and which changes no input.

    Returns:
        The operation's output, in the graph, with the use on its node.
    """
    if use.site.operation == "embedding":
        for name in use.site.names:
            use.forward.looked_up[name].append(saved[0])
    if product and saved and may_cast(saved[0]):
        output, casts = run(), use.forward.casts
        use.node = keep([casts.of(tensor, output.dtype) for tensor in saved])
        return attached(use, output, rows=rows, hook=delivery(use, order))
    # Kept before the operation runs, which may change its input in place (then reading it back is an error).
    use.node = keep(saved) if saved else None
    return attached(use, run(), rows=rows, hook=delivery(use, order))


def attached(use: ParamUse, output: Tensor, *, rows: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """Register a use and attach it to the output it has made.

    Args:
        use: The use.
        output: What it computed.
        rows: The data behind it in the graph.
        hook: Hands the output's gradient on.

    Returns:
        The output, in the graph, with the use on its node.
    """
    anchor = use.forward.around.anchor
    if output.requires_grad:
        output = own(output, anchor, anchored=leads_to(rows, anchor))
    else:
        output = enter_graph(output, anchor)
    node = _torch.hear_gradient(output, hook)
    register(use, node, rows.grad_fn)
    node.metadata[METADATA_KEY] = use
    return output


def delivery(use: ParamUse, order: tuple[int, ...] = ()) -> Callable[[Tensor], Tensor]:
    """Return the hook that delivers the gradient of a use's output.

    Args:
        use: The use.
        order: As for `carry_out`.

    Returns:
        A hook for ``Tensor.register_hook``.
    """
    deliver = use.forward.around.deliver

    def hook(grad: Tensor) -> Tensor:
        # Handed on to autograd as well: one copy serves the norm, the clipped sum and the layer's own backward.
        grad = grad.contiguous()
        deliver(use, grad.permute(order) if order else grad)
        return grad

    return hook
