"""Checks of what surrounds a step: the account of draws and releases, copies of the noise, the ledger, rounding.

As in `checks`, each takes public objects only and raises AssertionError where the engine is broken. What the engine
refuses is as good as what it counts.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.accounting import create_accountant
from ghostclip.errors import GhostClipError
from ghostclip.noise import make_noise_source
from tests.audit.subject import BOUND, DELTA, EXPECTED, Subject, distance, quietly, records

RECORDS, BATCH, FEATURES = 48, 8, 3
ROUNDING = 1e-5
RATE = BATCH / RECORDS


class Training:
    """A private training on Poisson batches.

    Args:
        ledger: File that releases are written to.
    """

    def __init__(self, *, ledger: Path | None = None) -> None:
        self.engine = ghostclip.PrivacyEngine(ledger=ledger)
        stream = torch.Generator().manual_seed(3)
        data = TensorDataset(
            torch.randn(RECORDS, FEATURES, generator=stream), torch.randint(3, (RECORDS,), generator=stream)
        )
        model = nn.Linear(FEATURES, 3)
        self.model, self.optimizer, self.loader = quietly(
            self.engine.make_private,
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=BOUND,
        )

    def backward(self, batch: list[Tensor]) -> None:
        nn.functional.cross_entropy(self.model(batch[0]), batch[1]).backward()

    def step(self, batch: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        self.backward(batch)
        quietly(self.optimizer.step)

    def epsilon(self) -> float:
        return self.engine.get_epsilon(DELTA)


def _epsilon_of(*history: tuple[float, float, int]) -> float:
    accountant = create_accountant()
    accountant.history = list(history)
    return accountant.get_epsilon(DELTA)


def _covers(printed: float, truth: float, what: str) -> None:
    assert printed >= truth * (1 - 1e-3), f"{what}: epsilon {printed:.2f} is printed for {truth:.2f}"


def every_release_is_charged() -> None:
    """ε of ten steps is that of ten Gaussian mechanisms on Poisson samples."""
    training = Training()
    for _ in range(10):
        training.step(next(iter(training.loader)))
    releases = training.optimizer.releases
    _covers(training.epsilon(), _epsilon_of((1.0, RATE, releases)), f"{releases} releases")


def a_replayed_batch_is_refused_or_counted() -> None:
    """The batches of one pass, kept and used thirty times: each draw takes part in thirty releases."""
    training = Training()
    kept, used = list(training.loader), 0
    with contextlib.suppress(GhostClipError):
        for _ in range(30):
            for batch in kept:
                training.step(batch)
                used += 1
    replays = -(-used // len(kept))
    truth = _epsilon_of((1.0 / replays**0.5, RATE, len(kept)))
    _covers(training.epsilon(), truth, f"{len(kept)} draws used {replays} times")


def passes_over_a_draw_are_counted() -> None:
    """Three virtual steps on one batch release three times as much of each of its records."""
    training = Training()
    with contextlib.suppress(GhostClipError):
        for batch in training.loader:
            for number in range(3):
                training.optimizer.signal_skip_step(do_skip=number < 2)
                training.backward(batch)
                quietly(training.optimizer.step)
    releases = training.optimizer.releases
    _covers(training.epsilon(), _epsilon_of((1 / 3, RATE, releases)), f"{releases} releases of three passes each")


def a_cut_ledger_is_refused_or_counted() -> None:
    """A run that goes on with a ledger that has lost lines, at its end or in between, must not have spent less."""
    for where in ("end", "middle"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger"
            spent, saved = _ledger_of_eight(path)
            lines = path.read_bytes().splitlines(keepends=True)
            kept = lines[: len(lines) // 2] if where == "end" else lines[:2] + lines[-2:]
            path.write_bytes(b"".join(kept))
            try:
                again = Training(ledger=path)
                if where == "end":
                    # A file that was cut at a line's end is whole; the checkpoint knows how long it was.
                    again.optimizer.load_state_dict(saved)
                again.step(next(iter(again.loader)))
                printed = again.epsilon()
            except GhostClipError:
                continue
        _covers(printed, spent, f"a ledger of 8 releases that has lost lines at its {where}")


def _ledger_of_eight(path: Path) -> tuple[float, dict[str, object]]:
    """Write a ledger of eight releases, and return ε and the optimizer's state; whoever wrote it has ended then."""
    training = Training(ledger=path)
    for _ in range(8):
        training.step(next(iter(training.loader)))
    return training.epsilon(), training.optimizer.state_dict()


def copies_do_not_repeat_noise() -> None:
    """Neither a copy of a noise source nor a forked process draws what the other draws, unless it is refused."""
    for name, other in {"copy": copy.copy, "deepcopy": copy.deepcopy}.items():
        source = make_noise_source(level="fast")
        source.add_(torch.zeros(8), 1.0)
        try:
            twin = other(source)
            draws = [_drawn(source), _drawn(twin)]
        except GhostClipError:
            continue
        assert not torch.equal(*draws), f"{name}: both draw the same noise"
    source = make_noise_source(level="fast")
    source.add_(torch.zeros(8), 1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, _drawn(source).numpy().tobytes())
        os._exit(0)
    os.close(writing)
    own = _drawn(source).numpy().tobytes()
    with os.fdopen(reading, "rb") as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert own != theirs, "fork: both processes draw the same noise"


