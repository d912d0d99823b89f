"""`ShardedModel`: a model whose parameters are divided among the ranks (FSDP2, HSDP, tensor parallelism, and both).

Where ``fully_shard`` has divided it, a module's parameters are whole while it runs, and each rank has samples of its
own: norms and coefficients are those of one device, and nothing is exchanged for them. The clipped sums of whole
parameters are reduced and scattered by `ShardDelivery`: one reduce-scatter for the parameters that are gathered
together, as ``fully_shard`` makes one of their gradients, while the sums of the next ones are being formed. Sums stay
in float32 at least, whatever the parameters and their reduction are in.

Where ``parallelize_module`` has, ranks work on the same samples, each with its parts of parameters: squared norms are
added up over these ranks, and clipped sums of parts stay where they are. Some styles of transformers take the place of
a module's ``forward``. Most give the layer DTensors, as torch's do. Those of experts and of layers that are packed side
by side run it on plain local tensors, and bring the results together afterwards; one lets every rank's part of a
gradient be added up after the backward, for norms of single heads.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from ghostclip import _torch
from ghostclip.capture.ranks import leaves_empty
from ghostclip.checks.unchecked import CheckSchedule
from ghostclip.distributed.agreement import (
    Leaving,
    announce_refusal,
    announcing_error,
    common_numbers,
    gathered,
    refusals_shared,
    require_company,
    world_size,
)
from ghostclip.distributed.sample_ranks import SampleRanks, Shares, require_same_samples, shares_of
from ghostclip.distributed.weights import MeshAxis, Placement, as_part_of, placement_of
from ghostclip.errors import GhostClipError, UnsupportedModelError

_GRADIENTS_ADD_UP: Final = "ReplicatedWithGradAllReduce"
# They route tokens to experts of other ranks: whose tokens those are, nothing tells.
_EXCHANGE_TOKENS: Final = frozenset({"EpDispatchExpertsParallel"})


def local_and_partial(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return names of parameters used as plain local parts, and of whole ones with partial gradients."""
    # The modules of the former bring the results together themselves. Refuses a module that sends tokens to experts of
    # other ranks.
    brought_together: set[str] = set()
    spread: set[str] = set()
    for path, module in model.named_modules():
        forward: Any = vars(module).get("forward")
        names = {f"{path}.{key}" if path else key: p for key, p in module.named_parameters(recurse=False)}
        style = _closed_over(forward, "self")
        if type(style).__name__ in _EXCHANGE_TOKENS:
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}): expert parallelism sends tokens to experts of other ranks, where "
                "nothing tells whose they are. Load the model with tp_plan='auto' alone, which divides every expert."
            )
        if getattr(forward, "__qualname__", "").startswith(_GRADIENTS_ADD_UP):
            spread.update(names)
        elif hasattr(style, "should_use_local_tensors") and _runs_on_parts(style, module):
            brought_together.update(name for name, p in names.items() if _torch.is_sharded_tensor(p))
    return frozenset(brought_together), frozenset(spread)


def _closed_over(function: Any, name: str) -> Any:
    """Return the value of a name in a nested function's closure, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _runs_on_parts(style: Any, module: nn.Module) -> bool:
    """Return whether a parallel style computes with local parts of a module's parameters."""
    with torch.enable_grad():
        return bool(style.should_use_local_tensors(module))


Bucket = Sequence[tuple[nn.Parameter, Placement]]
"""Parameters of one mesh whose sums are sent in one reduction, with their placements."""


@dataclass(eq=False)
class _Sent:
    """A bucket whose sums are being reduced."""

    bucket: Bucket
    out: Tensor  # receives this rank's parts, one after the other
    work: Any  # None once it has arrived
    source: Tensor | None  # referenced so that the memory that is sent stays allocated


