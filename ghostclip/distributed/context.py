"""Context parallelism: sequences are split over ranks, and each sample's gradient is brought together on one of them.

A rank has some positions of every sample, and with them a part of each sample's gradient; squares of parts do not add
up. So as the factors of a layer arrive, they travel to the rank that its sample is given to: the layer's inputs and
output gradients of all positions, or the sums of the parts, whichever is less. From then on norms, coefficients and
sums are those of a rank that has these samples whole.

Shape letters: B samples, S slots, N = B·S, T positions of one rank, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from ghostclip.capture.forward import ForwardContext
from ghostclip.distributed.agreement import Group, common_numbers, gathered, require_equal
from ghostclip.distributed.sample_ranks import along
from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Dense, Factor, Head, Outer, Permuted, Placed, Rows, planner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        found: Tensor = _AllPositions.apply(part_BT, self.group, self.ranks)
        return found

    def begin(self, forward: ForwardContext) -> None:
        """Refuse a backward through forwards that differ between ranks; called on all of them.

        Args:
            forward: This rank's.

        Raises:
            InvalidOptionError: On all ranks, if their batches or layers' sizes differ.
        """
        found = repr((forward.sizes, sorted(forward.use_counts.items()), forward.unplanned))
        digest = hashlib.blake2b(found.encode(), digest_size=8).hexdigest()
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
        if isinstance(factor, Placed):
            return Placed(self.gather(factor.inner), factor.index, shape=factor.shape)
        if isinstance(factor, Permuted):
            return Permuted(self.gather(factor.inner), factor.order)
        if isinstance(factor, Head):
            raise UnsupportedModelError(
                "a vocabulary head whose logits are formed in tiles does not go with sequences that are split over "
                "ranks: compute the loss from logits (vocabulary_head='logits')."
            )
        if isinstance(factor, Rows):
            ids_BT = self._brought(factor.ids_BT.unsqueeze(2), slots=1).squeeze(2)
            return Rows(ids_BT, self._brought(factor.g_BTI, slots=1), shape=factor.shape)
        if type(factor) is Outer and not planner.keeps_per_sample(*factor.sizes, factor.g_NTO.element_size()):
            a_NTI, g_NTO = (self._brought(part, slots=factor.slots) for part in (factor.a_NTI, factor.g_NTO))
            return Outer(a_NTI, g_NTO, shape=factor.shape, slots=factor.slots)
        return Dense(self._added_up(factor.materialize()))

    def _brought(self, part_NTI: Tensor, *, slots: int) -> Tensor:
        """Gather all positions of a sample on its rank: ``(B·S, T, I)`` to ``(B/R·S, R·T, I)``."""
        sent = self._padded(part_NTI.unflatten(0, (-1, slots)))
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        # Of each rank the same samples, with positions of its own.
        parts = received.unflatten(0, (self.ranks, -1)).flatten(1, 2)
        return parts.transpose(0, 1).flatten(1, 2)

    def _added_up(self, part_BP: Tensor) -> Tensor:
        """Add up the parts of a sample's gradient on its rank: ``(B, *P)`` to ``(B/R, *P)``."""
        sent = self._padded(part_BP)
        received = sent.new_empty(sent.shape[0] // self.ranks, *sent.shape[1:])
        distributed.reduce_scatter_tensor(received, sent, group=self.group)
        return received

    def _padded(self, part: Tensor) -> Tensor:
        missing = -part.shape[0] % self.ranks
        nothing = part.new_zeros(missing, *part.shape[1:])
        return (torch.cat([part, nothing]) if missing else part).contiguous()


class _AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BT: Tensor, group: Group, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        found_RBT = part_BT.new_empty(ranks * part_BT.shape[0], *part_BT.shape[1:])
        distributed.all_gather_into_tensor(found_RBT, part_BT.contiguous(), group=group)
        return found_RBT.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_RBT = grads[0].unflatten(1, (ctx.ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        own_BT = grad_RBT.new_empty(grad_RBT.shape[0] // ctx.ranks, *grad_RBT.shape[1:])
        distributed.reduce_scatter_tensor(own_BT, grad_RBT, group=ctx.group)
        return own_BT, None, None