def _drawn(source: object) -> Tensor:
    draw = torch.zeros(16, dtype=torch.float64)
    source.add_(draw, 1.0)  # type: ignore[attr-defined]
    return draw


class Uses(nn.Module):
    """A linear layer used once for each of a sample's parts, weighted by data: its gradient is Σ w·g⊗x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x_BI: Tensor, w_BT: Tensor) -> Tensor:
        outputs = [self.layer(x_BI) * w_B[:, None] for w_B in w_BT.unbind(1)]
        return torch.stack(outputs).sum((0, 2))


class LookUps(nn.Module):
    """A table whose row each sample meets several times, weighted by data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, FEATURES)

    def forward(self, x_BI: Tensor, w_BT: Tensor) -> Tensor:
        ids_BT = torch.zeros_like(w_BT, dtype=torch.long)
        return (self.table(ids_BT) * w_BT[:, :, None] * x_BI[:, None]).sum((1, 2))


STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
SCALES = (1.0, 1e4, 1e6, 1e10, 1e20, 1e30)


def _cancelling() -> list[Tensor]:
    """Weights that add up to what rounding leaves of nothing, shape [1, 3] each."""
    stream = torch.Generator().manual_seed(4)
    found = []
    for _ in range(3):
        pair = 0.1 + 3 * torch.rand(2, generator=stream)
        found.append(torch.cat([pair, -pair.sum(0, keepdim=True)])[None])
    return found


def _moved(module: type[nn.Module], weights: Tensor, strategy: str) -> float:
    """How far one record with these weights moves a release without noise, in units of C."""
    torch.manual_seed(2)
    model = module()
    private, optimizer = quietly(
        ghostclip.PrivacyEngine().make_private,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=ghostclip.DeclaredSampling(
            sample_rate=1.0, expected_batch_size=EXPECTED, num_units=EXPECTED, kind="full"
        ),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        grad_sample_mode=strategy,
    )[:2]
    # The others' gradients all point one way: what is lost of their sum is as much as can be.
    x, w = torch.ones(4, FEATURES), torch.ones(4, weights.shape[1])
    releases = []
    for inputs in ((x, w), (torch.cat([x, torch.ones(1, FEATURES)]), torch.cat([w, weights]))):
        optimizer.zero_grad()
        optimizer.clipper.backward(private(*inputs))
        quietly(optimizer.step)
        releases.append([p.grad.double() * EXPECTED for p in optimizer.params])
    return distance(*releases)


def _check_parts(weights: list[Tensor], what: str) -> None:
    worst = max(
        (_moved(module, scale * weight, strategy), f"{module.__name__}, {strategy}, parts of {scale:g}")
        for module in (LookUps, Uses)
        for strategy in STRATEGIES
        for scale in SCALES
        for weight in weights
    )
    assert worst[0] <= 1 + ROUNDING, f"{worst[1]} {what} {worst[0]:.4g} C"


def cancelling_parts_move_at_most_c() -> None:
    """A sample whose parts are huge and cancel, in a layer used three times and in a row met three times."""
    _check_parts(_cancelling(), "that cancel nearly move")


def huge_parts_leave_the_others_sums() -> None:
    """A sample whose parts cancel exactly contributes nothing, and changes nothing of what the others do."""
    _check_parts([torch.tensor([[1.0, -1.0, 0.0]])], "that cancel move")


def sums_cannot_be_changed_unseen() -> None:
    """Whatever is done to `p.grad` between backward and step is refused, or does not reach the release."""
    changes: dict[str, Callable[[nn.Parameter], object]] = {
        "grad.data.mul_": lambda p: p.grad is not None and p.grad.data.mul_(100),
        "grad.numpy()": lambda p: p.grad is not None and np.multiply(p.grad.numpy(), 100, out=p.grad.numpy()),
        "grad.set_": lambda p: p.grad is not None and p.grad.set_(100 * p.grad.detach()),
        "grad replaced": lambda p: setattr(p, "grad", torch.full_like(p, 100.0)),
    }
    for name, change in changes.items():
        subject, batch = Subject(sigma=0.0), records()
        untouched = subject.release(batch)
        subject.optimizer.zero_grad()
        subject.backward(batch)
        for p in subject.optimizer.params:
            change(p)
        try:
            quietly(subject.optimizer.step)
        except GhostClipError:
            continue
        moved = distance([p.grad.double() * EXPECTED for p in subject.optimizer.params], untouched)
        assert moved <= ROUNDING, f"{name} between backward and step moves the release by {moved:.4g} C"


SURROUNDINGS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        every_release_is_charged,
        a_replayed_batch_is_refused_or_counted,
        passes_over_a_draw_are_counted,
        a_cut_ledger_is_refused_or_counted,
        copies_do_not_repeat_noise,
        cancelling_parts_move_at_most_c,
        huge_parts_leave_the_others_sums,
        sums_cannot_be_changed_unseen,
    )
}
"""By name."""
