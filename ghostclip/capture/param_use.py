"""`ParamUse`: one operation that brought a parameter and per-sample data together, attached to its output.

Uses live in the autograd graph (in the closure of the hook on their output), so a forward whose graph is dropped leaves
nothing behind. What outlives them is the call site's memory of how rows map to samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.call_sites import (
    AT_ONCE_FORM,
    GENERAL_FORM,
    MAX_ATTEMPTS,
    NEVER,
    CallSite,
    MatrixProduct,
    OperationForm,
    Statistics,
    Way,
    counted_as,
    key_of,
)
from ghostclip.capture.derive import pull_back
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import SavedTensors, enter_graph, may_cast, save_tensors, under_checkpoint, without_view
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.sample_axis import USE_KEY, SampleAxis, set_metadata
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.errors import BatchAxisError, UnsupportedModelError
from ghostclip.factors import AtIndex, Diagonal, Factor, Head, Outer, Permuted, Rows, Stacked, Windows


def no_axis_message(site: CallSite, rows: Tensor, forward: ForwardContext) -> str:
    """Return the text of a ``BatchAxisError``: a tensor has no axis for the samples."""
    if not rows.dim():
        return (
            f"{site.describe()}: it meets a number that was computed from all {forward.batch_size} samples of this "
            "batch, such as a loss that is a mean over them. Let it meet each sample's own value, shape (B,), and "
            "return that: (-log_var).exp() * each + log_var; the loop takes the mean."
        )
    return (
        f"{site.describe()}: an input of shape {tuple(rows.shape)} has no axis for the {forward.batch_size} samples of "
        "this batch (rows of the model's first input), so its rows cannot be assigned to samples. Give every sample "
        "its own rows (batch axis first, or make_private(..., batch_first=False) for axis 1), or freeze the parameter. "
        "Records of several parts each (bags, boxes, graphs): pad them to one tensor (B, most parts, ...), with a mask "
        "that is 1 at a record's own parts."
    )


def differentiated_message(site: CallSite, location: str) -> str:
    """Return the error text for a gradient that passed a site and is to be differentiated itself."""
    return (
        f"{location}: a backward with create_graph=True passed {site.describe()}. What a gradient penalty (WGAN-GP, "
        "double backward) adds to the gradient of this parameter reaches it through the backward, where it cannot be "
        "clipped per sample. Leave the penalty out, take it with create_graph=False, or freeze the parameter."
    )


class Listener(Protocol):
    """Receiver of the gradients of captured outputs."""

    def receive(self, use: "ParamUse", grad: Tensor) -> None:
        """Take the gradient of a use's output."""


# (saved tensors, gradient, split) -> factors by argument name
FactorFunction = Callable[[Sequence[Tensor], Tensor, Callable[[Tensor, int], Tensor]], Mapping[str, Factor]]


