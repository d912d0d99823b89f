"""`ShardDelivery`: clipped sums of whole parameters become each rank's part of the sum over all ranks.

One reduce-scatter for the parameters that are gathered together, as ``fully_shard`` makes one of their gradients, while
the sums of the next ones are being formed. Sums stay in float32 at least, whatever the parameters and their reduction
are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ghostclip.distributed.placement import Placement


@dataclass(eq=False)
class Bucket:
    """Parameters of one mesh whose sums are sent in one reduction, with their placements."""

    parameters: Sequence[nn.Parameter]
    placements: Sequence[Placement]


@dataclass(eq=False)
class _Sent:
    """A bucket whose sums are being reduced."""

    bucket: Bucket
    parameters: Sequence[nn.Parameter]
    out: Tensor  # receives this rank's parts, one after the other
    work: Any  # None once it has arrived
    source: Tensor | None  # referenced so that the memory that is sent stays allocated


class ShardDelivery:
    """Sends buckets in one order on all ranks, each as soon as it and those before it are full."""

    # Ranks may differ in which parameters their samples have met, and in the order of their sums: an expert without a
    # token, a layer that had to be measured again. Buckets come in the order in which a backward completes them.
    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._held = {id(p): number for number, bucket in enumerate(buckets) for p in bucket.parameters}
        self._waiting: dict[int, Tensor] = {}
        self._next = 0
        self._sent: list[_Sent] = []
        self._arrived: list[tuple[nn.Parameter, Tensor]] = []
        self._at_once = True

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether the ranks have a parameter in parts."""
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
        """Send full buckets, once nothing else refers to the sums."""
        while self._at_once and self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
            self._send(self._buckets[self._next])

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
        while self._sent:
            self._receive(self._sent.pop(0))
        self._arrived.clear()
        self._next = 0

    def _is_full(self, bucket: Bucket) -> bool:
        return all(id(p) in self._waiting for p in bucket.parameters if p.requires_grad)

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket, once the one before has arrived: it was under way while the sums of this one were formed."""
        self._next += 1
        while self._sent:
            self._receive(self._sent.pop(0))
        pairs = zip(bucket.parameters, bucket.placements, strict=True)
        trainable = [(p, placement) for p, placement in pairs if p.requires_grad]
        if not trainable:
            return
        placement = trainable[0][1]
        device = _device_of(placement)
        rows = [_by_rank(self._whole(p, placed, device), placed) for p, placed in trainable]
        source = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        del rows
        parameters = [p for p, _ in trainable]
        out, work = source[0], None
        if len(source) > 1:
            out = torch.empty_like(source[0])
            # On the CPU a copy is sent, which would lie there beside the next sum.
            at_once = source.device.type != "cpu"
            group = _group(placement, placement.divided[0])
            work = distributed.reduce_scatter_tensor(out, source.reshape(-1), group=group, async_op=at_once)
        self._sent.append(_Sent(bucket, parameters, out, work, source if work is not None else None))

    def _whole(self, parameter: nn.Parameter, placement: Placement, device: torch.device) -> Tensor:
        found = self._waiting.pop(id(parameter), None)
        if found is None:
            return torch.zeros(placement.shape, dtype=_wide(parameter), device=device)
        return found.reshape(placement.shape)

    def _receive(self, sent: _Sent) -> None:
        """Wait for a bucket, add up copies (HSDP), and split it into parameters."""
        from torch.distributed.tensor import DTensor

        if sent.work is not None:
            sent.work.wait()
        sent.source = None
        placements = dict(zip(map(id, sent.bucket.parameters), sent.bucket.placements, strict=True))
        first = placements[id(sent.parameters[0])]
        for number in first.copied:
            if first.axes[number].size > 1 and not first.axes[number].same_samples:
                distributed.all_reduce(sent.out, group=_group(first, number))
        start = 0
        for parameter in sent.parameters:
            part, start = _part_of(sent.out, start, placements[id(parameter)])
            held: Any = parameter
            part = part.view(held.to_local().shape).to(held.to_local().device)
            self._arrived.append(
                (
                    parameter,
                    DTensor.from_local(
                        part,
                        held.device_mesh,
                        held.placements,
                        run_check=False,
                        shape=held.shape,
                        stride=_contiguous_stride(held.shape),
                    ),
                )
            )


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


def _part_of(out: Tensor, start: int, placement: Placement) -> tuple[Tensor, int]:
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


def _group(placement: Placement, axis: int) -> Any:
    return placement.mesh.get_group(axis)


def _device_of(placement: Placement) -> torch.device:
    kind = placement.mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