class ShardDelivery:
    """Reduce-scatters clipped sums in buckets, in one order on all ranks, each as soon as it is full."""

    # Ranks may differ in which parameters their samples have met, and in the order of their sums: an expert without a
    # token, a layer that had to be measured again. Buckets come in the order in which a backward completes them.
    def __init__(self, buckets: Sequence[Bucket]) -> None:
        """Deliver the parameters of these buckets, nothing waiting."""
        self._buckets = buckets
        self._held = {id(p): number for number, bucket in enumerate(buckets) for p, _ in bucket}
        self._waiting: dict[int, Tensor] = {}  # sums that were not sent yet, by `id` of the parameter
        self._next = 0  # number of the bucket that is sent next
        self._sent: list[_Sent] = []  # under way
        self._arrived: list[tuple[nn.Parameter, Tensor]] = []  # parts of the sums over all ranks
        self._at_once = True  # whether buckets may be sent before all sums are formed

    def delivers(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is divided among ranks, so that its sum is delivered."""
        return id(parameter) in self._held

    def number(self, parameter: nn.Parameter) -> int:
        """Return the number of a parameter's bucket; -1 for one that every rank has whole."""
        return self._held.get(id(parameter), -1)

    def order(self, *, at_once: bool) -> None:
        """Set whether sums may be sent before all are formed, for which ranks must form them in one order."""
        self._at_once = at_once

    def add(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Add the sum of this rank's samples, of the whole parameter's shape."""
        before = self._waiting.get(id(parameter))
        # Of one type on all ranks, also where small layers that were put together are summed in what the model runs in.
        whole = whole.to(_wide(parameter))
        self._waiting[id(parameter)] = whole if before is None else before.add_(whole)

    def send(self) -> None:
        """Start the reductions of full buckets in order; nothing else may refer to their sums."""
        while self._at_once and self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if any(p.requires_grad and id(p) not in self._waiting for p, _ in bucket):
                return
            self._send(bucket)

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Send the remaining buckets and return every trainable parameter with its sum over all ranks, a DTensor."""
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        while self._sent:
            self._receive(self._sent.pop(0))
        arrived, self._arrived, self._next = self._arrived, [], 0
        return arrived

    def drop(self) -> None:
        """Discard what was not sent, and wait for what was."""
        self._waiting.clear()
        self._next = len(self._buckets)
        self.finish()

    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, once the one before has arrived."""
        self._next += 1
        while self._sent:
            self._receive(self._sent.pop(0))
        trainable = [(p, placement) for p, placement in bucket if p.requires_grad]
        if not trainable:
            return
        placement = trainable[0][1]
        device = _device_of(placement)
        rows = [_by_rank(self._whole(p, placed, device), placed) for p, placed in trainable]
        source = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        del rows
        out, work = source[0], None
        if len(source) > 1:
            out = torch.empty_like(source[0])
            # On the CPU a copy is sent, which would lie there beside the next sum.
            at_once = source.device.type != "cpu"
            group = placement.mesh.get_group(placement.divided[0])
            work = distributed.reduce_scatter_tensor(out, source.reshape(-1), group=group, async_op=at_once)
        self._sent.append(_Sent(trainable, out, work, source if work is not None else None))

    def _whole(self, parameter: nn.Parameter, placement: Placement, device: torch.device) -> Tensor:
        """Return the waiting sum of a parameter, zeros for a missing one."""
        total = self._waiting.pop(id(parameter), None)
        if total is None:
            return torch.zeros(placement.shape, dtype=_wide(parameter), device=device)
        return total.reshape(placement.shape)

    def _receive(self, sent: _Sent) -> None:
        """Wait for a bucket, add up copies (HSDP), and split it into parameters."""
        if sent.work is not None:
            sent.work.wait()
        sent.source = None
        first = sent.bucket[0][1]
        for number in first.copied:
            if first.axes[number].size > 1 and not first.axes[number].same_samples:
                distributed.all_reduce(sent.out, group=first.mesh.get_group(number))
        start = 0
        for parameter, placement in sent.bucket:
            part, start = _rank_part_of(sent.out, start, placement)
            self._arrived.append((parameter, as_part_of(parameter, part)))


def _wide(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's sum."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _by_rank(whole: Tensor, placement: Placement) -> Tensor:
    """Return a sum as one row for each rank of the axis that divides it, shorter parts padded with zeros."""
    if not placement.divided:
        return whole.reshape(1, -1)
    axis = placement.axes[placement.divided[0]]
    assert axis.divides is not None, "of an axis that divides"
    ahead = whole.movedim(axis.divides, 0)
    missing = -(-len(ahead) // axis.size) * axis.size - len(ahead)
    if missing:
        ahead = torch.cat([ahead, ahead.new_zeros((missing, *ahead.shape[1:]))])
    return ahead.reshape(axis.size, -1)


def _rank_part_of(out: Tensor, start: int, placement: Placement) -> tuple[Tensor, int]:
    """Return one parameter's contiguous part of a received bucket, and where the next one begins."""
    box = placement.here
    if not placement.divided:
        end = start + torch.Size(box.sizes).numel()
        return out[start:end].view(box.sizes), end
    axis = placement.axes[placement.divided[0]]
    dim = axis.divides
    assert dim is not None, "of an axis that divides"
    rest = [size for other, size in enumerate(placement.shape) if other != dim]
    length = -(-placement.shape[dim] // axis.size)
    end = start + length * torch.Size(rest).numel()
    ahead = out[start:end].view(length, *rest)[: box.sizes[dim]]
    return ahead.movedim(0, dim).contiguous(), end


def _device_of(placement: Placement) -> torch.device:
    """Return the device of a mesh on this rank."""
    kind = placement.mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


class ShardedModel:
    """Model whose parameters are divided among ranks, and the delivery of its clipped sums; called on all ranks."""

    def __init__(self, model: nn.Module, *, sample_mesh_axes: Collection[str] | None = None) -> None:
        """Read placements and buckets off a model; `sample_mesh_axes`: along which ranks share samples."""
        # modules whose parameters are gathered for their calls
        self.units: Sequence[nn.Module] = _torch.gathered_modules(model)
        self.rest()
        self._data = _data_mesh(self.units)
        self._named = sample_mesh_axes
        self._shared: DeviceMesh | None = None
        self.placements: dict[str, Placement] = {}
        # names of parameters that every rank has whole with a part of the gradient, of features that others do not
        # meet.
        # names of parameters whose modules themselves combine what ranks compute with parts of them
        self.brought_together, self.spread = local_and_partial(model)
        self.delivery = ShardDelivery(self._buckets(model))
        shared: DeviceMesh | None = self._shared
        self.shares: Shares = shares_of(self.placements, self._data, shared)
        # ranks that work on the same samples; None where each has samples of its own
        self.shared_samples: SampleRanks | None = None if shared is None else self._sample_ranks(model, shared)
        self._number = 0  # of the forward
        self._leaving = Leaving()
        self._proved = [False] * world_size()  # by rank, whether it has proved a forward
        self._schedule: CheckSchedule | None = None  # when forwards are proved again
        self._restore: list[Callable[[], None]] = []  # free what was gathered
        # whether the latest forward is proved although no rank has met anything new
        self._is_open = self._is_held = self._is_due = self._proves = self.proves_again = False
        self.wants_proof = False  # whether this rank's forward went a new way although none was to be proved

    def _buckets(self, model: nn.Module) -> list[Bucket]:
        """Return the buckets, in the order in which a backward completes them."""
        by_gather = defaultdict[int, list[tuple[nn.Parameter, Placement]]](list)
        seen: set[int] = set()
        for path, module, unit in _with_units(model, frozenset(self.units)):
            for key, parameter in module.named_parameters(recurse=False):
                # Left out of the sharding by name: each rank has a copy.
                if id(parameter) in seen or not _torch.is_sharded_tensor(parameter):
                    continue
                seen.add(id(parameter))
                name = f"{path}.{key}" if path else key
                delivered = self._delivered(name, parameter)
                if isinstance(module, nn.Embedding):
                    _refuse_empty_parts(name, self.placements[name])
                # What one rank sums up for all by itself waits for no other.
                gather_key = id(parameter) if unit is None else _torch.fsdp_group_of(unit)
                by_gather[gather_key].append((parameter, delivered))
        return [bucket for together in reversed(list(by_gather.values())) for bucket in _of_one_mesh(together)]

    def _delivered(self, name: str, parameter: Any) -> Placement:
        """Return how a parameter's clipped sum, of this rank's part where ranks share samples, goes to other ranks."""
        axes: Sequence[str] = parameter.device_mesh.mesh_dim_names or tuple(map(str, range(parameter.device_mesh.ndim)))
        named = self._named if self._named is not None else _others(axes, self._data)
        placement = self.placements[name] = placement_of(name, parameter, sample_mesh_axes=named)
        self._record_shared_mesh(name, placement)
        shape = list(placement.shape)
        for axis in placement.axes:
            # Along an axis of one rank nothing is divided, whatever a mesh says.
            if axis.same_samples and axis.divides is not None and axis.size > 1:
                shape[axis.divides] = -1
        data = [axis for axis in placement.axes if not axis.same_samples]
        clash = [axis.name for axis in data if axis.divides is not None and shape[axis.divides] < 0 and not axis.last]
        if sum(axis.divides is not None for axis in data) > 1 or clash:
            raise UnsupportedModelError(
                f"parameter '{name}' is divided along {len(placement.divided)} axes of its mesh "
                f"({', '.join(axis.name for axis in placement.axes)}). Supported are fully_shard over a mesh of one "
                "axis, or of two with copies of the model, after parallelize_module over one more."
            )
        if self._data is None:
            return Placement(placement.mesh, (), placement.here.sizes)
        if not data:
            # It is left out of the sharding: ranks with other samples have copies.
            names = self._data.mesh_dim_names or tuple(map(str, range(self._data.ndim)))
            data = [MeshAxis(key, self._data.size(number), None, False) for number, key in enumerate(names)]
        return Placement(self._data, tuple(data), _part_of(placement))

    def _record_shared_mesh(self, name: str, placement: Placement) -> None:
        """Record the mesh of ranks that share samples, one for all parameters."""
        numbers = [number for number, axis in enumerate(placement.axes) if axis.same_samples]
        if not numbers:
            return
        mesh: Any = placement.mesh
        mesh = mesh if mesh.ndim == 1 else mesh[placement.axes[numbers[0]].name]
        before = self._shared
        if len(numbers) > 1 or (before is not None and before.mesh.tolist() != mesh.mesh.tolist()):
            raise UnsupportedModelError(
                f"parameter '{name}' lies on another mesh of ranks that share samples than those before it, or on one "
                f"of several axes ({', '.join(axis.name for axis in placement.axes)}). Use one axis of one mesh for "
                "tensor parallelism, and fully_shard over the others."
            )
        self._shared = mesh if before is None else before

    def _sample_ranks(self, model: nn.Module, mesh: Any) -> SampleRanks:
        """Return the ranks that share samples, with the names of parameters divided among them."""
        divided = {
            name
            for name, placement in self.placements.items()
            if any(axis.same_samples and axis.divides is not None for axis in placement.axes)
        }
        # A tied parameter has a name at each of its places.
        tied = {id(model.get_parameter(name)) for name in divided}
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in tied]
        return SampleRanks(mesh, model, names, self.shares)

    @property
    def divides(self) -> bool:
        """Whether ranks share samples and compute with parts of parameters."""
        return self._shared is not None

    # -- proofs of forwards ---------------------------------------------------------------------------------------

    def must_prove(self, *, able: bool, inputs: Sequence[Tensor]) -> bool:
        """Decide, with all ranks, whether to prove the coming forward; if so, gather all parameters."""
        # Until every rank has asked once, all say in each forward whether they can (`able`: enough samples to prove
        # anything): one exchange. From then on it is one of a schedule, whose seed all know and nobody else does, and
        # those that follow a step in which a rank said that it has met something new.
        require_company()
        self._number += 1
        if all(self._proved):
            if self._schedule is None:
                self._schedule = CheckSchedule(common_numbers("when to ask again"), asked=self._number)
            due = self._schedule.advance(self._number)
            asks, self.proves_again = due or self._is_due, due and not self._is_due
        else:
            able_ranks = gathered("forward", able)
            self._proved = [before or now for before, now in zip(self._proved, able_ranks, strict=True)]
            asks, self.proves_again = any(able_ranks), False
        self._proves = asks
        if self.shared_samples is not None:
            self.shared_samples.begin(will_name=asks)
        if asks:
            if self.shared_samples is not None:
                require_same_samples(self.shares, inputs, "the model was called with different inputs there")
            self._is_open, self._is_due, self.wants_proof = True, False, self.wants_proof and not able
            self._is_held = True
            self._restore = [_torch.gather_parameters(unit) for unit in self.units]
        return asks and able

    def may_prove(self) -> bool:
        """Return whether all parameters are gathered to prove this forward; if not, have a later one proved."""
        # What a rank meets for the first time in another forward (an expert, or rows of a table of tokens, whose first
        # tokens come late) must not make it run or gather anything alone.
        self.wants_proof |= not self._is_held
        return self._is_held

    def prove_next(self) -> None:
        """Make the next forward one that is proved; called on all ranks."""
        self._is_due = True

    @contextmanager
    def errors_shared(self) -> Iterator[None]:
        """Raise on all ranks what one of them raises inside, where everything is gathered."""
        if not self._is_open:
            yield
            return
        try:
            with refusals_shared("proofs of the forward"):
                yield
        finally:
            self._is_open = False

    def sharing(self, what: str) -> AbstractContextManager[None]:
        """Return a context whose errors all ranks that share samples raise, to run nothing collective after one."""
        return nullcontext() if self.shared_samples is None else self.shared_samples.refusals_shared(what)

    def any_sharing(self, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether something holds on a rank that shares samples with this one; called on all of these."""
        return holds if self.shared_samples is None else self.shared_samples.any(holds)

    def compare_sums(self, sums: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Compare between ranks, after a proved forward, clipped sums of parameters that should be equal."""
        proves, self._proves = self._proves, False
        if proves and self.shared_samples is not None:
            self.shared_samples.require_equal_sums(sums())

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward: a rank that leaves it says why, and the others raise that."""
        return self._leaving.errors_shared()

    def announcing_error(self) -> AbstractContextManager[None]:
        """Return a context whose errors the others raise in `together`, which this rank does not reach."""
        return announcing_error("proofs of the forward") if world_size() > 1 else nullcontext()

    def announce_failure(self) -> None:
        """Have the other ranks raise in `together` that this rank's forward has failed."""
        if self._is_open:
            self._is_open = False
            # A hook that runs while the error is handled.
            error = sys.exc_info()[1]
            if not isinstance(error, Exception):
                error = GhostClipError("its forward has raised an error of its own.")
            announce_refusal("proofs of the forward", error)

    def free_gathered(self) -> None:
        """Free the gathered parameters of a finished forward."""
        self._is_open = self._is_held = False
        restore, self._restore = self._restore, []
        for put_back in restore:
            put_back()
        if restore:
            _torch.free_gathered(self.units)

    def agree(self, what: str, value: int) -> list[int]:
        """Return every rank's value, in the order of the ranks; called on all of them."""
        return gathered(what, value)

    def rest(self) -> None:
        """Free gathered parameters, so that the model holds those that an optimizer refers to."""
        for unit in self.units:
            unit.reshard()  # type: ignore[operator]


def sharded_model(model: nn.Module) -> ShardedModel | None:
    """Return the sharded model of a module that ranks have in parts, None for any other."""
    in_parts = _torch.gathered_modules(model) or any(map(_torch.is_sharded_tensor, model.parameters()))
    return ShardedModel(model) if in_parts else None


def _refuse_empty_parts(name: str, placement: Placement) -> None:
    """Refuse, on all ranks, a table of which some ranks would have no row."""
    for axis in placement.axes:
        if axis.same_samples and axis.divides == 0 and leaves_empty(placement.shape[0], axis.size):
            raise UnsupportedModelError(
                f"parameter '{name}' has {placement.shape[0]} rows for {axis.size} ranks (mesh axis '{axis.name}'), "
                "some of which would hold none. Leave this table out of the plan, or divide it over fewer ranks."
            )


def _data_mesh(units: Sequence[Any]) -> Any:
    """Return the mesh that ``fully_shard`` has divided a model over; None where it has not."""
    meshes = [mesh for mesh in map(_torch.data_mesh, units) if mesh is not None]
    for mesh in meshes:
        if mesh.mesh.tolist() != meshes[0].mesh.tolist():
            raise UnsupportedModelError(
                f"fully_shard has divided modules over different meshes ({meshes[0]}, {mesh}). Use one for all."
            )
    return meshes[0] if meshes else None


def _others(axes: Sequence[str], data: Any) -> list[str]:
    """Return the axes of a parameter's mesh along which ``fully_shard`` has not divided the model."""
    if data is None:
        return list(axes)
    return [] if data.mesh_dim_names is None else [axis for axis in axes if axis not in data.mesh_dim_names]


def _part_of(placement: Placement) -> tuple[int, ...]:
    """Return the shape of a parameter for this rank's share of samples: its part, whole along axes of data."""
    axes = [axis if axis.same_samples else axis._replace(divides=None) for axis in placement.axes]
    return Placement(placement.mesh, tuple(axes), placement.shape).here.sizes


def _with_units(model: nn.Module, units: frozenset[nn.Module]) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """Return every module once with its path and the unit it belongs to."""
    unit_of: dict[nn.Module, tuple[str, nn.Module | None]] = {}

    def visit(path: str, module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if module in units else unit
        unit_of[module] = path, unit
        for name, child in module.named_children():
            if child not in unit_of:
                visit(f"{path}.{name}" if path else name, child, unit)

    visit("", model, None)
    return [(path, module, unit) for module, (path, unit) in unit_of.items()]


def _of_one_mesh(together: Bucket) -> list[Bucket]:
    """Split the parameters of one gathering into reductions of one mesh and one dtype."""
    by_mesh = defaultdict[Any, list[tuple[nn.Parameter, Placement]]](list)
    for parameter, placement in together:
        by_mesh[placement.mesh, placement.divided, _wide(parameter)].append((parameter, placement))
    return list(by_mesh.values())