@dataclass(eq=False, slots=True)
class ParamUse:
    """One consumption of parameters, with all that its backward needs."""

    site: CallSite
    forward: ForwardContext
    targets: dict[str, TrackedTensor]  # the tracked arguments by name
    factors: FactorFunction  # the rule's closure
    num_batch_dims: int  # how many leading axes of the output are rows
    maps: list[RowMap]  # row maps that the sizes allow, the preferred one first
    node: Any = None  # side node with the saved tensors, or None
    behind: Any = None  # the node that made the rows of data, or None
    batch_dim_sizes: tuple[int, ...] = ()
    wants_input_gradient: bool = True  # whether its data is in the graph, or was put into another order
    alike: OperationForm | None = None  # key of uses whose factors can be formed at once; None where none can be
    versions: Mapping[str, int] | None = None  # of each target that was computed from parameters; see `versions_of`
    order: tuple[int, ...] = ()  # axes of the output, those of its rows first; empty where rows lead already

    @property
    def row_map(self) -> RowMap:
        """The row map in force: the one confirmed at this site; before, "whole" in a batch of one, else the first."""
        chosen = self.site.chosen
        if chosen is None and self.maps:
            return next((row_map for row_map in self.maps if row_map.kind == "whole"), self.maps[0])
        for row_map in self.maps:
            if chosen is not None and row_map.fits(chosen):
                return row_map
        raise BatchAxisError(
            f"{self.site.describe()}: rows were found to map to samples as {self.site.chosen}, but the sizes of this "
            f"step (batch size {self.forward.batch_size}) do not allow it. Keep the layout of the batch constant."
        )

    def arrive(self, grad: Tensor) -> Tensor:
        """Hand the gradient of the output to the running pass: the hook on the output."""
        # Returns what is handed on to autograd: one copy serves the norm, the clipped sum and the layer's own backward.
        grad = grad.contiguous()
        self.forward.around.deliver(self, grad.permute(self.order) if self.order else grad)
        return grad

    def release(self) -> None:
        """Drop the saved tensors, as its backward is over, unless whoever ran it wants another one."""
        if not self.forward.retained:
            self.node = self.behind = None

    def sample_axis(self) -> SampleAxis | None:
        """Return where samples lie in its output; None where there is no evidence yet, or one sample has it all."""
        site, maps = self.site, self.maps
        if site.located is not None and site.located[0] is maps and site.located[1] == site.chosen:
            return site.located[2]
        if not maps or (site.chosen is None and len(maps) > 1 and maps[0].is_guessed):
            return None
        rows = self.row_map.sample_axis(self.batch_dim_sizes, self.forward.batch_size)
        if rows is not None and self.order:
            rows = rows._replace(axis=self.order[rows.axis])
        if rows is None or rows.order is None:
            site.located = maps, site.chosen, rows
        return rows

    def parameter_factors(self, grad: Tensor) -> list[tuple[str, Factor]]:
        """Return (name, factor) of this use for every parameter behind it."""
        saved = self.node.saved_tensors if self.node is not None else ()
        split = partial(self.row_map.split, batch_size=self.forward.batch_size)
        pairs: list[tuple[str, Factor]] = []
        is_explained = grad.numel() <= self.site.largest
        for key, factor in self.factors(saved, grad, split).items():
            pulled = self._pulled(key, factor)
            if not is_explained or key not in self.site.statistics:
                self.record(key, factor, grad, saved, pulled[0][1] if len(pulled) == 1 else None)
            pairs += pulled
        return pairs

    def record(self, key: str, factor: Factor, grad: Tensor, saved: Sequence[Tensor], pulled: Factor | None) -> None:
        """Store statistics of an argument for the coverage report."""
        # `pulled`: the factor of the parameter behind the argument where there is one only.
        self.site.statistics[key] = statistics_of(self, key, factor, grad, saved, pulled)
        self.site.largest = grad.numel()

    def _pulled(self, key: str, factor: Factor) -> list[tuple[str, Factor]]:
        """Return (name, factor) of the trainable parameters behind a tracked argument, given the argument's factor."""
        origin = self.targets[key].origin
        if not origin.func:
            ((name, leaf),) = origin.leaves.items()
            if isinstance(factor, Head):
                # An embedding tied to the head will ask for the gradients of the rows at these ids.
                factor.expect(self.forward.looked_up.get(name, ()))
            return [(name, factor)] if leaf.parameter.requires_grad else []
        # A parameter itself may be: an embedding with max_norm renormalises the rows it looks up.
        assert self.versions is not None, "who computed the target noted them"
        if _torch.version(origin.graph) != self.versions[key]:
            raise UnsupportedModelError(
                f"{self.site.describe()}: what was computed from the parameter was changed in place after this "
                "operation had used it. Change a copy of it (w = w + 1 in the place of w += 1), or freeze the "
                "parameter."
            )
        pulled = pull_back(self.targets[key], factor)
        return [(name, part) for name, part in pulled if origin.leaves[name].parameter.requires_grad]


def statistics_of(
    use: ParamUse, key: str, factor: Factor, grad: Tensor, saved: Sequence[Tensor], pulled: Factor | None
) -> Statistics:
    """Return the statistics of an argument, without any tensor."""
    tracked = use.targets[key]
    form, value = use.site.forms.get(tracked.origin.names[0], ""), tracked.origin.value
    parts = list(_parts(factor))
    products = tuple(product_of(part) for part in parts if isinstance(part, (Outer, Head)))
    kind = _kind(parts[0]) if parts else "dense"
    if form in (GENERAL_FORM, AT_ONCE_FORM):
        kind, products = "general", _guessed(value, grad, factor.batch_size)
    inside = next((item.index for item in (factor, pulled) if isinstance(item, AtIndex)), ())
    return Statistics(
        names=tracked.origin.names,
        kind=kind,
        samples=factor.batch_size,
        products=products,
        materialised=bool(products) and not _stays_factored(pulled),
        derived=bool(tracked.origin.func),
        elements=sum(grad.numel() if isinstance(part, Windows) else part.added_elements() for part in parts),
        itemsize=grad.element_size(),
        needs_input_gradient=use.wants_input_gradient,
        recomputed=use.forward.runs_again,
        input_key=_key_of(saved[0]) if saved else 0,
        input_elements=saved[0].numel() if saved else 0,
        slice_of=str(inside) if inside else "",
    )


