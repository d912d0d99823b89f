"""Who of the ranks works on which samples, read off a model's mesh; and sequences that are split over ranks.

Along some axes of a mesh each rank has samples of its own (data parallel, ``fully_shard``), along others ranks share
samples, and each computes with a part of the parameters (tensor parallelism). The latter are `sample_mesh_axes`.

Context parallelism: a rank has some positions of every sample, and with them a part of each sample's gradient; squares
of parts do not add up. So as the factors of a layer arrive, they travel to the rank that its sample is given to: the
layer's inputs and output gradients of all positions, or the sums of the parts, whichever is less. From then on norms,
coefficients and sums are those of a rank that has these samples whole.

Shape letters: B samples, S slots, N = B·S, T positions of one rank, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.distributed.agreement import (
    Group,
    common_numbers,
    gathered,
    known_to_all,
    refusals_shared,
    require_equal,
    world_size,
)
from ghostclip.distributed.weights import Placement
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.factors import AtIndex, Dense, Factor, Head, Outer, Permuted, Rows
from ghostclip.factors.outer import stores_per_sample
from ghostclip.kernels.sums import content_prints, read_prints

_ALIKE: Final = 1e-3
"""Share of its norm by which a clipped sum may differ between ranks: rounding, and the order of sums on a GPU."""
_DIFFER: Final = (
    "{}: ranks that share samples each have all of it, and their gradients differ (dropout that draws other numbers on "
    "each rank, or a layer that meets other features or positions there): a sample's norm would not be known. Seed "
    "these ranks alike (torch.manual_seed), divide the parameter as the data is divided (SequenceParallel for a norm "
    "of divided positions), or freeze it."
)


@dataclass(frozen=True)
class Shares:
    """How ranks share each batch: its number of shares, this rank's, and how many ranks have the same one."""

    count: int  # number of shares that a batch is dealt into
    number: int  # this rank's share
    copies: int = 1  # ranks with the same share
    groups: Sequence[Group] = (None,)  # over these, one after the other, sums of whole parameters are added up


def data_parallel_shares() -> Shares:
    """Return shares of ranks that each have samples of their own."""
    ranks = world_size()
    return Shares(ranks, distributed.get_rank() if ranks > 1 else 0)


def along(mesh: DeviceMesh, sample_mesh_axes: Sequence[str], what: str) -> tuple[Group, Shares]:
    """Return the group along one axis of a mesh, whose ranks work on the same samples, and how all share each batch."""
    names = mesh.mesh_dim_names or ()
    axes = tuple(sample_mesh_axes)
    if len(axes) != 1 or axes[0] not in names:
        raise InvalidOptionError(
            f"sample_mesh_axes={axes!r}: name the one axis of the mesh whose ranks have {what} "
            f"(the mesh has {', '.join(map(repr, names)) or 'no names'})."
        )
    shared = names.index(axes[0])
    others = [number for number in range(mesh.ndim) if number != shared]
    return mesh.get_group(shared), _dealt_over(mesh, others, copies=mesh.size(shared))


def _dealt_over(mesh: DeviceMesh, axes: Sequence[int], *, copies: int) -> Shares:
    """Return shares of batches that are dealt out to the ranks along some axes of a mesh."""
    number = 0
    for axis in axes:
        number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    count = math.prod(map(mesh.size, axes))
    return Shares(count, number, copies, tuple(mesh.get_group(axis) for axis in axes))


def require_all_ranks(shares: Shares, what: str) -> None:
    """Refuse a mesh without some ranks of the training, which would be dealt no records of their own."""
    on_mesh = shares.count * shares.copies
    if on_mesh != world_size():
        raise InvalidOptionError(
            f"{what} on a mesh of {on_mesh} of {world_size()} ranks: all ranks of a training are to be on it. Give the "
            "whole mesh, with an axis for ranks that have samples of their own, and name the one of those that share "
            "samples in sample_mesh_axes."
        )


