"""Backwards that somebody has written, custom autograd functions and hooks: whether gradients follow their scale.

A mean over the batch divides each sample's gradient by B, and what arrives at the layers is multiplied by B again. That
gives the gradient of the sample's own loss as long as the backward is linear, as all of torch's are. A gradient that is
clamped, reduced to its sign or divided by its norm on the way is another one for another B: a sample that is removed
changes what all others contribute. So the backward of such a loss is run with its gradient scaled by powers of two,
which rounding lets pass: what arrives must be scaled by as much.

A backward may also follow the batch itself (``g * len(g)``, a hook that divides by a deviation of the forward's
values), which no output shows. So the gradients of some samples are compared with those that they have beside others,
and alone. Where a forward takes values out of the graph, torch's own backwards may do the same: of
``h * s + (h - h * s).detach()`` nobody sees s but the gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch, _tree
from ghostclip.capture import backward_entry
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import hooks_of_others
from ghostclip.capture.nodes import edge_of, nodes_behind
from ghostclip.capture.ranks import on_any
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.substitution import untouched_grads
from ghostclip.checks.batches import Batch, WithoutDropout, unnoticed
from ghostclip.checks.independence import FEWER_TOLERANCE, coarsest_dtype
from ghostclip.checks.loss_graph import Unheard, above_outputs, proved_outputs, separates_samples
from ghostclip.checks.module_state import restored
from ghostclip.checks.probe import OUTSTANDING, REPEATS, GradientSource, Probe, Start, Weights, run_probe, source_at
from ghostclip.checks.unchecked import BACKWARDS, Unchecked
from ghostclip.errors import LossReductionError, SampleMixingError

# Powers of two by which gradients are scaled: enough to get to a bound far away, and few where 16 bits end soon.
_POWERS: Final = (20, -20)
_FEW_POWERS: Final = (2, -2)
# What a gradient may be by rounding alone, as a share of the largest one and of a tolerance.
_ROUNDING: Final = 1e-3
_FOLLOWS_SIZE: Final = (
    "{where} is not scaled as the loss is: a backward function or a hook clamps it, takes its sign or divides it by "
    "its norm. A mean over the batch hands it gradients divided by the number of samples, so that removing one sample "
    "would change what all others contribute. Declare loss_reduction='sum' and call backward on the sum of the "
    "samples' losses, or call clipper.backward(losses): then each gradient is that of the sample's own loss."
)
_FOLLOWS_BATCH: Final = (
    "{place}: the gradient of some samples' outputs came to parameter '{parameter}' as another one when the other "
    "samples were {what}, although these outputs did not change: a backward function, a hook, or a factor beside a "
    "detached value, follows the batch (its size, a statistic of its values). Removing one sample would change what "
    "all others contribute. Treat each sample's rows by themselves."
)


def has_custom_backwards(roots: Sequence[Any], forward: ForwardContext) -> bool:
    """Return whether a backward goes through code that is not torch's: a custom autograd function, or a hook.

    Cost:
        A look at every node of the graph.
    """
    # True also where a hook was set on another value since the forward began.
    if hooks_of_others() != forward.hooks_before:
        return True
    return any(_is_custom(node) for node in nodes_behind([edge_of(root)[0] for root in roots]))


def is_linear(roots: Sequence[Any], capture: CaptureContext, forward: ForwardContext) -> bool:
    """Return whether gradients of a forward's layers follow the scale of what they come from, to the bit."""
    # False where a backward goes through code that is not torch's, on any rank that runs it together with this one; and
    # where there are numbers of float16, which end too soon.
    return not on_any(capture.gathering, forward.has_float16 or has_custom_backwards(roots, forward))


def loss_has_custom_backwards(roots: Sequence[Any], forward: ForwardContext) -> bool:
    """Return the same of the backward from a loss to a model's outputs.

    Cost:
        A look at every node between the two.
    """
    # True also where a hook was set on any value since the forward ended.
    return _hooked_since(forward) or any(_is_custom(node) for node, _ in above_outputs(map(edge_of, roots)))


