"""What is counted of the model of one device: a step without privacy, and what arrives where clipping meets it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ghostclip.capture.call_sites import CallSite
from ghostclip.capture.statistics import Statistics
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.planning.coverage import Coverage, coverage_of
from ghostclip.scaling.local import Mesh, Shard, keep_one_shard, keep_one_stage, units_of
from ghostclip.scaling.source import Planned
from ghostclip.validation.inspection.measure import OrdinaryStep, call_sites, plain_step

WAYS: Final[dict[str, str]] = {"book-keeping": "bookkeeping", "two backwards": "ghost"}
"""Private ways, and the strategies that they are."""

WIDE: Final = 4
"""Bytes of a weight, of its clipped sum and of each value of the optimizer's state, whatever is computed in."""


@dataclass(frozen=True)
class Facts:
    """Counts of the model of one device, for so many samples."""

    model: nn.Module
    mesh: Mesh
    itemsize: int  # bytes of a value that is computed with
    samples: int  # how many were counted
    plain: OrdinaryStep  # A step without privacy
    units: list[int]  # number of values of each unit of FSDP2
    shards: list[tuple[Shard, int]]  # weights of tensor parallelism, with the number of rows that meet each
    blocks: list[str]  # paths of the blocks
    checkpointing: bool  # blocks are run again in every backward
    arrived: dict[str, list[Statistics]]  # statistics of each parameter; with cp for whole sequences, as the costs are
    of_rank: dict[str, list[Statistics]]  # the same for the positions of one rank
    # cost of clipping, by way; with cp for whole sequences, part of which a device clips
    coverages: dict[str, Coverage]
    gathered: int  # bytes of keys and values of one rank's positions that other ranks get in a forward
    microbatches: int

    @property
    def backwards(self) -> list[int]:
        """How many backwards each way runs."""
        return [1, *(2 if WAYS[way] == "ghost" else 1 for way in self.coverages)]


def counted(planned: Planned, mesh: Mesh, *, checkpointing: bool, microbatches: int = 1) -> Facts:
    """Count a step on the model of one device, into which the planned model is changed."""
    model = planned.source.model
    blocks = keep_one_stage(model, mesh.pp)
    shards = keep_one_shard(model, mesh.tp)
    if checkpointing and not blocks:
        raise InvalidOptionError(
            f"{type(model).__name__} has no list of blocks of one class to checkpoint: leave checkpointing out."
        )
    try:
        with _RowCounts(shards) as rows:
            plain = plain_step(model, planned.losses, blocks=[block for _, block in blocks])
        sites = call_sites(model, planned.losses, axis=planned.source.batch_axis)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"{planned.source.title}: cannot be planned, since it does not run from shapes alone ({text}). Plan it by "
            "what 'ghostclip inspect' finds with numbers."
        ) from error
    of_rank = _arrived(sites, 1)
    if mesh.cp > 1 or mesh.pp > 1:
        ways = {"book-keeping"}
    else:
        # Under checkpointing strategy "auto" takes two backwards: factors of all blocks would be what it saves.
        ways = {"two backwards"} if checkpointing else set(WAYS)
    arrived = _arrived(sites, mesh.cp)
    return Facts(
        model, mesh, next(model.parameters()).element_size(), planned.samples, plain, units_of(model, blocks),
        [(shard, rows.found.get(shard.weight, 0)) for shard in shards], [path for path, _ in blocks], checkpointing,
        arrived, of_rank,
        {way: coverage_of(model, sites, strategy=name) for way, name in WAYS.items() if way in ways},
        planned.attention.gathered, microbatches,
    )  # fmt: skip


def _arrived(sites: Sequence[CallSite], ranks: int) -> dict[str, list[Statistics]]:
    """Return what came in, of whole sequences: norms are of where positions of several ranks meet."""
    found: defaultdict[str, list[Statistics]] = defaultdict(list)
    for site in sites:
        for key, item in site.statistics.items():
            site.statistics[key] = whole = replace(
                item,
                products=tuple(replace(one, positions=ranks * one.positions) for one in item.products),
                elements=ranks * item.elements,
                input_elements=ranks * item.input_elements,
            )
            for name in item.names:
                found[name].append(whole)
    return found


class _RowCounts(TorchFunctionMode):
    """Counts the rows that meet each sharded weight in a forward."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self.found: dict[nn.Parameter, int] = {}
        self._shards = {shard.weight for shard in shards}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the rows of a call that takes a sharded weight, and run it."""
        for weight in args[1:2]:
            if isinstance(weight, nn.Parameter) and weight in self._shards:
                wide = 1 if args[0].dtype == torch.int64 else args[0].shape[-1]
                self.found[weight] = args[0].numel() // wide
        return func(*args, **(kwargs or {}))