def require_same_samples(shares: Shares, inputs: Sequence[Tensor], different: str) -> None:
    """Refuse samples that differ between ranks that share them; called on all ranks of the training.

    Cost:
        One pass over the tensors, one wait for each device, one exchange of a few bytes.
    """
    flattened = [_torch.local(tensor.detach()).contiguous().reshape(-1) for tensor in inputs]
    prints = read_prints([content_prints([flat]) for flat in flattened])
    layout = repr([(tuple(tensor.shape), tensor.dtype) for tensor in inputs])
    answers = gathered("inputs", (shares.number, layout, prints))
    of_share: dict[int, tuple[int, Any]] = {}
    for rank, (number, *values) in enumerate(answers):
        first, before = of_share.setdefault(number, (rank, values))
        if before != values:
            raise known_to_all(
                InvalidOptionError(
                    f"ranks {first} and {rank} work on the same samples, and {different}. Iterate over the private "
                    "loader as make_private returned it, with the same augmentation (seed alike) on ranks that share "
                    "samples."
                )
            )


class SampleRanks:
    """Ranks that work on the same samples, each with a part of each sample's gradient."""

    def __init__(self, mesh: DeviceMesh, model: nn.Module, divided: Iterable[str], shares: Shares) -> None:
        """Serve the ranks along a mesh; `divided`: parameters of which each rank has a part."""
        self._group = mesh.get_group()
        self._will_name = self._differ = False
        self.is_first = mesh.get_local_rank() == 0  # the rank whose squares of whole parameters count
        self._divided = frozenset(divided)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._local_sizes = {
            name: _torch.local(p).numel() for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.shares = shares
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in trained) else torch.float32  # of norms
        self.device = _torch.local(trained[0]).device if trained else torch.device("cpu")

    @property
    def size(self) -> int:
        return distributed.get_world_size(self._group)

    def is_divided(self, name: str) -> bool:
        """Return whether each rank has a part of a parameter."""
        return name in self._divided

    def begin(self, *, will_name: bool) -> None:
        """Set whether `require_equal_sums` follows the backward of this forward."""
        self._will_name, self._differ = will_name, False

    def add_up(self, local: Tensor) -> Tensor:
        """Return the sum over the ranks, the same on all to the bit; called on all of them, overwrites its argument."""
        distributed.all_reduce(local, group=self._group)
        return local

    @contextmanager
    def refusals_shared(self, what: str) -> Iterator[None]:
        """Raise on all of these ranks what one of them raises inside."""
        try:
            with refusals_shared(what, self._group):
                yield
        except GhostClipError as error:
            # These ranks know of it, and others of the training may not: they are told as of any error.
            raise type(error)(str(error)) from error

    def any(self, holds: bool) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether something holds on one of these ranks; called on all of them."""
        return any(gathered("evidence", holds, self._group))

    def require_equal_sums(self, sums: Mapping[str, Tensor | None]) -> None:
        """Refuse clipped sums that differ between these ranks where each has the whole parameter; called on all ranks.

        Privacy:
            Norms count such a parameter once, on one rank. That others' gradients are the same is what this shows.
        """
        names = sorted(name for name in sums if name not in self._divided)
        flat_sums = [self._flat_sum(sums[name], name) for name in names]
        worst = ""
        if flat_sums:
            total = self.add_up(torch.cat(flat_sums)) / self.size
            sizes = [part.numel() for part in flat_sums]
            for name, mine, mean in zip(names, flat_sums, total.split(sizes), strict=True):
                if not bool((mine - mean).norm() <= _ALIKE * mean.norm()):
                    worst = worst or name
        differing = [name for name in gathered("sums of whole parameters", worst) if name]
        if differing:
            raise known_to_all(UnsupportedModelError(_DIFFER.format(f"parameter '{differing[0]}'")))
        will_name, self._will_name = self._will_name, False
        if will_name and self._differ:
            self.refuse_difference()

    def refuse_difference(self) -> None:
        """Refuse gradients of whole parameters whose norms differ between these ranks; called on all of them."""
        # Where sums are compared after this backward, it waits for that, which can name the parameter.
        self._differ = self._will_name
        if not self._will_name:
            raise UnsupportedModelError(_DIFFER.format("a parameter that is not divided"))

    def _flat_sum(self, total: Tensor | None, name: str) -> Tensor:
        """Return a clipped sum flat in float64, zeros for a missing one."""
        if total is None:
            return torch.zeros(self._local_sizes[name], dtype=torch.float64, device=self.device)
        return _torch.local(total).flatten().double()

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a parameter that every rank has whole."""
        return self._shapes[name]


