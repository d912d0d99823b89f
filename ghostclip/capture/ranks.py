"""Models on several ranks: ranks that gather parameters, wrappers that add up, operations on parts of parameters.

Where parameters are gathered while modules run, every gathering is a collective operation, in which all ranks take part
or all wait. What one rank does beyond the others (proofs of a forward, which depend on its samples) must therefore
gather nothing. What a forward exchanges with other ranks no evidence of one rank can show.

Operations on parameters of which ranks hold parts (tensor parallelism) run on this rank's parts. There a parameter is a
DTensor, and so is what its operation computes with, which says how it lies on the mesh. The operation is captured as
one of plain tensors, this rank's parts, and its result lies as the parts say:

| parameter | data | result | gradient of the data |
|---|---|---|---|
| linear, divided by outputs | on every rank | divided by features | a part of the sum on every rank |
| linear, divided by inputs | divided by features | a part of the sum on every rank | divided by features |
| embedding, divided by rows of the table | on every rank | a part of the sum on every rank | |
| embedding, divided by features | on every rank | divided by features | |
| on every rank | on every rank | on every rank | on every rank |
| on every rank | positions divided (sequence parallelism) | positions divided | positions divided |

In the last row each rank has some positions of every sample, and so a part of each sample's gradient: which parameters
those are is noted on the forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.tracked import TrackedTensor, plain_leaves, tracked_leaves
from ghostclip.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Models whose clipped sums meet elsewhere, so that the wrapper has nothing to add up.
_ADDED_UP: weakref.WeakSet[nn.Module] = weakref.WeakSet()
Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Captures an operation on plain and tracked tensors."""
# What is computed position by position: data and result lie alike. For layer_norm and rms_norm see `_normalised_axes`.
_BY_POSITION: Final = frozenset(
    {"add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__", "__rmul__", "div", "__truediv__"}
)
_NORMALISES: Final = frozenset({"layer_norm", "rms_norm"})
# They make of a part the part of the same place.
_KEEPS_PLACES: Final = frozenset({"", "to", "float", "double", "half", "bfloat16", "type", "type_as", "clone"})
_LINEAR: Final = ("input", "weight", "bias")
_EMBEDDING: Final = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
# Operators that bring other ranks' tensors, by what they do; sums over ranks are those of tensor parallelism.
_EXCHANGES: Final = {
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single"), "all-to-all"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), "all-gather"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), "all-gather"),
}


