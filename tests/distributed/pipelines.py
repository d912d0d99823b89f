"""What each process of the tests of pipelines does; results go to files, which the test compares."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import TensorDataset

from ghostclip import DPOptimizer, PrivacyEngine, _torch
from ghostclip.distributed import Pipeline, PipelineClipper
from ghostclip.distributed.release import fingerprint
from ghostclip.errors import InvalidOptionError
from tests.distributed import said_by
from tests.engine.training import as_if_drawn
from tests.private_run import PrivateRun

SAMPLES, POSITIONS, WIDTH, WORDS, MICROBATCHES = 12, 5, 8, 11, 4
BOUND = 0.05
TIMEOUT = 120
"""Seconds that a rank waits for another that is there and does not come."""
PLACES = 8
"""Fewer than most batches of the engine have records, and no divisor of them."""
SINGLE = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
SEVERAL = {
    "interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
    "interleaved, zero bubbles": pipelining.ScheduleInterleavedZeroBubble,
}
if not _torch.sends_within_a_rank(pipelining.PipelineStage):
    SEVERAL["V, zero bubbles"] = pipelining.ScheduleZBVZeroBubble


ENGINE = ("1F1B", "interleaved, zero bubbles")


class Block(nn.Module):
    """A residual block with a norm, a matrix that is used twice and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.twice(torch.tanh(self.twice(x)))


def whole_model(blocks: int) -> nn.Sequential:
    """A small language model, the same on every rank."""
    torch.manual_seed(3)
    layers = [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(WORDS, (SAMPLES, POSITIONS), generator=generator) for _ in range(2))  # type: ignore[return-value]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens of a microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the tokens that count, of which a padded sample has none."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def parts_of(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Cut a model into stages."""
    cuts = torch.linspace(0, len(model), count + 1).round().int().tolist()
    return [model[start:end] for start, end in itertools.pairwise(cuts)]


def stages_of(rank: int, ranks: int, name: str, *, group: Any = None) -> tuple[list[Any], nn.Sequential]:
    """The stages of a rank, as a schedule wants them, and the whole model."""
    count = ranks if name in SINGLE else 2 * ranks
    model = whole_model(max(2, count - 2))
    parts = parts_of(model, count)
    numbers = [rank] if name in SINGLE else [rank, count - 1 - rank if name.startswith("V") else rank + ranks]
    device = torch.device("cpu")
    return [pipelining.PipelineStage(parts[n], n, count, device, group=group) for n in numbers], model


def schedule_of(name: str, stages: list[Any], loss: Any, *, microbatches: int = MICROBATCHES) -> Any:
    """The schedule over them."""
    if name in SINGLE:
        return SINGLE[name](stages[0], microbatches, loss_fn=loss)
    return SEVERAL[name](stages, microbatches, loss_fn=loss)


def run_schedule(schedule: Any, stages: list[Any], inputs: Tensor, labels: Tensor) -> None:
    """One step: the first stage takes inputs, the last one labels."""
    arguments = (inputs,) if any(stage.is_first for stage in stages) else ()
    options = {"target": labels} if any(stage.is_last for stage in stages) else {}
    schedule.step(*arguments, **options)


def clipped(rank: int, ranks: int, name: str, *, resets: bool = True) -> dict:
    """Clipped sums of this rank's parameters after two steps, by their names in the whole model, and the norms."""
    stages, model = stages_of(rank, ranks, name)
    schedule = schedule_of(name, stages, mean_loss)
    inputs, labels = batch()
    clipper = PipelineClipper(stages, max_grad_norm=BOUND)
    for _ in range(2):
        if resets:
            clipper.reset()
        with clipper.step():
            run_schedule(schedule, stages, inputs, labels)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    own = [parameter for stage in stages for parameter in stage.submod.parameters()]
    found = {names[id(parameter)]: parameter.grad.clone() for parameter in own}
    passes = [one.backward_passes for one in clipper.clippers]
    forwards = [one.unchecked.forwards for one in clipper.clippers]
    clipper.remove()
    return {"sums": found, "norms": clipper.per_sample_norms, "passes": passes, "forwards": forwards}


