"""What becomes of the features of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from tests.integrations.table import Row, row
from tests.integrations.trainings import exact, refused
from tests.loops.models import cross_entropy, dropping, functional, mlp
from tests.loops.world import BATCH, World

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


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, *, single: bool = False) -> None:
    """The loop of accelerate's guide.

    Args:
        accelerator: As in the guide.
        model: Prepared.
        optimizer: Prepared.
        loader: Prepared.
        single: Whether the model is in float32.
    """
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x.float() if single else x), y))
            optimizer.step()
            optimizer.zero_grad()


def _script(world: World, order: str, *, parts: int | None = None, **options: Any) -> None:
    """A script in which accelerate prepares before or after make_private."""
    single = "mixed_precision" in options
    split = options.pop("split_batches", False)
    if split or "dispatch_batches" in options:
        from accelerate.utils import DataLoaderConfiguration

        given = {"split_batches": split, "dispatch_batches": options.pop("dispatch_batches", None)}
        options["dataloader_config"] = DataLoaderConfiguration(**given)
    accelerator = accelerator_of(**options)
    # float64 is not touched by autocast.
    model = world.watch(_small, _small_losses(world)) if single else world.watch(mlp, cross_entropy(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = (model, optimizer, world.loader())
    if order == "first":
        prepared = world.private(*accelerator.prepare(*trained))
    else:
        prepared = accelerator.prepare(*world.private(*trained))
    if parts is None:
        train(accelerator, *prepared, single=single)
        return
    from ghostclip import BatchMemoryManager

    model, optimizer, loader = prepared
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=parts, optimizer=optimizer) as batches:
        train(accelerator, model, optimizer, batches)


def _small() -> nn.Module:
    return mlp().float()


def _small_losses(world: World) -> Any:
    def losses(model: nn.Module, records: list[int]) -> Tensor:
        return functional.cross_entropy(model(world.features[records].float()), world.labels[records], reduction="none")

    return losses


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
    _row(_order, "; split_batches=True, two processes", ranks=2, split_batches=True)
    _row(_order, "; BatchMemoryManager with the prepared optimizer", parts=3)

# accelerate's dispatcher drops the loader's generator, so that a script which prepares first draws others in each run.
_row("second", "; dispatch_batches=True, two processes", ranks=2, dispatch_batches=True)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def physical_batches(folder: Path) -> None:
    """BatchMemoryManager's loader, prepared; optimizer.step() after each physical batch."""

    def drive(world: World) -> None:
        from ghostclip import BatchMemoryManager

        accelerator = accelerator_of()
        model = world.watch(mlp, cross_entropy(world))
        made = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
        model, optimizer = accelerator.prepare(*made[:2])
        with BatchMemoryManager(data_loader=made[2], max_physical_batch_size=3, optimizer=made[1]) as batches:
            train(accelerator, model, optimizer, accelerator.prepare(batches))

    exact(drive, releases=4)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def parts_of_a_draw(folder: Path) -> None:
    """PhysicalBatches in the loop; a prepared scheduler counts releases."""

    def drive(world: World) -> None:
        from ghostclip import PhysicalBatches

        accelerator = accelerator_of()
        model = world.watch(mlp, cross_entropy(world))
        made = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
        parts = PhysicalBatches(made[1], max_physical_batch_size=2)
        schedule = torch.optim.lr_scheduler.LinearLR(made[1], total_iters=9)
        model, optimizer, loader, schedule = accelerator.prepare(*made, schedule)
        for batch in loader:
            parts.run(batch, lambda part: accelerator.backward(functional.cross_entropy(model(part[0]), part[1])))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert schedule.scheduler.last_epoch == 4

    exact(drive, releases=4)


def _run(folder: Path, order: str, *, until: int, save: int = -1, load: bool = False) -> tuple[Tensor, float, Any]:
    """Train with dropout, save or load on the way; return parameters, ε and the history."""
    world = World(sigma=1.0)
    torch.manual_seed(99 if load else 1)
    accelerator = accelerator_of()
    body = dropping()
    trained = (body, torch.optim.Adam(body.parameters(), lr=0.05), DataLoader(world.data, batch_size=BATCH))
    engine = world.new_engine()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    names = ("module", "optimizer", "data_loader")
    if order == "first":
        made = engine.make_private(**dict(zip(names, accelerator.prepare(*trained), strict=True)), **options)
    else:
        made = accelerator.prepare(*engine.make_private(**dict(zip(names, trained, strict=True)), **options))
    model, optimizer, loader = made
    if load:
        accelerator.load_state(folder / "state")
    while len(engine.accountant) < until:
        for x, y in loader:
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if len(engine.accountant) == save:
                accelerator.save_state(folder / "state")
            if len(engine.accountant) == until:
                break
    return (
        nn.utils.parameters_to_vector(body.parameters()).detach(),
        engine.get_epsilon(1e-3),
        engine.accountant.history,
    )


def _resumed(order: str, said: str) -> None:
    def drive(folder: Path) -> None:
        whole = _run(folder, order, until=7, save=3)
        again = _run(folder, order, until=7, load=True)
        assert again[1:] == whole[1:], f"ε {again[1]}, undisturbed {whole[1]}"
        assert torch.equal(again[0], whole[0]), "resumed: other parameters"

    drive.__doc__ = f"Killed and resumed by save_state and load_state, in the middle of an epoch; {said}."
    row(ROWS, **_HOST, outcome="exact", note="parameters bit by bit, ε and history, with dropout and Adam")(drive)


_resumed("second", "make_private, then prepare")
_resumed("first", "prepare, then make_private")


# Refusals


def _refusal(match: str, feature: str, order: str, loader: Callable[[World], Any], **options: Any) -> None:
    def drive(folder: Path) -> None:
        def script(world: World) -> None:
            accelerator = accelerator_of(**options)
            model = world.watch(mlp, cross_entropy(world))
            trained = (model, torch.optim.SGD(model.parameters(), lr=0.1), loader(world))
            if order == "first":
                train(accelerator, *world.private(*accelerator.prepare(*trained)))
            else:
                train(accelerator, *accelerator.prepare(*world.private(*trained)))

        refused(script)

    drive.__doc__ = feature
    row(ROWS, **_HOST, outcome="refused", note=match)(drive)


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


def _weighted(world: World) -> DataLoader:
    return DataLoader(world.data, batch_size=4, sampler=WeightedRandomSampler([0.5] * 24, 24))


for _order in ("first", "second"):
    _refusal("WeightedRandomSampler.*leave the sampler out", f"A weighted sampler ({_order}).", _order, _weighted)
    _refusal(
        r"gradient_accumulation_steps=2\): 2 draws.*DataLoader of 2 times the batch size",
        f"gradient_accumulation_steps=2 and accumulate ({_order}).",
        _order,
        World.loader,
        gradient_accumulation_steps=2,
    )
    _refusal("map-style", f"Streamed data ({_order}).", _order, lambda world: DataLoader(_Stream(), batch_size=2))
