"""What scripts written for Opacus do and expect; a script says itself what is not as there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ghostclip.errors import GhostClipError
from tests.compat.surface.differences import DIFFERENCES
from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, functional, mlp
from tests.loops.rows import row
from tests.loops.world import BATCH, CLASSES, FEATURES, VOCABULARY, World

LOOPS: list[Loop] = []


def _private(world: World, model: nn.Module, loader: DataLoader | None = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return world.private(model, optimizer, loader or world.loader(), **options)


@row(LOOPS, kind="script")
def _batch_norm_at_once(world: World) -> None:
    """make_private refuses BatchNorm at once, not in the first forward."""
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    try:
        _private(world, model)
    except (GhostClipError, NotImplementedError):
        return
    world.said = "make_private accepts BatchNorm"


@row(LOOPS, clips=(1.0,), match="offsets|2-D|two dimensions|padding")
def _flat_embedding_bag(world: World) -> None:
    """EmbeddingBag on flat ids with offsets."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(VOCABULARY, 5, mode="mean"), nn.Linear(5, CLASSES)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.head(self.bag(ids, offsets))

    ids, lengths = world.ids, world.lengths

    def flat(records: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[records].cumsum(0)[:-1]])
        return torch.cat([ids[record, : lengths[record]] for record in records]), offsets

    def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        records = [int(record) for record, _ in items]
        return (*flat(records), torch.stack([label for _, label in items]))

    def losses(model: nn.Module, records: list[int]) -> torch.Tensor:
        return functional.cross_entropy(model(*flat(records)), world.labels[records], reduction="none")

    model = world.watch(lambda: Bags().double(), losses)
    data = TensorDataset(torch.arange(len(ids)), world.labels)
    model, optimizer, loader = _private(world, model, world.loader(data, collate_fn=collate))
    for flat_ids, offsets, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(flat_ids, offsets), y).backward()
        optimizer.step()


@row(LOOPS, kind="script")
def _distributed_sampler_alone(world: World) -> None:
    """DistributedSampler in one process: accepted, or refused with a remedy that is accepted."""
    refused = [_refusal(world, poisson_sampling=poisson) for poisson in (True, False)]
    if all(refused) and "poisson_sampling" in refused[1]:
        world.said = "refused both ways, one message recommending the other"


def _refusal(world: World, *, poisson_sampling: bool) -> str:
    data = world.data
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    try:
        _private(world, world.watch(mlp), loader, poisson_sampling=poisson_sampling)
    except GhostClipError as error:
        return str(error)
    return ""


@row(LOOPS, kind="script")
def _wrong_objects_are_value_errors(world: World) -> None:
    """A model in evaluation mode, and an optimizer of another model, are ValueErrors."""
    evaluated, other = mlp().eval(), mlp()
    _value_error(world, evaluated, torch.optim.SGD(evaluated.parameters(), lr=1))
    _value_error(world, mlp(), torch.optim.SGD(other.parameters(), lr=1))


def _value_error(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    try:
        world.private(model, optimizer, world.loader())
    except GhostClipError as error:
        if not isinstance(error, ValueError):
            world.said = f"a {type(error).__name__}, which is no ValueError"


@row(LOOPS, kind="script")
def _checkpoint_into_another_sigma(world: World) -> None:
    """load_checkpoint into an engine with another σ."""
    model, optimizer, _ = _private(world, mlp())
    assert world.engine is not None
    world.engine.save_checkpoint(path=f"{world.folder}/c.pt", module=model, optimizer=optimizer)
    world.restart()
    model, optimizer, _ = _private(world, mlp(), noise_multiplier=2.0)
    world.engine.load_checkpoint(path=f"{world.folder}/c.pt", module=model, optimizer=optimizer)


@row(LOOPS, kind="script")
def _optimizer_before_the_model(world: World) -> None:
    """DPOptimizer(...) before the model is wrapped."""
    from ghostclip import GradSampleModule
    from ghostclip.optim import DPOptimizer

    model = mlp()
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=world.sigma,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
    )
    wrapped = GradSampleModule(model)
    functional.cross_entropy(wrapped(world.features[:BATCH]), world.labels[:BATCH]).backward()
    optimizer.step()