def released_by_stage(rank: int, ranks: int, name: str) -> dict[str, Any]:
    """Two releases of this rank's stages, each by an optimizer of its own, and the state of their noise before."""
    stages, model = stages_of(rank, ranks, name)
    schedule = schedule_of(name, stages, mean_loss)
    clipper, names = PipelineClipper(stages, max_grad_norm=BOUND), {id(p): key for key, p in model.named_parameters()}
    sources = clipper.noise_sources("secure")
    begun, released = sources[0].state_dict(), []
    optimizers = [
        DPOptimizer(
            torch.optim.SGD(stage.submod.parameters(), lr=0.0), noise_multiplier=0.5, expected_batch_size=SAMPLES,
            clipper=one, noise_source=source,
        )
        for stage, one, source in zip(stages, clipper.clippers, sources, strict=True)
    ]  # fmt: skip
    for _ in range(2):
        with clipper.step():
            run_schedule(schedule, stages, *batch())
        for optimizer in optimizers:
            optimizer.step()
        own = [parameter for stage in stages for parameter in stage.submod.parameters()]
        released.append({names[id(parameter)]: parameter.grad.clone() for parameter in own})
        for optimizer in optimizers:
            optimizer.zero_grad()
    clipper.remove()
    return {"noise": begun, "released": released}