def _key_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor among those that live; also where it has no memory."""
    return hash((_torch.memory_key(tensor), tensor.storage_offset(), tensor.shape))


def _parts(factor: Factor) -> Iterator[Factor]:
    """Yield the factors inside factors of slices, permutations and stacks."""
    if isinstance(factor, (AtIndex, Permuted)):
        yield from _parts(factor.inner)
    elif isinstance(factor, Stacked):
        for part in factor.parts.values():
            yield from _parts(part)
    else:
        yield factor


def _stays_factored(pulled: Factor | None) -> bool:
    return pulled is not None and any(isinstance(part, (Outer, Head)) for part in _parts(pulled))


def _kind(part: Factor) -> str:
    kinds = {Outer: "outer", Head: "outer", Rows: "rows", Diagonal: "diagonal"}
    return kinds.get(type(part), "dense")


def product_of(outer: Outer | Head) -> MatrixProduct:
    """Return the matrix product behind a factor, with the FLOPs of its norm."""
    if isinstance(outer, Head):
        # Its logits are formed twice more, for the norm and for the sum.
        norm = outer.norm_flops() + 4 * prod(outer.sizes)
        return MatrixProduct(outer.batch_size, *outer.sizes, kept=False, norm=norm, plan="tiles of logits")
    plan, flops = outer.norm_plan()
    count = outer.batch_size * outer.slots
    return MatrixProduct(count, *outer.sizes, kept=outer.stores_gradient(), norm=flops, plan=plan)


def _guessed(weight: Tensor, grad: Tensor, samples: int) -> tuple[MatrixProduct, ...]:
    """Return the product that a weight without a rule would have as a linear map; empty where it has one axis."""
    if weight.dim() < 2 or grad.dim() == 0:
        return ()
    positions = grad.numel() // max(1, grad.shape[-1] * samples)
    return (MatrixProduct(samples, positions, weight.shape[-1], weight.numel() // max(1, weight.shape[-1])),)


def versions_of(targets: Mapping[str, TrackedTensor]) -> Mapping[str, int]:
    """Return the versions of targets that were computed from parameters, by argument."""
    computed = {key: target.origin for key, target in targets.items() if target.origin.func}
    return {key: _torch.version(origin.graph) for key, origin in computed.items()}


def site_of(
    forward: ForwardContext, tracked: Iterable[TrackedTensor], name: str, form: str, gathered: str = ""
) -> CallSite:
    """Return the call site of the next use of some tracked tensors by an operation, which is counted."""
    tracked = list(tracked)
    key = key_of(tracked, name)
    visit_key = counted_as(key)
    calls, uses = forward.visits.get(visit_key, NEVER)
    forward.visits[visit_key] = calls, uses + 1
    return forward.around.sites.at((key, uses + 1), tracked, form, gathered)


def register(use: ParamUse, node: Any, behind: Any) -> None:
    """Count a new use in its forward, and mark the forward as unproved where its call site is."""
    forward, again = use.forward, _torch.in_backward()
    # Where tensors are stored here, no hooks on saved tensors are active.
    checkpointed = type(use.node) is not SavedTensors and under_checkpoint()
    if again:
        # The other kind of checkpointing recomputes under hooks of its own, and what it registers then is dropped.
        sites = forward.around.sites
        sites.reentrant = sites.reentrant or not checkpointed
    else:
        # What is run again in a backward is no further use: counting it would keep its factors waiting.
        count(use, node, behind)
    if checkpointed:
        forward.record_checkpointing(again=again)
    if use.site.attempts < MAX_ATTEMPTS:
        forward.unproven = True


def count(use: ParamUse, node: Any, behind: Any) -> None:
    """Record a use in its forward: its sizes, the input it stores, and the way by which the forward reached it."""
    forward, site = use.forward, use.site
    if _torch.any_autocast() and forward.autocast is None:
        kind = next(iter(use.targets.values())).origin.value.device.type
        forward.autocast = torch.get_autocast_dtype(kind) if _torch.autocast_is_on(kind) else None
    forward.uses.append((site, use.batch_dim_sizes))
    if not use.batch_dim_sizes:
        entries = sum(tracked.origin.value.numel() for tracked in use.targets.values())
        forward.unplanned += forward.batch_size * entries
    saved = use.node
    if type(saved) is SavedTensors and saved.address:
        forward.addresses.append(saved.address)
    if node is not None and forward.batch_size > 1:
        rows, latest = forward.around.rows, forward.latest
        steps = 0 if latest is None or behind is None else _torch.order_of(behind) - latest
        way: Way = steps, type(behind), rows.calls_since() if rows.odd else 0
        forward.latest = _torch.order_of(node)
        if way == site.way:
            return
        if way in site.ways:
            site.way = way
        else:
            forward.require_evidence(site.ways, way)


def run_and_save(use: ParamUse, run: Callable[[], Tensor], saved: Sequence[Tensor], *, product: bool) -> Tensor:
    """Run an operation, store what its backward needs in the use, and return the output as it is."""
    # product: a product of matrices, which autocast forms in 16 bits and which changes no input.
    if use.site.operation == "embedding":
        # The ids by which rows of its table are looked up.
        for name in use.site.names:
            use.forward.looked_up[name].append(saved[0])
    if product and saved and _torch.any_autocast() and may_cast(saved[0]):
        output, casts = run(), use.forward.casts
        use.node = save_tensors([casts.of(tensor, output.dtype) for tensor in saved])
        return output
    # Kept before the operation runs, which may change its input in place (then reading it back is an error).
    use.node = save_tensors(saved) if saved else None
    return run()


def attached(
    use: ParamUse, output: Tensor, *, behind: Any, anchored: bool, hook: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Register a use; return its output, no view and behind it the anchor; ``hook`` returns the gradient to go on."""
    # `anchored`: the graph of its data, which the node `behind` made, leads to the anchor.
    anchor = use.forward.around.anchor
    if not output.requires_grad:
        output = enter_graph(output, anchor)
    elif not anchored or _torch.is_view(output):
        output = without_view(output, anchor, anchored=anchored)
    node = _torch.hear_gradient(output, hook or use.arrive)
    register(use, node, behind)
    set_metadata(node, USE_KEY, use)
    return output
