"""What becomes of the features of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.loops.models import cross_entropy, functional, mlp, shared
from benchmarks.loops.world import BATCH, World
from tests.integrations.table import Row, row
from tests.integrations.trainings import exact

ROWS: list[Row] = []
_HOST = {"tool": "accelerate", "hosts": ("accelerate",)}
_SUMS = "sums against one record at a time, leave-one-out, noise, ε"


def accelerator_of(**options: Any) -> Any:
    """Return an accelerator that knows nothing of those before it.

    Args:
        options: Its options.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, **options)


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, *, schedule: Any = None) -> None:
    """The loop of accelerate's guide.

    Args:
        accelerator: As in the guide.
        model: Prepared.
        optimizer: Prepared.
        loader: Prepared.
        schedule: A prepared scheduler, or None.
    """
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()


def _script(
    world: World, order: str, *, make: Callable[[], nn.Module] = mlp, among: int = 1, batch: int = BATCH, **options: Any
) -> None:
    """A script in which accelerate prepares before or after make_private."""
    dtype = options.pop("dtype", None)
    split = options.pop("split_batches", False)
    if split or "dispatch_batches" in options:
        from accelerate.utils import DataLoaderConfiguration

        given = {"split_batches": split, "dispatch_batches": options.pop("dispatch_batches", None)}
        options["dataloader_config"] = DataLoaderConfiguration(**given)
    accelerator = accelerator_of(**options)
    model = world.watch(make, shared(cross_entropy(world), among))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # What is prepared first has the batch size of one process.
    each = batch // world.ranks if order == "first" and not split else batch
    trained = (model, optimizer, world.loader(batch_size=each))
    if order == "first":
        prepared = world.private(*accelerator.prepare(*trained))
    else:
        prepared = accelerator.prepare(*world.private(*trained))
    del dtype
    train(accelerator, *prepared)


def _ordered(order: str, **options: Any) -> Callable[[World], None]:
    return _Script(order, options)


class _Script:
    """A script that other processes can be handed."""

    def __init__(self, order: str, options: dict[str, Any]) -> None:
        self._order, self._options = order, options

    def __call__(self, world: World) -> None:
        _script(world, self._order, **self._options)


def _row(
    order: str, feature: str, *, ranks: int = 1, releases: int | None = 4, passes: int = 1, **options: Any
) -> None:
    said = {"first": "prepare, then make_private", "second": "make_private, then prepare"}[order]

    def drive(folder: Path) -> None:
        given = {"tolerance": options.pop("tolerance")} if "tolerance" in options else {}
        exact(_ordered(order, **options), ranks=ranks, releases=releases, passes=passes, **given)

    drive.__doc__ = f"{said}{feature}."
    note = _SUMS + (", up to rounding" if "mixed_precision" in options else "")
    row(ROWS, **_HOST, ranks=ranks, slow=ranks > 1, outcome="exact", note=note)(drive)


for _order in ("second", "first"):
    _row(_order, "; one process")
    _row(_order, "; two processes", ranks=2)
    _row(_order, "; mixed_precision='bf16'", mixed_precision="bf16", tolerance=2e-2)
    _row(_order, "; dispatch_batches=True, two processes", ranks=2, dispatch_batches=True)
    _row(_order, "; split_batches=True, two processes", ranks=2, split_batches=True)
    _row(
        _order, "; gradient_accumulation_steps=2: two draws a step, and their ε",
        gradient_accumulation_steps=2, among=2, passes=2, releases=2,
    )  # fmt: skip
