"""Run an operation whose use is described, and attach the use to its output."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.casts import may_cast
from ghostclip.capture.forward import Counted
from ghostclip.capture.inputs import under_checkpoint
from ghostclip.capture.nodes import Kept, enter_graph, keep, own
from ghostclip.capture.param_use import ParamUse, count, register
from ghostclip.capture.row_origin import METADATA_KEY, leads_to, note


def carry_out(
    use: ParamUse,
    run: Callable[[], Tensor],
    *,
    rows: Tensor,
    saved: Sequence[Tensor],
    product: bool = False,
) -> Tensor:
    """Run an operation on detached parameters and attach its use to the output."""
    # rows: the data that it consumes the parameters with. product: a product of matrices, which autocast forms in 16
    # bits and which changes no input.
    output = run_and_keep(use, run, saved, product=product)
    return attached(use, output, rows=rows, hook=delivery(use) if use.order else use.arrive)


def attached_again(use: ParamUse, output: Tensor, *, anchored: bool, counted: Counted | None) -> Tensor:
    """Attach a use to its output where the operation was decided on in an earlier forward, at a proven site."""
    # No backward is running. `anchored`: the graph of its data leads to the anchor.
    forward = use.forward
    if not output.requires_grad:
        output = enter_graph(output, forward.around.anchor)
    elif not anchored or _torch.is_view(output):
        output = own(output, forward.around.anchor, anchored=anchored)
    node = _torch.hear_gradient(output, delivery(use) if use.order else use.arrive)
    count(use, node, use.behind, counted)
    if type(use.node) is not Kept and under_checkpoint():
        forward.note_checkpointing(again=False)
    note(node, METADATA_KEY, use)
    return output


def run_and_keep(use: ParamUse, run: Callable[[], Tensor], saved: Sequence[Tensor], *, product: bool) -> Tensor:
    """Run an operation, store what its backward needs in the use, and return the output as it is."""
    if use.site.operation == "embedding":
        look_up(use, saved[0])
    if product and saved and may_cast(saved[0]):
        output, casts = run(), use.forward.casts
        use.node = keep([casts.of(tensor, output.dtype) for tensor in saved])
        return output
    # Kept before the operation runs, which may change its input in place (then reading it back is an error).
    use.node = keep(saved) if saved else None
    return run()


def look_up(use: ParamUse, ids: Tensor) -> None:
    """Note the ids by which rows of a table are looked up."""
    for name in use.site.names:
        use.forward.looked_up[name].append(ids)


def attached(use: ParamUse, output: Tensor, *, rows: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """Register a use and attach it to its output; ``hook`` hands the output's gradient on."""
    anchor = use.forward.around.anchor
    if output.requires_grad:
        output = own(output, anchor, anchored=leads_to(rows, anchor))
    else:
        output = enter_graph(output, anchor)
    node = _torch.hear_gradient(output, hook)
    register(use, node, rows.grad_fn)
    note(node, METADATA_KEY, use)
    return output


def delivery(use: ParamUse) -> Callable[[Tensor], Tensor]:
    """Return the hook that delivers the gradient of an output whose rows do not lead."""
    # Elsewhere `ParamUse.arrive` is one.
    order, deliver = use.order, use.forward.around.deliver

    def hook(grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        deliver(use, grad.permute(order))
        return grad

    return hook