def shares_of(placements: dict[str, Placement], data: DeviceMesh | None, shared: DeviceMesh | None) -> Shares:
    """Return how ranks share each batch, from the mesh of own samples and that of shared samples."""
    ranks, copies = world_size(), 1 if shared is None else shared.size()
    count = 1 if data is None else data.size()
    if count * copies != ranks:
        name = next(iter(placements))
        raise UnsupportedModelError(
            f"parameter '{name}' lies on {count} x {copies} of {ranks} ranks (samples of their own x the same "
            "samples): all ranks must be on the mesh. Apply fully_shard over the other axis: fully_shard(model, "
            "mesh=mesh['dp']) after parallelize_module(model, mesh['tp'], ...)."
        )
    if shared is None:
        return data_parallel_shares()
    return Shares(1, 0, copies, ()) if data is None else _dealt_over(data, range(data.ndim), copies=copies)


class SplitSequences:
    """Ranks that each have a part of every sequence, for `make_private(..., sequences=...)` and `GhostClipper`.

    The model sees to it that positions meet where they must (attention gathers keys and values, say), by collectives
    that autograd knows; parameters are whole and equal on all ranks. Each rank's loss is its positions' part of the
    samples' losses, whose sum over the ranks is what is trained on. All ranks call the model with the same samples in
    the same order, and each with as many positions.

    Privacy:
        A sample's gradient is complete on one rank, where it is clipped. The clipped sums of the ranks are to be added
        up before noise, as those of ranks with samples of their own are (`SharedNoise`).

    Cost:
        For each layer and sample, an exchange of T·(I+O) numbers of each rank, or of I·O where that is less, (R-1)/R of
        which are sent; beside it one exchange of a few bytes a backward.

    Attributes:
        group: The ranks.
        ranks: How many there are.
        shares: How all ranks of the mesh share each batch: those along other axes have samples of their own.
    """

    def __init__(self, mesh: DeviceMesh, *, sample_mesh_axes: Sequence[str] = ("cp",)) -> None:
        """Take the ranks of one axis of a mesh.

        Args:
            mesh: The mesh.
            sample_mesh_axes: The axis whose ranks work on the same samples.

        Raises:
            InvalidOptionError: Not exactly one axis of the mesh is named.
        """
        self.group, shares = along(mesh, sample_mesh_axes, "parts of the same sequences")
        self.ranks = shares.copies
        # Each rank has whole gradients of some samples, and their sums are those of all ranks together.
        self.shares = replace(shares, groups=(None,))

    def common_numbers(self, what: str) -> random.Random:
        """Return a generator that draws the same on all ranks, and that nobody can predict; called on all of them.

        Args:
            what: What it is for, for messages.

        Returns:
            The generator.
        """
        return common_numbers(what, self.group)

    def all_positions(self, part_BT: Tensor) -> Tensor:
        """Return the positions of all ranks, as attention needs of keys and values; called on all ranks.

        Args:
            part_BT: This rank's positions, along axis 1.

        Returns:
            Those of rank 0, 1, ... one after another. In the backward each rank's are given the sum of what all ranks
            have found for them.
        """
        whole_BT: Tensor = _AllPositions.apply(part_BT, self.group, self.ranks)
        return whole_BT

    def begin(self, forward: ForwardContext) -> None:
        """Refuse a backward through forwards that differ between ranks; called on all of them.

        Args:
            forward: This rank's.

        Raises:
            InvalidOptionError: On all ranks, if their batches or layers' sizes differ.
        """
        description = repr((forward.sizes, sorted(forward.use_counts.items()), forward.unplanned))
        digest = hashlib.blake2b(description.encode(), digest_size=8).hexdigest()
        what = "samples of a batch, and sizes of the layers' data (a digest),"
        require_equal(what, gathered(what, (forward.batch_size, digest), self.group))

    def rows(self, batch_size: int) -> int:
        """Return how many samples of a batch are this rank's.

        Args:
            batch_size: B.

        Returns:
            B/R, rounded up; less on the last ranks.
        """
        share = -(-batch_size // self.ranks)
        return max(0, min(share, batch_size - share * distributed.get_rank(self.group)))

    def gather(self, factor: Factor) -> Factor:
        """Return the whole per-sample gradients of this rank's samples; called on all ranks for the same layers.

        Args:
            factor: Parts of the gradients of all samples.

        Returns:
            A factor of B/R samples, rounded up; those beyond the batch are zero.

        Raises:
            UnsupportedModelError: The parameter is a vocabulary head whose logits are formed in tiles.
        """
        if isinstance(factor, AtIndex):
            return AtIndex(self.gather(factor.inner), factor.index, shape=factor.shape)
        if isinstance(factor, Permuted):
            return Permuted(self.gather(factor.inner), factor.order)
        if isinstance(factor, Head):
            raise UnsupportedModelError(
                "a vocabulary head whose logits are formed in tiles does not go with sequences that are split over "
                "ranks: compute the loss from logits (vocabulary_head='logits')."
            )
        if isinstance(factor, Rows):
            ids_BT = self._exchanged(factor.ids_BT.unsqueeze(2), slots=1).squeeze(2)
            return Rows(ids_BT, self._exchanged(factor.g_BTI, slots=1), shape=factor.shape)
        if type(factor) is Outer and not stores_per_sample(*factor.sizes, factor.g_NTO.element_size()):
            a_NTI, g_NTO = (self._exchanged(part, slots=factor.slots) for part in (factor.a_NTI, factor.g_NTO))
            return Outer(a_NTI, g_NTO, shape=factor.shape, slots=factor.slots)
        return Dense(self._added_up(factor.materialize()))

    def _exchanged(self, part_NTI: Tensor, *, slots: int) -> Tensor:
        """Exchange positions so that a sample's are all on its rank: ``(B·S, T, I)`` to ``(B/R·S, R·T, I)``."""
        sent = self._padded(part_NTI.unflatten(0, (-1, slots)))
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        # Of each rank the same samples, with positions of its own.
        parts = received.unflatten(0, (self.ranks, -1)).flatten(1, 2)
        return parts.transpose(0, 1).flatten(1, 2)

    def _added_up(self, part_BP: Tensor) -> Tensor:
        """Reduce-scatter gradients so that a sample's is whole on its rank: ``(B, *P)`` to ``(B/R, *P)``."""
        sent = self._padded(part_BP)
        received = sent.new_empty(sent.shape[0] // self.ranks, *sent.shape[1:])
        distributed.reduce_scatter_tensor(received, sent, group=self.group)
        return received

    def _padded(self, part: Tensor) -> Tensor:
        """Return a part with samples added so that ranks share them evenly."""
        missing = -part.shape[0] % self.ranks
        nothing = part.new_zeros(missing, *part.shape[1:])
        return (torch.cat([part, nothing]) if missing else part).contiguous()


class _AllPositions(torch.autograd.Function):
    """Autograd function that gathers the positions of all ranks."""

    @staticmethod
    def forward(ctx: Any, part_BT: Tensor, group: Group, ranks: int) -> Tensor:
        """Gather positions."""
        ctx.group, ctx.ranks = group, ranks
        found_RBT = part_BT.new_empty(ranks * part_BT.shape[0], *part_BT.shape[1:])
        distributed.all_gather_into_tensor(found_RBT, part_BT.contiguous(), group=group)
        return found_RBT.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's positions of the gradient, summed over all ranks."""
        grad_RBT = grads[0].unflatten(1, (ctx.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        own_BT = grad_RBT.new_empty(grad_RBT.shape[0] // ctx.ranks, *grad_RBT.shape[1:])
        distributed.reduce_scatter_tensor(own_BT, grad_RBT, group=ctx.group)
        return own_BT, None, None
