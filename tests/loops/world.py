"""The world that a loop runs in: its data, its randomness, and recorders of draws and of what optimizers apply."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.data import schemes
from tests.fresh_keys import fresh_keys_from
from tests.loops.passes import Passes

RECORDS, BATCH = 24, 6
FEATURES, CLASSES = 4, 3
VOCABULARY, LENGTH = 11, 14
# Of the first batches none is empty, and the long records are in some.
SAMPLING_SEED = 20
_ANEW = 1000
Losses = Callable[[nn.Module, list[int]], Tensor]


@dataclass
class Event:
    """One update of one innermost optimizer.

    Attributes:
        gradients: What it applied, by the parameter's name; float64.
        draws: How many batches had been drawn by then.
        passes: Backward passes that the loop added up for it.
    """

    gradients: dict[str, Tensor]
    draws: int
    passes: int = 1


@dataclass
class World:
    """What a loop is given, and what is seen of it.

    Attributes:
        sigma: Noise multiplier.
        clip: C.
        drop: The records that no sampler may hand out.
        seed: Of all randomness, of the keys that are fresh entropy elsewhere too.
        rank: Number of this process.
        ranks: How many processes there are.
        folder: Where the loop may write.
        events: What the innermost optimizers applied, in order.
        sampling: Which draws count: "poisson" for Poisson's, "shuffled" for those of torch's samplers and of the
            engine's shuffled ones.
        draws: The records of each batch that was drawn so, whole (over all ranks), in order.
        model: The model that the loop trains, once it has said so.
        losses: The loss of each record alone, for the reference; None where there is none.
        moved: Names of parameters that changed outside an optimizer's step.
        engine: The last one that was made.
        restarts: How often the loop has begun anew.
        said: What the loop says of itself, for rows with a criterion of their own: a text names what is wrong.
        listed: The listed difference from Opacus that a script has met, by its name.
    """

    sigma: float = 0.0
    clip: float = 1.0
    drop: tuple[int, ...] = ()
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    sampling: str = "poisson"
    folder: str = ""
    events: list[Event] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)
    model: nn.Module | None = None
    losses: Losses | None = None
    moved: list[str] = field(default_factory=list)
    said: str = ""
    listed: str = ""
    engine: PrivacyEngine | None = None
    restarts: int = 0
    _start: dict[str, Tensor] = field(default_factory=dict)
    _pristine: Callable[[], nn.Module] | None = None
    _drawn: set[Any] = field(default_factory=set)

    # What a loop asks for

    @property
    def features(self) -> Tensor:
        """(N, 4): records that pull the same way, so that whoever rescales them all is seen; the long ones do not."""
        drawn = torch.randn(RECORDS, FEATURES, generator=_seeded(3), dtype=torch.float64) * 0.6 + 1.0
        return torch.where((self.lengths == LENGTH)[:, None], -3 * drawn, drawn)

    @property
    def labels(self) -> Tensor:
        """(N,): mostly one class, and a class of their own for the long records."""
        drawn = (torch.rand(RECORDS, generator=_seeded(4)) < 0.25).long()
        return torch.where(self.lengths == LENGTH, CLASSES - 1, drawn)

    @property
    def lengths(self) -> Tensor:
        """(N,): mostly 2 or 3, some 14, so that a long one is most of a batch's tokens."""
        return torch.tensor([LENGTH if record % 5 == 4 else 2 + record % 2 for record in range(RECORDS)])

    @property
    def mask(self) -> Tensor:
        """(N, T): which positions count."""
        return torch.arange(LENGTH)[None, :] < self.lengths[:, None]

    @property
    def ids(self) -> Tensor:
        """(N, T): tokens, few of them frequent; 0 pads."""
        drawn = (torch.rand(RECORDS, LENGTH, generator=_seeded(5)) ** 3 * (VOCABULARY - 1)).long() + 1
        return drawn * self.mask

    @property
    def data(self) -> TensorDataset:
        """Features and labels."""
        return TensorDataset(self.features, self.labels)

    @property
    def tokens(self) -> TensorDataset:
        """Tokens and their mask."""
        return TensorDataset(self.ids, self.mask)

    def loader(self, data: Dataset | None = None, **options: Any) -> DataLoader:
        """The loader of a user who wants batches of 6, whose randomness is the world's."""
        generator = torch.Generator().manual_seed(self.seed + SAMPLING_SEED + self._private_part())
        return DataLoader(
            self.data if data is None else data,
            **{"batch_size": BATCH, "shuffle": True, "generator": generator} | options,
        )

    def watch(self, make: Callable[[], nn.Module], losses: Losses | None = None) -> nn.Module:
        """Make the model that is trained."""

        def pristine() -> nn.Module:
            torch.manual_seed(self.seed + 7)
            return make()

        self._pristine, self.losses = pristine, losses
        self.model = pristine()
        self.names()
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self.model

    def new_engine(self, **options: Any) -> PrivacyEngine:
        """A privacy engine; the last one made is asked for ε at the end."""
        self.engine = PrivacyEngine(**options)
        return self.engine

    def _private_part(self) -> int:
        """What seeds of different processes differ by: nobody gives all of them one, as nobody gives any."""
        return _ANEW * (self.restarts + 100 * self.rank)

    def restart(self) -> None:
        """What follows is another process, which has no key in common with this one."""
        self.engine = None
        self.restarts += 1

    def private(self, model: nn.Module, optimizer: Optimizer, loader: DataLoader, **options: Any) -> Any:
        """Make a training private with this world's σ, C and noise."""
        engine = self.engine or self.new_engine()
        given = {"noise_multiplier": self.sigma, "max_grad_norm": self.clip} | options
        return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)

    # What the oracle asks for

    def names(self) -> dict[int, str]:
        """The parameters' names, by identity, those that joined later included."""
        assert self.model is not None
        return {id(p): name for name, p in self.model.named_parameters()}

    def reference_model(self) -> nn.Module:
        """A model with the parameters that every step started from."""
        assert self._pristine is not None
        return self._pristine()

    def accounted(self) -> int:
        """Releases that the engine has accounted for."""
        return 0 if self.engine is None else len(self.engine.accountant)

    def epsilon(self, delta: float) -> float:
        """ε that the engine prints."""
        return 0.0 if self.engine is None else self.engine.get_epsilon(delta)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record draws and updates, leave the record out, and undo every update, so that all steps start alike."""
        before: dict[int, list[tuple[Tensor, Tensor]]] = {}
        passes = Passes()

        def start(optimizer: Optimizer, *_: Any) -> None:
            if not type(optimizer).__module__.startswith("ghostclip"):
                before[id(optimizer)] = [(p, p.detach().clone()) for p in _parameters(optimizer)]

        def end(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in before:
                return
            started = before.pop(id(optimizer))
            if _only_makes_state(optimizer, started):
                return
            self.events.append(Event(self._gradients(optimizer), len(self.draws), passes.take()))
            with torch.no_grad():
                for p, value in started:
                    p.copy_(value)

        hooks = [register_optimizer_step_pre_hook(start), register_optimizer_step_post_hook(end)]
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            stack.enter_context(self._sampling())
            # A verdict on noise is not left to chance.
            stack.enter_context(fresh_keys_from(f"{self.seed} {self.rank}"))
            stack.enter_context(passes.counting())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            self.folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(_quiet_environment())
            seed_everything(self.seed)
            yield
            self.moved = self._moved()

    def _gradients(self, optimizer: Optimizer) -> dict[str, Tensor]:
        names = self.names() if self.model is not None else {}
        found = {}
        for number, p in enumerate(_parameters(optimizer)):
            if p.grad is not None:
                name = names.get(id(p), f"parameter {number}, not the model's")
                gradient = p.grad.full_tensor() if _sharded(p.grad) else p.grad  # type: ignore[attr-defined]
                found[name] = gradient.detach().double().clone()
        return found

    def _moved(self) -> list[str]:
        if self.model is None:
            return []
        now = {name: p.detach() for name, p in self.model.named_parameters() if not _sharded(p)}
        both = {name: p for name, p in self._start.items() if name in now and now[name].shape == p.shape}
        return [name for name, p in both.items() if not torch.equal(now[name], p)]

    def _note(self, source: Any, records: list[int], kind: str) -> list[int]:
        if source not in self._drawn and kind == self.sampling:
            self._drawn.add(source)
            self.draws.append(list(records))
        return [record for record in records if record not in self.drop]

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Note what samplers draw, and take the left-out record from it."""
        world, undo = self, []

        def private(own: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def draw(scheme: Any, key: Any, position: int) -> Any:
                records = own(scheme, key, position)
                kept = world._note((key.fingerprint(), position), [int(r) for r in records], kind)
                return np.asarray(records)[[int(record) in set(kept) for record in records]]

            return draw

        plain = BatchSampler.__iter__

        def batches(sampler: BatchSampler) -> Iterator[list[int]]:
            for batch in plain(sampler):
                yield world._note(object(), batch, "shuffled")

        for scheme in (schemes.Poisson, schemes.Shuffled, schemes.FullBatch):
            undo.append((scheme, "draw", scheme.draw))
            # On several ranks the engine shuffles by a scheme of its own, on one it leaves it to torch's sampler.
            scheme.draw = private(scheme.draw, "shuffled" if scheme is schemes.Shuffled else "poisson")
        undo.append((BatchSampler, "__iter__", plain))
        BatchSampler.__iter__ = batches
        try:
            yield
        finally:
            for owner, name, own in undo:
                setattr(owner, name, own)


def seed_everything(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _only_makes_state(optimizer: Optimizer, started: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether a step has released nothing: at rate zero, by gradients that are all exactly zero, and nothing moved.

    So does torch's distributed checkpoint let an optimizer make its state before it loads one.
    """
    still = all(float(group["lr"]) == 0.0 for group in optimizer.param_groups)
    gradients = [p.grad for p, _ in started if p.grad is not None]
    return (
        still
        and not any(bool(gradient.count_nonzero()) for gradient in gradients)
        and all(torch.equal(p, value) for p, value in started)
    )


def _sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks."""
    return hasattr(tensor, "full_tensor")


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Host libraries ask for servers and write environment variables; neither outlives a run."""
    before = dict(os.environ)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "ACCELERATE_USE_CPU": "true"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