@row(LOOPS, kind="script")
def _accountant_with_four_methods(world: World) -> None:
    """A registered accountant with only Opacus's four methods."""
    from ghostclip.accounting import IAccountant, calibration, register_accountant

    class Counting(IAccountant):
        def __init__(self) -> None:
            self.history = []

        def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
            self.history.append((noise_multiplier, sample_rate, 1))

        def get_epsilon(self, delta: float, **_: Any) -> float:
            return float(len(self.history)) + delta

        def __len__(self) -> int:
            return len(self.history)

        @classmethod
        def mechanism(cls) -> str:
            return "counting steps"

    register_accountant("counting steps", Counting, force=True)
    try:
        engine = world.new_engine(accountant="counting steps")
    finally:
        # Names are for the whole process, and other loops list them.
        del calibration._ACCOUNTANTS["counting steps"]
    model, optimizer, loader = _private(world, world.watch(mlp))
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if engine.get_epsilon(1e-3) < len(loader):
        world.said = "the accountant was not told of all steps"


@row(LOOPS, kind="script")
def _fixers_are_a_table(world: World) -> None:
    """ModuleValidator.FIXERS[nn.BatchNorm2d]."""
    from ghostclip.validation.fixers import ModuleValidator

    if nn.BatchNorm2d not in ModuleValidator.FIXERS:
        world.said = "nn.BatchNorm2d is not in FIXERS"


@row(LOOPS, kind="script", expect="listed")
def _grad_sample_in_ghost_mode(world: World) -> None:
    """p.grad_sample in ghost mode is None."""
    model, _, criterion, _ = _private(world, mlp(), grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())
    criterion(model(world.features[:BATCH]), world.labels[:BATCH]).backward()
    p = next(model.parameters())
    if not hasattr(p, "grad_sample"):
        _meets(world, "p.grad_sample where nothing formed per-sample gradients (ghost mode, or before a backward)")
    elif p.grad_sample is not None:
        world.said = "p.grad_sample is not None"


def _meets(world: World, difference: str) -> None:
    """Say that something is not as in Opacus; it has to be in the list of what is not."""
    if difference in [listed.what for listed in DIFFERENCES]:
        world.listed = difference
    else:
        world.said = f"not as in Opacus, and not listed as a difference: {difference}"


@row(LOOPS, kind="script")
def _names_of_the_grad_sample_module(world: World) -> None:
    """gsm.hooks_enabled and gsm.trainable_parameters."""
    from ghostclip import GradSampleModule

    module = GradSampleModule(mlp())
    if not module.hooks_enabled or len(list(module.trainable_parameters)) != 4:
        world.said = "they are there, and wrong"


@row(LOOPS, clips=(1.0, 0.2), releases=4)
def _opacus_training_script(world: World) -> None:
    """The loop of Opacus's README, criterion and all, in ghost mode."""
    model = world.watch(mlp, cross_entropy(world))
    options = {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss(), "poisson_sampling": True}
    model, optimizer, criterion, loader = _private(world, model, **options)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


class _BatchSecond(nn.Module):
    """Turns its batch axis to second place, as XLNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids.transpose(0, 1).contiguous())
        return self.head(torch.tanh(self.body(states)).mean(0))


@row(LOOPS, expect="exact", clips=(1.0,), releases=4)
def _batch_in_second_place(world: World) -> None:
    """A model that turns the batch to second place before its embedding."""
    _token_classes(world, lambda: _BatchSecond().double())


@row(LOOPS, expect="exact", clips=(1.0,), releases=4, hosts=("transformers",), tolerance=1e-5)
def _xlnet(world: World) -> None:
    """XLNet, whose layers hold the batch in second place."""
    from transformers import XLNetConfig, XLNetModel

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = XLNetConfig(vocab_size=VOCABULARY, d_model=8, n_layer=1, n_head=2, d_inner=8, dropout=0.0)
            self.body, self.head = XLNetModel(config), nn.Linear(8, CLASSES)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(input_ids=ids).last_hidden_state.mean(1))

    _token_classes(world, lambda: Classifier().double())


def _token_classes(world: World, make: Any) -> None:
    def losses(model: nn.Module, records: list[int]) -> torch.Tensor:
        return functional.cross_entropy(model(world.ids[records]), world.labels[records], reduction="none")

    model = world.watch(make, losses)
    model, optimizer, loader = _private(world, model, world.loader(TensorDataset(world.ids, world.labels)))
    for ids, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), y).backward()
        optimizer.step()


@row(LOOPS, clips=(1.0,))
def _stateful_loader(world: World) -> None:
    """A loader that keeps its position, as torchdata's StatefulDataLoader does."""

    class StatefulDataLoader(DataLoader):
        def state_dict(self) -> dict[str, int]:
            return {"position": 0}

        def load_state_dict(self, state: dict[str, int]) -> None:
            del state

    model = world.watch(mlp, cross_entropy(world))
    generator = torch.Generator().manual_seed(1)
    loader = StatefulDataLoader(world.data, batch_size=BATCH, shuffle=True, generator=generator)
    model, optimizer, loader = _private(world, model, loader)
    loader.load_state_dict(loader.state_dict())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