def find(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet.

    Returns:
        By what it is of.
    """
    found: dict[str, Any] = {name: clipped(rank, ranks, name) for name in (*SINGLE, *SEVERAL)}
    found["added up"] = {name: clipped(rank, ranks, name, resets=False) for name in ENGINE}
    found["by stage"] = {name: released_by_stage(rank, ranks, name) for name in ENGINE}
    found["refused"] = refusals(rank, ranks)
    found["engine"] = {name: engine_trained(rank, ranks, name=name) for name in ENGINE}
    if ranks > 2:
        found["engine"]["copies"] = engine_trained(rank, ranks, copies=2)
    found["resumed"] = engine_trained(rank, ranks, states=found["engine"]["1F1B"]["states"], folder=folder)
    found["engine without one"] = [engine_trained(rank, ranks, sigma=0.0, left_out=n) for n in (-1, 0, 22)]
    found["refused"] |= pipeline_refusals(rank, ranks) | other_samples(rank, ranks)
    found["empty"] = empty(rank, ranks)
    found["ledger"] = ledger(rank, ranks, folder)
    return found


class Whole(nn.Module):
    """All stages in one process, with their names in a pipeline."""

    def __init__(self, parts: list[nn.Sequential]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): part for number, part in enumerate(parts)})

    def forward(self, ids: Tensor) -> Tensor:
        for part in self.stages.values():
            ids = part(ids)
        return ids


def engine_model(
    rank: int, ranks: int, name: str, copies: int, *, places: int = PLACES, microbatches: int = MICROBATCHES
) -> nn.Module:
    """What make_private takes: a pipeline of a rank, or the whole model of one process."""
    if rank < 0:
        count = ranks // copies if name in SINGLE else 2 * ranks
        return Whole(parts_of(whole_model(max(2, count - 2)), count))
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("dp", "pp"))
    here, length = mesh.get_local_rank("pp"), ranks // copies
    stages, _ = stages_of(here, length, name, group=mesh["pp"].get_group())
    schedule = schedule_of(name, stages, sum_loss, microbatches=microbatches)
    return Pipeline(schedule, stages, mesh=mesh, places=places)


def engine_trained(
    rank: int,
    ranks: int,
    *,
    name: str = "1F1B",
    sigma: float = 0.5,
    copies: int = 1,
    left_out: int = -1,
    states: dict[str, Any] | None = None,
    folder: str = "",
) -> dict[str, Any]:
    """Train through the engine, in the loop that a user writes; rank -1 is one process with the whole model.

    Without noise all records are one batch, of which one step is made. With a folder the training is saved after half
    of the batches, and goes on from there in objects of its own.
    """
    # No multiple of the places.
    inputs, labels = (torch.cat([part, part.flip(1)])[:-1] for part in batch())
    if left_out >= 0:
        labels[left_out] = -100
    data = TensorDataset(inputs, labels)
    engine, model, released = PrivacyEngine(noise_level="secure"), engine_model(rank, ranks, name, copies), []

    def made() -> Any:
        run = PrivateRun(
            data, model=model, engine=engine, inner=torch.optim.Adam, lr=0.01,
            batch_size=len(data) if sigma == 0 else 6, sigma=sigma, max_grad_norm=BOUND, loss_reduction="sum",
        )  # fmt: skip
        return run, run.model, run.optimizer, run.loader

    run, private, optimizer, loader = made()
    begun = run.began(states)
    while len(released) < len(loader):
        for number, (ids, targets) in enumerate(loader):
            if rank < 0:
                sum_loss(private(ids), targets).backward()
            else:
                private.step(ids, target=targets)
            optimizer.step()
            released.append({key: p.grad.clone() for key, p in model.named_parameters()})
            optimizer.zero_grad()
            if folder and number == 1:
                engine.save_checkpoint(path=f"{folder}/state.pt", module=private, optimizer=optimizer)
                private.remove_hooks()
                engine, model = PrivacyEngine(noise_level="secure"), engine_model(rank, ranks, name, copies)
                _, private, optimizer, loader = made()
                engine.load_checkpoint(path=f"{folder}/state.pt", module=private, optimizer=optimizer)
                folder = ""
                break
    private.remove_hooks()
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    steps = sum(entry[2] for entry in engine.accountant.history)
    return {"states": begun, "weights": weights, "released": released[0], "steps": steps}


def _refused_by_engine(
    rank: int,
    ranks: int,
    *,
    level: str = "fast",
    places: int = PLACES,
    microbatches: int = MICROBATCHES,
    copies: int = 1,
    **options: Any,
) -> str:
    """What make_private says of a pipeline."""
    model = engine_model(rank, ranks, "1F1B", copies, places=places, microbatches=microbatches)
    given = {"max_grad_norm": BOUND, "batch_size": 4, **options}
    return said_by(
        lambda: PrivateRun(TensorDataset(*batch()), model=model, engine=PrivacyEngine(noise_level=level), **given)
    )


REFUSED_BY_ENGINE: dict[str, dict[str, Any]] = {
    "two passes": {"grad_sample_mode": "ghost"},
    "criterion": {"criterion": nn.CrossEntropyLoss()},
    "batch second": {"batch_first": False},
    "small memory": {"memory_budget": 0.9},
    "head": {"vocabulary_head": "auto"},
    "layers": {"clipping": "per_layer"},
    "adaptive": {"clipping": "adaptive"},
    "level": {"level": "exact", "grad_sample_mode": "hooks"},
}


def pipeline_refusals(rank: int, ranks: int) -> dict[str, str]:
    """What each rank says of pipelines that the engine does not take, by case."""
    said = {case: _refused_by_engine(rank, ranks, **options) for case, options in REFUSED_BY_ENGINE.items()}
    said["other places"] = _refused_by_engine(rank, ranks, places=PLACES // (1 + rank % 2))
    said["other microbatches"] = _refused_by_engine(rank, ranks, microbatches=MICROBATCHES * (1 + rank % 2))
    said["other reduction"] = _refused_by_engine(rank, ranks, loss_reduction=("sum", "mean")[rank % 2])

    def turned(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[::-1] if rank % 2 else parameters, lr=lr)

    said["other order"] = _refused_by_engine(rank, ranks, copies=ranks, inner=turned)
    model: Any = engine_model(rank, ranks, "1F1B", 1)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    attempts: dict[str, Any] = {
        "places": lambda: Pipeline(model._schedule, model._stages, mesh=mesh, places=6),
        "axis": lambda: Pipeline(model._schedule, model._stages, mesh=mesh, sample_mesh_axes=("cp",), places=8),
        "forward": lambda: model(batch()[0]),
        "not private": lambda: model.step(batch()[0], target=batch()[1]),
        "other stages": lambda: model.local_part({"of_stages": {"7": {}}, "m": {}}, whole="m"),
    }
    return said | {case: said_by(attempt) for case, attempt in attempts.items()}


def other_samples(rank: int, ranks: int) -> dict[str, str]:
    """What each rank says of a step whose stages are given different samples or noise, by what differs on a rank."""
    model: Any = engine_model(rank, ranks, "1F1B", 1)
    run = PrivateRun(
        TensorDataset(*batch()), model=model, batch_size=SAMPLES, max_grad_norm=BOUND, loss_reduction="sum"
    )
    private, optimizer = run.model, run.optimizer
    inputs, labels = batch()
    given = {
        "inputs": (inputs.flip(0), labels),
        "labels": (inputs, labels.flip(0)),
        "fewer": (inputs[:-PLACES], labels[:-PLACES]),
        "none": (inputs[:0], labels[:0]),
    }
    said = {}
    for case, other in given.items():
        ids, targets = other if rank == ranks - 1 else (inputs, labels)
        said[f"other {case}"] = said_by(partial(private.step, ids, target=targets))
        assert private.clipper.backward_passes == 0
    for case, table in {"table": torch.zeros(SAMPLES + 1, 2), "number": torch.zeros(())}.items():
        said[f"no rows: {case}"] = said_by(partial(private.step, inputs, target=labels, beside=table))
    private.step(inputs, target=labels)
    assert private.clipper.backward_passes == 1
    as_if_drawn(optimizer, SAMPLES)
    first = next(model.parameters()).requires_grad_(rank > 0)
    # Before a rank has released anything.
    with pytest.raises(InvalidOptionError, match="rank 0 refuses this step" if rank else "before make_private"):
        optimizer.step()
    first.requires_grad_()
    private.step(inputs, target=labels)
    as_if_drawn(optimizer, SAMPLES)
    optimizer.noise_multiplier = 1.0 + rank
    said["other noise"] = said_by(optimizer.step)
    private.remove_hooks()
    return said


def ledger(rank: int, ranks: int, folder: str) -> tuple[int, list[str]]:
    """Entries in the ledger of a step, and digests of releases of which rank 0's part is the same."""
    model: Any = engine_model(rank, ranks, "1F1B", 1)
    options = {"max_grad_norm": BOUND, "loss_reduction": "sum", "ledger": f"{folder}/ledger.txt"}
    run = PrivateRun(TensorDataset(*batch()), model=model, batch_size=SAMPLES, **options)
    for ids, targets in run.loader:
        run.model.step(ids, target=targets)
        run.optimizer.step()
    run.model.remove_hooks()
    run.engine.close()
    digests = [fingerprint([torch.full((3,), float(value * rank))], in_parts=True) for value in (1, 1, 2)]
    lines = [line for line in Path(f"{folder}/ledger.txt").read_text().splitlines() if line]
    return len(lines), digests


def empty(rank: int, ranks: int) -> list[int]:
    """Sizes of the batches of a training of which many are empty, all of which are released."""
    model = engine_model(rank, ranks, "GPipe", 1)
    run = PrivateRun(TensorDataset(*batch()), model=model, batch_size=1, max_grad_norm=BOUND, loss_reduction="sum")
    engine, private, optimizer, loader = run.engine, run.model, run.optimizer, run.loader
    sizes = []
    for accumulated in (1, 2):
        for number, (ids, targets) in enumerate(loader, 1):
            private.step(ids, target=targets, losses=(found := [torch.zeros(())]))
            assert len(found) == (MICROBATCHES if len(ids) and rank == ranks - 1 else 0)
            if number % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
            sizes.append(len(ids))
    private.remove_hooks()
    assert sum(entry[2] for entry in engine.accountant.history) == len(loader) * 3 // 2
    return sizes


class Centred(nn.Module):
    """Subtracts the mean of the batch, which no gradient tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.detach().mean(0)


class PositionsFirst(nn.Module):
    """Returns positions first, as attention of torch takes them where nothing else is said."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


def left(rank: int, ranks: int, folder: str, case: str) -> None:
    """Be one rank of a pipeline of which a stage is left inside the schedule, and write down what was raised, and when.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        case: Why it is left.
    """
    torch.set_num_threads(1)
    meeting, timeout = f"file://{folder}/meeting", timedelta(seconds=TIMEOUT)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    stages, _ = stages_of(rank, ranks, "GPipe")
    inputs, labels = batch()
    if case == "positions first":
        # As many as a microbatch has samples.
        inputs, labels = (part[:, : SAMPLES // MICROBATCHES] for part in (inputs, labels))
        ends = [nn.Identity(), PositionsFirst()] if stages[0].is_first else [PositionsFirst(), nn.Identity()]
        stages[0].submod = nn.Sequential(ends[0], stages[0].submod, ends[1])
    elif stages[0].is_last and case != "loss":
        mixes = nn.BatchNorm1d(POSITIONS).double() if case == "mixing" else Centred()
        stages[0].submod = nn.Sequential(mixes, stages[0].submod)
    clipper = PipelineClipper(stages, max_grad_norm=BOUND)
    schedule = schedule_of("GPipe", stages, _bad_loss if case == "loss" else mean_loss)
    begun = time.monotonic()
    try:
        for _ in range(2 if case == "mixing after copies" else 0):
            with clipper.step(1):
                run_schedule(schedule, stages, inputs[:1].expand_as(inputs), labels)
        with clipper.step():
            run_schedule(schedule, stages, inputs, labels)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        torch.save((type(error).__name__, str(error), time.monotonic() - begun), f"{folder}/rank{rank}.pt")


def _bad_loss(logits: Tensor, labels: Tensor) -> Tensor:
    raise ValueError(f"no labels of {len(logits)} in {len(labels)}")


def refusals(rank: int, ranks: int) -> dict[str, str]:
    """What each rank says of what is refused, by case."""
    cases = (
        "mesh",
        "twice",
        "neighbours",
        "wrapped",
        "builder",
        "disagree",
        "frozen",
        "copies",
        "no backward",
        "exact",
    )
    return {case: said_by(partial(_refused, case, rank, ranks)) for case in cases}


def _refused(case: str, rank: int, ranks: int) -> None:
    if case == "copies":
        group, _ = distributed.new_subgroups(1)
        try:
            PipelineClipper(stages_of(rank, ranks, "GPipe")[0], max_grad_norm=BOUND, group=group)
        finally:
            distributed.destroy_process_group(group)
    name = {"twice": "interleaved 1F1B", "neighbours": "V, zero bubbles"}.get(case, "GPipe")
    stages, _ = stages_of(rank, ranks, name)
    bound = BOUND
    if case == "mesh" and rank == 1:
        stages = []
    if case == "twice" and rank == 0:
        stages[1].submod.append(stages[0].submod[0])
    if case == "wrapped" and rank == 0:
        stages[0].submod.__class__ = type("Wrapped", (nn.parallel.DistributedDataParallel,), {})
    if case == "builder" and rank == 1:
        stages[0].dw_builder = lambda: lambda: None
    if case == "frozen" and rank == 1:
        stages[0].submod.requires_grad_(False)
    if case == "disagree" and rank == 1:
        bound = 2 * BOUND
    with pytest.MonkeyPatch.context() as patch:
        if case == "neighbours":
            patch.setattr(_torch, "sends_within_a_rank", lambda _: True)
        clipper = PipelineClipper(stages, max_grad_norm=bound)
    try:
        if case == "exact":
            clipper.noise_sources("exact")
        with clipper.step():
            pass
    finally:
        clipper.remove()