def without_scale(capture: CaptureContext, begun: Sequence[Start]) -> str:
    """Return why a mean is refused: a layer's gradient that does not follow the scale of the outputs'; else "".

    Cost:
        Three backwards; more where something differs.
    """
    # Returns the refusal of means, for `refuse_means_without_scale`; empty where there is no such layer.
    probe, states = Probe({}, capture.describe_module), capture.sites.states()
    size, anywhere = capture.forward.batch_size, partial(on_any, capture.gathering)
    with capture.listening(probe):
        run_probe(probe, begun, batch_size=size, run=capture.run_backward, weights=_scales(capture), on_any=anywhere)
    capture.sites.restore(states)
    if not probe.unsteady:
        return ""
    site = probe.unsteady[0][0].site
    return _FOLLOWS_SIZE.format(
        where=f"{capture.describe_module(site.names[0])}: the gradient that comes to {site.describe()}"
    )


def _scales(capture: CaptureContext) -> list[Weights]:
    """Return weights for several backwards: all samples by one power of two each."""
    powers = _FEW_POWERS if capture.forward.has_float16 else _POWERS
    return [dict.fromkeys(range(capture.forward.batch_size), 2.0**power) for power in (0, *powers)]


def refuse_means_without_scale(capture: CaptureContext, roots: Sequence[Any], forward: ForwardContext) -> None:
    """Refuse the backward of a mean whose gradients do not follow their scale on their way to the model's outputs.

    Cost:
        A look at the graph of the loss where all of its backward is torch's; else as for `without_scale`.
    """
    # Hooks that were set since the forward ended may stand inside the model: then all of the backward is looked at.
    if not on_any(capture.gathering, loss_has_custom_backwards(roots, forward)):
        return
    sources = [GradientSource.of(root) if isinstance(root, Tensor) else source_at(*edge_of(root)) for root in roots]
    # All of a loss is multiplied alike.
    begun = [
        Start(source, RowMap("gathered", 0, torch.zeros(source.shape[:1] or 1, dtype=torch.int64)))
        for source in sources
        if source is not None
    ]
    ends = None if _hooked_since(forward) else proved_outputs(begun)
    if ends is None:
        said = without_scale(capture, begun)
    else:
        with capture.listening(Unheard()):
            same = separates_samples(begun, ends, _scales(capture), batch_size=forward.batch_size, linear=False)
        said = "" if same else _FOLLOWS_SIZE.format(where="the gradient of the model's outputs")
    if said:
        raise LossReductionError(said)


def refuse_backwards_of_the_batch(
    capture: CaptureContext, run: Callable[[Any], list[Tensor]], batch: Batch, unchecked: Unchecked, *, alone: bool
) -> None:
    """Refuse a model whose gradients of some samples' outputs change with the other samples, or with their number.

    Cost:
        Two forwards, each with a backward; four if samples are looked at alone. Where something differs, four more.
    """
    # `run` runs that forward once more on other inputs, not captured, and returns its output tensors. `alone`: samples
    # are looked at alone as well: their number may be followed, and not their values only. A smaller batch rounds
    # otherwise, so that what stands at a kink may have another gradient there.
    model, rest, left = capture.model, batch.others(batch.drawn), batch.subset
    tensors = [*capture.substitution.present.values(), *model.buffers()]
    wants = any(tensor.requires_grad for tensor in _tree.tensors(batch.inputs))

    def leaf(item: Any) -> Any:
        # What the inputs were computed from is none of the model's, and its graph is for one backward only.
        if not isinstance(item, Tensor):
            return item
        return item.detach().requires_grad_(wants and item.is_floating_point())

    def arrived(inputs: Any, samples: Sequence[int], size: int) -> dict[str, Tensor]:
        before.restore()
        with torch.enable_grad(), WithoutDropout() as dropout, capture.substitution.copied() as copies:
            roots, grads = _weighted(run(_tree.mapped(leaf, inputs)), batch, samples, size)
            with untouched_grads(roots), backward_entry.unseen(), dropout.behind(roots):
                torch.autograd.backward(roots, grads)
                return {name: _about(copy.grad) for name, copy in copies.items() if copy.grad is not None}

    replaced = (batch.inputs, rest, batch.size), (batch.copied(batch.drawn), rest, batch.size)
    try:
        with restored(model), unnoticed(tensors) as before:
            coarsest = coarsest_dtype(tensors, batch.autocast)
            differences = [(*_standing_out(arrived, *replaced, coarsest), "replaced")]
            # In a batch of another size samples meet other numbers.
            draws = alone and before.drawn()
            if alone and not draws:
                few = batch.of_samples(left), range(len(left)), len(left)
                left_out = _standing_out(arrived, (batch.inputs, left, batch.size), few, coarsest)
                differences.append((*left_out, "left out"))
    except Exception as error:  # noqa: BLE001 - what it does on other batches is no reason to refuse this one
        unchecked.missed(f"the model raised {type(error).__name__} on another batch", BACKWARDS)
        return
    for name, _, what in differences:
        if name:
            location = capture.describe_module(name)
            raise SampleMixingError(_FOLLOWS_BATCH.format(place=location, parameter=name, what=what))
    if draws or any(noisy for _, noisy, _ in differences):
        unchecked.missed("random numbers are drawn" if draws else "gradients differ between runs or are NaN", BACKWARDS)
        return
    unchecked.ran(BACKWARDS)