class Gathering(Protocol):
    """Ranks that gather the parameters of one model."""

    units: Sequence[nn.Module]  # modules whose parameters are gathered for their calls
    # names of parameters whose modules themselves combine what ranks compute with parts of them
    brought_together: frozenset[str]
    spread: frozenset[str]  # names of parameters that every rank has whole with a part of the gradient
    proves_again: bool  # whether the latest forward is proved although no rank has met anything new

    @property
    def divides(self) -> bool:
        """Whether ranks share samples, and compute with parts of parameters."""

    def must_prove(self, *, able: bool, inputs: Sequence[Tensor]) -> bool:
        """Decide, with all ranks, whether to prove the coming forward; if so, gather all parameters for it."""

    def may_prove(self) -> bool:
        """Return whether all parameters are gathered to prove this forward; if not, have a later one proved."""

    @property
    def wants_proof(self) -> bool:
        """Whether this rank's forward went a new way although it was none to be proved."""

    def prove_next(self) -> None:
        """Make the next forward one that is proved; called on all ranks."""

    def errors_shared(self) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks raise, in which everything is gathered; called on all of them."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward: a rank that leaves it says why, and the others raise that."""

    def announcing_error(self) -> AbstractContextManager[None]:
        """Return a context whose errors the others raise in `together`, which this rank does not reach."""

    def sharing(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks that share samples raise, to run nothing collective after one."""

    def any_sharing(self, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether something holds on a rank that shares samples with this one; called on all of these."""

    def announce_failure(self) -> None:
        """Have the other ranks raise in `together` that this rank's forward has failed."""

    def free_gathered(self) -> None:
        """Free the gathered parameters of a finished forward."""

    def agree(self, what: str, value: int) -> list[int]:
        """Return every rank's value, in the order of the ranks; called on all of them."""


def on_any(gathering: Gathering | None, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
    """Return whether something holds on any rank that shares samples with this one; None is one rank alone."""
    return holds if gathering is None else gathering.any_sharing(holds)


def set_sums_added_elsewhere(model: nn.Module, *, shared: bool) -> None:
    """Set whether the clipped sums of all ranks are added up where they are released."""
    (_ADDED_UP.add if shared else _ADDED_UP.discard)(model)


def quieten_wrapper(model: nn.Module) -> None:
    """Keep a DistributedDataParallel that is running the model from adding up gradients; called in a forward."""
    # Refused if nobody else adds up the ranks' clipped sums, or the wrapper cannot be told not to.
    wrapper = _torch.running_wrapper()
    if wrapper is None or not torch.is_grad_enabled():
        return
    if wrapper.static_graph:
        raise UnsupportedModelError(
            f"DistributedDataParallel(static_graph=True) around {type(model).__name__}: it adds up gradients after the "
            "first backward whatever it is told. Leave static_graph, or the wrapper, out."
        )
    if not wrapper.require_backward_grad_sync:
        return
    if model not in _ADDED_UP and wrapper.process_group.size() > 1:
        raise UnsupportedModelError(
            f"DistributedDataParallel around {type(model).__name__}: it waits for gradients that autograd never makes "
            "here, and nothing adds up the ranks' clipped sums. Leave the wrapper out and pass model, optimizer and "
            "loader to PrivacyEngine.make_private on every rank, or add up with ghostclip.distributed.SharedNoise."
        )
    # As in its no_sync(). It is read once the forward has ended.
    wrapper.require_backward_grad_sync = False


def awaited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wait for collectives that still write to the arguments, and return the finished arguments."""
    if not any(map(_torch.is_arriving, plain_leaves((args, kwargs)))):
        return args, kwargs
    arrived: tuple[tuple[Any, ...], dict[str, Any]] = _tree.mapped(
        lambda item: _torch.arrived(item) if _torch.is_arriving(item) else item, (args, kwargs)
    )
    return arrived


def is_divided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation has DTensors among its arguments."""
    return any(map(_torch.is_sharded_tensor, plain_leaves((args, kwargs))))


def refuse_whole_data(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], forward: ForwardContext, allowed: frozenset[str]
) -> None:
    """Refuse an operation of a parameter's part with plain data, whose placement is unknown."""
    # `allowed`: parameters whose modules combine their parts themselves.
    if not plain_leaves((args, kwargs)):
        return
    for tracked in tracked_leaves((args, kwargs)):
        for leaf in tracked.origin.leaves.values():
            if leaf.name not in allowed and _divides(leaf.parameter) is not None:
                raise UnsupportedModelError(
                    f"{forward.around.describe(leaf.name)}: parameter '{leaf.name}', of which each rank holds a part "
                    f"({_listed(leaf.parameter)}), meets plain tensors in {name}: how they lie on the mesh is not "
                    "known. Let parallelize_module prepare the module's inputs (ColwiseParallel, RowwiseParallel, "
                    "PrepareModuleInput)."
                )


def refuse_divided_outputs(model: nn.Module, outputs: Sequence[Tensor], *, axis: int) -> None:
    """Refuse outputs that are DTensors with neither all nor some classes of each sample on a rank."""
    from torch.distributed.tensor import Replicate, Shard

    for output in outputs:
        if not _torch.is_sharded_tensor(output):
            continue
        placed = output.placements  # type: ignore[attr-defined]
        last = output.dim() - 1
        if last <= axis or len(placed) != 1 or placed[0] not in (Replicate(), Shard(last), Shard(-1)):
            raise UnsupportedModelError(
                f"{type(model).__name__} returns a DTensor placed as {_listed(output)}: supported are Shard(-1), as "
                "loss_parallel takes classes, and Replicate. Let its last layer return "
                "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), or whole logits: "
                "ColwiseParallel(output_layouts=Replicate())."
            )


def leaves_empty(rows: int, ranks: int) -> bool:
    """Return whether some ranks get nothing of a table divided by rows, as ``torch.chunk`` divides it."""
    return -(-rows // ranks) * (ranks - 1) >= rows


class OnParts:
    """One operation on parts; ``run`` captures it on plain tensors."""

    def __init__(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: ForwardContext,
        run: Run,
    ) -> None:
        """Collect the tracked tensors, DTensors and the mesh of an operation."""
        self._func, self._name, self._args, self._kwargs = func, name, args, kwargs
        self._forward, self._run = forward, run
        self._tracked = tracked_leaves((args, kwargs))  # tracked tensors among the arguments
        self._data = [leaf for leaf in plain_leaves((args, kwargs)) if _torch.is_sharded_tensor(leaf)]
        self._mesh: Any = self._data[0].device_mesh  # type: ignore[attr-defined]
        parameters = [leaf.parameter for one in self._tracked for leaf in one.origin.leaves.values()]
        meshes = {part.device_mesh for part in (*self._data, *parameters) if _torch.is_sharded_tensor(part)}  # type: ignore[attr-defined]
        if len(meshes) > 1 or self._mesh.ndim > 1:
            self._refuse("its arguments lie on several meshes, or on one of several axes: one axis is supported")

    # -- operations -----------------------------------------------------------------------------------------------

    def result(self) -> Any:
        """Run the operation on this rank's parts and return a DTensor."""
        if self._name == "linear":
            return self.linear()
        return self.embedding() if self._name == "embedding" else self.alike()

    def linear(self) -> Any:
        """Run a linear map whose weight is divided by outputs or by inputs."""
        from torch.distributed.tensor import Partial, Shard

        x, weight, bias, *_ = self._arguments(_LINEAR)
        divides, last = self._divided_axis(weight), x.dim() - 1
        if divides is None:
            return self.alike()
        if divides == 0:
            self._require_placement(x, None)
            if bias is not None and self._divided_axis(bias) != 0:
                self._refuse("its weight is divided by outputs, and its bias is not")
            output = self._captured(self._local(x, Partial()), self._part(weight), self._part(bias))
            return self._placed(output, Shard(last), (*x.shape[:-1], _whole_shape(weight)[0]))
        self._require_placement(x, last)
        if bias is not None and self._divided_axis(bias) is not None:
            self._refuse("its weight is divided by inputs, and its bias is divided as well")
        output = self._captured(self._local(x, Shard(last)), self._part(weight), self._part(bias))
        if bias is not None and self._rank > 0:
            # Every rank's part of the sum has it, and its gradient is the same on all; in the sum it counts once.
            output = output - _value(bias).to(output.dtype)
        return self._placed(output, Partial(), tuple(output.shape))

    def embedding(self) -> Any:
        """Look up rows in a table divided by rows or by columns."""
        from torch.distributed.tensor import Partial, Shard

        ids, weight, padding, max_norm, *rest = self._arguments(_EMBEDDING)
        divides = self._divided_axis(weight)
        if divides is None:
            return self.alike()
        if max_norm is not None:
            self._refuse("max_norm changes rows that other ranks hold")
        self._require_placement(ids, None)
        here = self._local(ids, None)
        if divides == 1:
            output = self._captured(here, self._part(weight), padding, None, *rest)
            return self._placed(output, Shard(output.dim() - 1), (*ids.shape, _whole_shape(weight)[1]))
        rows, total = self._part(weight).shape[0], _whole_shape(weight)[0]
        if leaves_empty(total, self._mesh.size()):
            self._refuse(f"some ranks hold none of the {total} rows of the table: divide it over fewer ranks")
        first = min(total, -(-total // self._mesh.size()) * self._rank)
        elsewhere = (here < first) | (here >= first + rows)
        if padding is not None:
            padding = padding % total - first
            padding = padding if 0 <= padding < rows else None
        local_ids = (here - first).masked_fill(elsewhere, 0)
        output = self._captured(local_ids, self._part(weight), padding, None, *rest)
        return self._placed(output.masked_fill(elsewhere.unsqueeze(-1), 0.0), Partial(), (*ids.shape, output.shape[-1]))

    def alike(self) -> Any:
        """Run an operation whose parameters every rank has whole, on data placed alike."""
        from torch.distributed.tensor import Replicate, Shard

        moving = [one for one in self._data if not isinstance(one, nn.Parameter)]
        frozen = [one for one in self._data if isinstance(one, nn.Parameter)]
        if any(self._divided_axis(one) is not None for one in (*self._tracked, *frozen)):
            self._refuse("an operation on a divided parameter other than linear and embedding has no rule")
        placed = {_placement(one) for one in moving} or {Replicate()}
        if len(placed) > 1:
            self._refuse(f"its arguments lie differently ({', '.join(map(str, placed))})")
        (lies,) = placed
        if isinstance(lies, Shard):
            self._require_by_position(moving, lies.dim)
        elif not isinstance(lies, Replicate):
            self._refuse(f"its data is {lies}: redistribute it to Replicate() or Shard(1) before")
        for tracked in self._tracked:
            self._record_spread(tracked, spread=isinstance(lies, Shard))
        output = self._run(self._func, *self._with_parts(lies))
        if not isinstance(output, Tensor):
            self._refuse("it returns no single tensor")
        whole = list(output.shape)
        if isinstance(lies, Shard):
            whole[lies.dim] = moving[0].shape[lies.dim]
        return self._placed(output, lies, tuple(whole))

    def _require_by_position(self, data: Sequence[Tensor], axis: int) -> None:
        """Refuse divided positions where an operation is not one of each position by itself."""
        axis, most = axis % data[0].dim(), max(one.dim() for one in data)
        if axis == self._forward.batch_axis or any(one.dim() != most for one in data):
            self._refuse(f"its data is divided along axis {axis}, where samples lie: divide positions (Shard(1))")
        features = max((one.dim() for one in self._tracked), default=0)
        known = self._name in _NORMALISES or self._name in _BY_POSITION or self._name == "linear"
        if not known or axis >= most - (1 if self._name == "linear" else features):
            self._refuse(f"its data is divided along axis {axis}, which it does not compute position by position")

    # -- arguments ------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        rank: int = self._mesh.get_local_rank()
        return rank

    def _arguments(self, names: Sequence[str]) -> list[Any]:
        """Return arguments by the names of the function's, None for missing ones."""
        arguments = dict(zip(names, self._args, strict=False)) | self._kwargs
        return [arguments.get(name) for name in names]

    def _divided_axis(self, operand: Any) -> int | None:
        """Return the axis along which a parameter is divided; None where every rank has all of it."""
        if not isinstance(operand, TrackedTensor):
            return _divides(operand)
        axes = {_divides(leaf.parameter) for leaf in operand.origin.leaves.values()}
        if axes == {None}:
            return None
        one: TrackedTensor | None = operand
        while one is not None and one.origin.func in _KEEPS_PLACES:
            one = one.origin.parent
        if len(axes) > 1 or one is not None:
            self._refuse("what is computed from a divided parameter before lies in no known way")
        return axes.pop()

    def _part(self, operand: Any) -> Any:
        """Return this rank's part of an argument: a tracked part, or that of a frozen parameter."""
        if isinstance(operand, TrackedTensor):
            self._record_spread(operand, spread=False)
            return operand
        return None if operand is None else _torch.local(operand)

    def _local(self, data: Any, gradient: Placement | None) -> Tensor:
        """Return this rank's part of data, in the graph."""
        # ``gradient`` is the placement of its gradient, None for the data's.
        return _torch.part_of(data, None if gradient is None else [gradient])

    def _captured(self, *args: Any) -> Tensor:
        """Run and capture the operation on this rank's plain parts."""
        output: Tensor = self._run(self._func, args, {})
        return output

    def _with_parts(self, lies: Placement) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the operation's arguments with this rank's parts in the place of DTensors."""

        def one(item: Any) -> Any:
            if not _torch.is_sharded_tensor(item):
                return item
            return _torch.local(item) if isinstance(item, nn.Parameter) else self._local(item, lies)

        return tuple(map(one, self._args)), {key: one(item) for key, item in self._kwargs.items()}

    def _placed(self, part: Tensor, lies: Placement, shape: tuple[int, ...]) -> Any:
        """Return this rank's part of a result as a DTensor of a placement and whole shape."""
        from torch.distributed.tensor import DTensor

        if isinstance(part, TrackedTensor):
            self._refuse("it meets nothing that has samples there (positions, say): leave this module out of the plan")
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self._mesh, [lies], run_check=False, shape=torch.Size(shape), stride=stride)

    def _require_placement(self, data: Any, axis: int | None) -> None:
        """Refuse data that is not divided along an axis (None: whole on every rank): nothing is redistributed here."""
        from torch.distributed.tensor import Replicate, Shard

        wanted = Replicate() if axis is None else Shard(axis)
        if not _torch.is_sharded_tensor(data) or _placement(data) != wanted:
            lies = _placement(data) if _torch.is_sharded_tensor(data) else "a plain tensor"
            self._refuse(f"its data is {lies}, and its weight asks for {wanted}: redistribute the input before")

    # -- what is noted --------------------------------------------------------------------------------------------

    def _record_spread(self, tracked: TrackedTensor, *, spread: bool) -> None:
        """Record whether each rank has only a part of the gradients of the parameters behind a tracked tensor."""
        for name in tracked.origin.names:
            if self._forward.spread.setdefault(name, spread) != spread:
                self._refuse("it is used with all positions and with divided ones in one forward")

    def _refuse(self, reason: str) -> None:
        names = [name for tracked in self._tracked for name in tracked.origin.names]
        location = self._forward.around.describe(names[0])
        raise UnsupportedModelError(
            f"{location}: parameter '{', '.join(dict.fromkeys(names))}' on several ranks in {self._name}: {reason}; a "
            "sample's norm would not be known."
        )


def _placement(data: Any) -> Any:
    """Return the placement of a DTensor on its mesh of one axis, axes counted from the front."""
    from torch.distributed.tensor import Shard

    (placement,) = data.placements
    return Shard(placement.dim % data.dim()) if type(placement) is Shard else placement


def _divides(parameter: Any) -> int | None:
    """Return the axis along which a parameter is divided among ranks that share samples; None where it is not."""
    if not _torch.is_sharded_tensor(parameter):
        return None
    axes = [getattr(placed, "dim", None) for placed in parameter.placements]
    divided_axes = [axis % parameter.dim() for axis in axes if axis is not None]
    return divided_axes[0] if divided_axes else None


def _listed(parameter: Any) -> str:
    return ", ".join(map(str, parameter.placements))


def _whole_shape(operand: Any) -> torch.Size:
    """Return the shape of a whole parameter."""
    if isinstance(operand, TrackedTensor):
        (leaf,) = operand.origin.leaves.values()
        return leaf.parameter.shape
    shape: torch.Size = operand.shape
    return shape


def _value(operand: Any) -> Tensor:
    return operand.origin.value if isinstance(operand, TrackedTensor) else _torch.local(operand.detach())


class Exchanges(_torch.DispatchMode):
    """Records the collectives that a model's forward calls."""

    def __init__(self) -> None:
        """Start without any recorded collective."""
        super().__init__()
        self.found: dict[str, None] = {}  # what it does, in order, each once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective, and run the called operation."""
        what = _EXCHANGES.get(func.overloadpacket.__name__)
        if what is not None and "c10d" in func.namespace:
            self.found[what] = None
        return func(*args, **(kwargs or {}))

    def refuse(self, model: nn.Module) -> None:
        """Refuse recorded collectives that nothing explains."""
        # A model whose parameters ranks hold in parts (DTensor) gathers what is its own.
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        if not self.found or any(isinstance(parameter, dtensor) for parameter in model.parameters()):
            return
        raise UnsupportedModelError(
            f"{type(model).__name__} exchanges tensors with other ranks in its forward ({', '.join(self.found)}): a "
            "parameter here would meet other ranks' records, whose norms are not known (experts that are spread over "
            "ranks, features gathered for a contrast). Give each rank whole experts and its own records. For sequences "
            "that are split over ranks, say make_private(..., sequences=ghostclip.distributed.SplitSequences(mesh))."
        )


def refuse_split_positions(model: nn.Module) -> None:
    """Refuse a forward inside ``context_parallel``, where nothing says which ranks have the same samples."""
    # Each rank has some positions of a sample, and squares of parts do not add up.
    if _torch.in_context_parallel():
        raise UnsupportedModelError(
            f"{type(model).__name__} was called inside context_parallel: ranks have parts of a sample's positions, and "
            "so parts of its gradient, whose squares do not add up. Say which ranks: make_private(..., "
            "sequences=ghostclip.distributed.SplitSequences(mesh)), or GhostClipper(model, sequences=...)."
        )
