"""`ShardedModel`: a model whose parameters ``fully_shard`` has divided among the ranks (FSDP2, HSDP).

A module's parameters are whole while it runs, and each rank has samples of its own: norms and coefficients are those of
one device, and nothing is exchanged for them. The clipped sums of whole parameters are reduced and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.distributed.agreement import gathered, refused_together, tell_refusal, telling, world_size
from ghostclip.distributed.delivery import Bucket, ShardDelivery
from ghostclip.distributed.placement import Placement, placement_of
from ghostclip.errors import GhostClipError, UnsupportedModelError
from ghostclip.evidence.unchecked import is_power_of_four


class ShardedModel:
    """Ranks that gather the parameters of one model together, and share out its clipped sums.

    Called on all ranks, with models of the same structure.

    Args:
        model: A model that ``fully_shard`` was applied to, wholly or in parts, with its parameters in their parts.

    Attributes:
        units: The modules whose parameters are gathered for their calls.
        placements: How each parameter in parts lies, by name.
        delivery: Brings the clipped sums to the ranks that hold the parts.
        wants_proof: Whether this rank has met something new in a forward that was not one to be proved.

    Raises:
        UnsupportedModelError: If a parameter is gathered at the moment, or lies in a way that is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units: Sequence[nn.Module] = _torch.gathered_modules(model)
        self.placements: dict[str, Placement] = {}
        self.delivery = ShardDelivery(self._buckets(model))
        self._number = 0
        self._proved = [False] * world_size()
        self._restore: list[Callable[[], None]] = []
        self._is_open = self._is_due = False
        self.wants_proof = False

    def _buckets(self, model: nn.Module) -> list[Bucket]:
        """Return what is sent together, in the order in which a backward completes it."""
        found: dict[int, tuple[list[nn.Parameter], list[Placement]]] = {}
        seen: set[int] = set()
        for path, module, unit in _with_units(model, frozenset(self.units)):
            for key, parameter in module.named_parameters(recurse=False):
                if unit is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                name = f"{path}.{key}" if path else key
                placement = self._placement(name, parameter)
                if placement is None:
                    continue
                self.placements[name] = placement
                parameters, placements = found.setdefault(_torch.gathered_together(unit), ([], []))
                parameters.append(parameter)
                placements.append(placement)
        return [bucket for pair in reversed(list(found.values())) for bucket in _of_one_mesh(*pair)]

    def _placement(self, name: str, parameter: nn.Parameter) -> Placement | None:
        if not _torch.is_sharded_tensor(parameter):
            # Left out of the sharding by name: each rank has a copy.
            return None
        placement = placement_of(name, parameter)
        if len(placement.divided) != 1 or placement.ranks != world_size():
            raise UnsupportedModelError(
                f"parameter '{name}' lies on a mesh of {placement.ranks} of {world_size()} ranks, divided along "
                f"{len(placement.divided)} of its axes. Supported are fully_shard over all ranks (a mesh of one axis) "
                "and over a part of them with copies of the model (a mesh of two axes)."
            )
        return placement

    # -- proofs of forwards ---------------------------------------------------------------------------------------

    def hold(self, *, able: bool) -> bool:
        """Decide, with all ranks, whether a forward is one to ask for evidence; if so, gather everything for it.

        Until every rank has asked once, all say in each forward whether they can: one exchange. From then on it is the
        4th, 16th, 64th, ... forward, of which all know without asking, and those that follow a step in which a rank
        said that it has met something new.

        Args:
            able: Whether this rank has samples enough to prove anything.

        Returns:
            Whether this rank is to ask.
        """
        self._number += 1
        if all(self._proved):
            asks = is_power_of_four(self._number) or self._is_due
        else:
            found = gathered("forward", able)
            self._proved = [before or now for before, now in zip(self._proved, found, strict=True)]
            asks = any(found)
        if asks:
            self._is_open, self._is_due, self.wants_proof = True, False, self.wants_proof and not able
            self._restore = [_torch.keep_gathered(unit) for unit in self.units]
        return asks and able

    def may_ask(self) -> bool:
        """Return whether everything is gathered for a forward that is being proved; else ask for it in a later one.

        What a rank meets for the first time in another forward (an expert whose first tokens come late) must not make
        it gather anything alone.

        Returns:
            True within such a forward.
        """
        is_held = bool(self._restore)
        self.wants_proof |= not is_held
        return is_held

    def prove_next(self) -> None:
        """Make the next forward one to ask for evidence; called on all ranks, as one of them wants it."""
        self._is_due = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the errors of what is done inside be raised on all ranks, where everything is gathered.

        Yields:
            Nothing.

        Raises:
            GhostClipError: On all ranks, if one of them raised.
        """
        if not self._is_open:
            yield
            return
        try:
            with refused_together("proofs of the forward"):
                yield
        finally:
            self._is_open = False

    def telling(self) -> AbstractContextManager[None]:
        """Return a context whose errors the others hear of in `together`, which this rank does not reach.

        Returns:
            The context.
        """
        return telling("proofs of the forward") if world_size() > 1 else nullcontext()

    def tell_failure(self) -> None:
        """Let the others hear in `together` that this rank's forward has raised."""
        if self._is_open:
            self._is_open = False
            tell_refusal("proofs of the forward", GhostClipError("its forward has raised an error of its own."))

    def let_go(self) -> None:
        """Free what was gathered for a forward that is over."""
        self._is_open = False
        restore, self._restore = self._restore, []
        for put_back in restore:
            put_back()
        if restore:
            _torch.free_gathered(self.units)

    def agree(self, what: str, value: int) -> list[int]:
        """Return every rank's value; called on all of them.

        Args:
            what: What is exchanged.
            value: This rank's.

        Returns:
            In the order of the ranks.
        """
        return gathered(what, value)

    def rest(self) -> None:
        """See to it that the model has the parameters that an optimizer holds."""
        for unit in self.units:
            unit.reshard()  # type: ignore[operator]


def sharded_model(model: nn.Module) -> ShardedModel | None:
    """Return what a clipper has to know of a model that ``fully_shard`` has divided, None for any other.

    Args:
        model: The model.

    Returns:
        The ranks that hold it, or None.
    """
    return ShardedModel(model) if _torch.gathered_modules(model) else None


def _with_units(model: nn.Module, units: frozenset[nn.Module]) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """Return every module once with its path and the unit it belongs to."""
    found: dict[nn.Module, tuple[str, nn.Module | None]] = {}

    def visit(path: str, module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if module in units else unit
        found[module] = path, unit
        for name, child in module.named_children():
            if child not in found:
                visit(f"{path}.{name}" if path else name, child, unit)

    visit("", model, None)
    return [(path, module, unit) for module, (path, unit) in found.items()]


def _of_one_mesh(parameters: list[nn.Parameter], placements: list[Placement]) -> list[Bucket]:
    """Divide what is gathered together into what one reduction can bring: of one mesh and one type."""
    found: dict[Any, tuple[list[nn.Parameter], list[Placement]]] = {}
    for parameter, placement in zip(parameters, placements, strict=True):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        of_kind = found.setdefault((placement.mesh, placement.divided, wide), ([], []))
        of_kind[0].append(parameter)
        of_kind[1].append(placement)
    return [Bucket(*pair) for pair in found.values()]