def _about(grad: Tensor) -> Tensor:
    """Return two numbers that identify a gradient: its norm and a scaled sum of its entries, shape ``(2,)``."""
    values = (grad.to_dense() if grad.is_sparse else grad).flatten()
    return torch.stack([values.norm(), values.sum() / max(1, len(values)) ** 0.5]).double()


def _standing_out(
    arrived: Callable[..., dict[str, Tensor]], one: Sequence[Any], other: Sequence[Any], coarsest: torch.dtype
) -> tuple[str, bool]:
    """Return (a parameter whose gradients in two backwards differ beyond noise or "", whether any differ at all)."""
    first, second = arrived(*one), arrived(*other)
    names = _differing(first, second, coarsest)
    if not names:
        return "", False
    again = [(grads, arrived(*run)) for grads, run in ((first, one), (second, other)) for _ in range(REPEATS)]
    noise = {name: max(_off(grads, repeat, name) for grads, repeat in again) for name in names}
    return next((name for name in names if _off(first, second, name) > OUTSTANDING * noise[name]), ""), True


def _off(one: dict[str, Tensor], other: dict[str, Tensor], name: str) -> float:
    """Return the distance of a parameter's two gradients; 0 where one of them is missing."""
    if name not in one or name not in other:
        return 0.0
    # No number, which is beyond nothing, where a sample's own gradient is none, which is so in the first batch already.
    distance = (one[name] - other[name]).abs().max()
    return float(distance if one[name].isnan().any() else distance.nan_to_num(torch.inf))


def _differing(one: dict[str, Tensor], other: dict[str, Tensor], coarsest: torch.dtype) -> list[str]:
    """Return the names of parameters whose gradients differ beyond rounding."""
    if not one:
        return []
    largest = torch.stack([about[0] for about in one.values()]).nan_to_num().max()
    names = list[str]()
    for name in one.keys() & other.keys():
        first, second = one[name].nan_to_num(), other[name].nan_to_num()
        # A gradient may be zero but for rounding, as that of a bias that attention does not depend on.
        scale = torch.maximum(first, second)[0] + _ROUNDING * largest
        if bool((first - second).abs().max() > FEWER_TOLERANCE[coarsest] * scale):
            names.append(name)
    return names


def _weighted(
    outputs: Sequence[Tensor], batch: Batch, samples: Sequence[int], size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs with rows of samples, and gradients that weigh all of some samples alike, zero elsewhere."""
    roots, grads = list[Tensor](), list[Tensor]()
    for output, known in zip(outputs, batch.maps_of(outputs), strict=True):
        row_map = known or (batch.map_by_shape(output) if size == batch.size else None)
        if row_map is None or row_map.kind == "gathered" or not output.requires_grad:
            continue
        leaf = torch.zeros_like(output, requires_grad=True)
        with torch.enable_grad():
            rows = row_map.split(leaf, leaf.dim(), size)
            count = rows[:1].numel()
            weights = torch.linspace(0.5, 1.5, count, dtype=output.dtype, device=output.device).view(rows.shape[1:])
            chosen = rows.index_select(0, torch.tensor(list(samples), device=output.device))
            (grad,) = torch.autograd.grad((chosen * weights).sum(), leaf)
        roots.append(output)
        grads.append(grad)
    return roots, grads


def _is_custom(node: Any) -> bool:
    """Return whether the backward of a node is neither torch's nor ours, which pass gradients on as they are."""
    module = _torch.module_of_function(node)
    return module is not None and module.partition(".")[0] != "ghostclip"


def _hooked_since(forward: ForwardContext) -> bool:
    """Return whether anybody has set a hook on a value since a forward ended."""
    return hooks_of_others() != forward.hooks_until
