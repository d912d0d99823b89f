"""What an example releases, measured from outside: it is run several times, and nothing that it prints is believed.

The first release is compared with what each record adds alone; noise, steps and sampling are measured, and ε is worked
out from them by another library; canaries are looked for in what is released.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ghostclip
from ghostclip import PrivacyEngine
from ghostclip.audit import Finding, GradientCanaries, audit_scores
from ghostclip.data import schemes
from ghostclip.optim import release_of
from tests.loops.judge import epsilon_of

TINY: Final = ("--epochs", "1", "--samples", "96", "--batch-size", "48")
NOT_AUDITED: Final = {"mnist_ddp": "its processes release together; what ranks release is tested by itself"}
NOT_IN_CI: Final = {"mnist_timm": "audited where timm is installed; CI has it not"}
RECORDS: Final = 3
DELTA: Final = 1e-5
_UNCLIPPED: Final = "1e6"
_CANARIES: Final = 500


@dataclass
class Audit:
    """What was measured of an example.

    Attributes:
        name: Of the example.
        error: Of the first clipped sum against the records' clipped one by one, as a share of it.
        move: The most that one record adds to the first clipped sum, over C.
        noise: Root mean square of what was added to sums over σC, σ being what ε rests on.
        epsilon: As the example returns it, at δ = 1e-5.
        epsilon_due: Of the sampling and the noise that were measured, by dp_accounting.
        canaries: What canaries prove of ε.
        found: What the example returned.
    """

    name: str
    error: float
    move: float
    noise: float
    epsilon: float
    epsilon_due: float
    canaries: Finding
    found: Mapping[str, float]

    def problems(self) -> list[str]:
        """Return what is wrong, in words; an empty list where nothing is."""
        said = []
        if not self.error <= 1e-4:
            said.append(f"the first sum is off by {self.error:.1e} of itself")
        if not self.move <= 1 + 1e-5:
            said.append(f"a record adds {self.move:.6f} C to the first sum")
        if not 0.97 <= self.noise <= 1.03:
            said.append(f"noise of {self.noise:.3f} σC")
        if not 0.97 * self.epsilon_due <= self.epsilon <= 1.05 * self.epsilon_due:
            said.append(f"ε = {self.epsilon:.3f} where {self.epsilon_due:.3f} is due")
        if self.canaries.contradicts:
            said.append(self.canaries.sentence())
        return said


class _EnoughError(Exception):
    """The first release has been seen."""


@dataclass
class _Watch:
    """What is seen of a training, and what it is made to do.

    Attributes:
        records: The first draw, in the place of the one that chance gives; None leaves it to chance.
        first: The first release, times what it was divided by, shape ``(P,)``; set where `records` are.
        sample_rate: q of the draws.
        releases: Steps.
        squares: Sum of squares of the noise that was added, in units of C.
        values: How many values it was added to.
        canaries: Those that take part, where `records` is None.
        sigma: That the training was made private with.
    """

    records: list[int] | None = None
    first: Tensor | None = None
    sample_rate: float = 1.0
    releases: int = 0
    squares: float = 0.0
    values: int = 0
    canaries: GradientCanaries | None = None
    sigma: float = 0.0
    _seen: set[int] = field(default_factory=set)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is made private and run until the block is left.

        Yields:
            Nothing.
        """
        draw = schemes.Poisson.draw

        def chosen(scheme: schemes.Poisson, key: Any, position: int) -> Any:
            self.sample_rate = scheme.sample_rate
            first = self.records is not None and position == 0
            return np.array(self.records, dtype=np.int64) if first else draw(scheme, key, position)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(schemes.Poisson, "draw", chosen))
            for name in ("make_private", "make_private_with_epsilon"):
                watched = self._watched(getattr(PrivacyEngine, name))
                stack.enter_context(mock.patch.object(PrivacyEngine, name, watched))
            yield

    def _watched(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(*args: Any, **options: Any) -> Any:
            private = make(*args, **options)
            optimizer = release_of(private[1])
            if id(optimizer) not in self._seen:
                self._seen.add(id(optimizer))
                self._attach(optimizer, private[2].sample_rate)
            return private

        return made

    def _attach(self, optimizer: Any, sample_rate: float) -> None:
        self.sigma = optimizer.noise_multiplier
        optimizer.noise_source = _Noted(optimizer.noise_source, self, optimizer.max_grad_norm)
        optimizer.original_optimizer.register_step_pre_hook(lambda *_: self._released(optimizer))
        if self.records is None:
            count = min(_CANARIES, sum(p.numel() for p in optimizer.params) // 2)
            self.canaries = GradientCanaries(optimizer, count=count, sample_rate=sample_rate, seed=0)
            self.canaries.__enter__()

    def _released(self, optimizer: Any) -> None:
        self.releases += 1
        if self.records is not None:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in optimizer.params if p.requires_grad]
            self.first = torch.cat([g.reshape(-1).double() for g in gradients]) * optimizer.expected_batch_size
            raise _EnoughError


class _Noted:
    """Adds a training's own noise and measures it; none where the first sum is wanted."""

    level = "fast"

    def __init__(self, source: Any, watch: _Watch, bound: float) -> None:
        self._source, self._watch, self._bound = source, watch, bound

    def add_(self, tensor: Tensor, std: float) -> None:
        """Add noise to a sum.

        Args:
            tensor: The sum.
            std: Standard deviation of the noise.
        """
        if self._watch.records is None:
            before = tensor.double()
            self._source.add_(tensor, std)
            self._watch.squares += float((tensor.double() - before).square().sum()) / self._bound**2
            self._watch.values += tensor.numel()

    def __getattr__(self, name: str) -> Any:
        if name in ("add_shard_", "release_all_"):
            raise AttributeError(name)
        return getattr(self._source, name)


def _run(watch: _Watch, name: str, arguments: Sequence[str]) -> Mapping[str, float]:
    """Run an example; for given records without dropout, so that they add the same in every draw, and unchecked."""
    example = importlib.import_module(f"paper_repro.examples.{name}")
    attention = F.scaled_dot_product_attention

    def certain(*given: Any, dropout_p: float = 0.0, **options: Any) -> Tensor:
        del dropout_p
        return attention(*given, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(watch.watching())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if watch.records is not None:
            stack.enter_context(mock.patch.object(F, "dropout", lambda value, *_, **__: value))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", certain))
            stack.enter_context(mock.patch.object(ghostclip, "check", return_value="in the whole run"))
        return example.main(list(arguments))


@contextlib.contextmanager
def _trained_once(name: str) -> Iterator[None]:
    """Train what an example starts from, if it trains that itself, in its first run only.

    Args:
        name: Of the example.

    Yields:
        Nothing.
    """
    example = importlib.import_module(f"paper_repro.examples.{name}")
    train, made = getattr(example, "trained_on", None), []

    def trained_on(texts: list[str]) -> Any:
        if not made:
            made.extend([train(texts), torch.get_rng_state()])
        torch.set_rng_state(made[1])
        return copy.deepcopy(made[0])

    with contextlib.nullcontext() if train is None else mock.patch.object(example, "trained_on", trained_on):
        yield


def _first_sums(name: str, bound: str) -> Tensor:
    """Return the clipped sums that an example's optimizer receives first, of one record and more.

    Args:
        name: Of the example.
        bound: C.

    Returns:
        Shape ``(RECORDS + 1, P)``, float64; the first row is that of no record.
    """
    sums = []
    for count in range(1, RECORDS + 1):
        watch = _Watch(records=list(range(count)))
        with contextlib.suppress(_EnoughError):
            _run(watch, name, (*TINY, "-c", bound))
        assert watch.first is not None, f"{name} released nothing"
        sums.append(watch.first)
    return torch.stack([torch.zeros_like(sums[0]), *sums])


def audit(name: str) -> Audit:
    """Run an example until its first release for draws of one record and more, then whole, and measure.

    Args:
        name: One of the examples that are not in `NOT_AUDITED`.

    Returns:
        What was measured.
    """
    with _trained_once(name):
        # What each record adds, in its place in the batch, where nothing is clipped; then where most are.
        part_BP = _first_sums(name, _UNCLIPPED).diff(dim=0)
        norm_B = part_BP.norm(dim=1)
        bound = float(norm_B.median()) / 2
        clipped = _first_sums(name, repr(bound))
        whole = _Watch()
        found = _run(whole, name, TINY)
    due = (part_BP * (bound / norm_B).clamp(max=1.0)[:, None]).sum(0)
    noise = (whole.squares / whole.values) ** 0.5
    assert whole.canaries is not None, f"{name} made nothing private"
    return Audit(
        name=name,
        error=float((clipped[-1] - due).norm() / due.norm()),
        move=float(clipped.diff(dim=0).norm(dim=1).max()) / bound,
        noise=noise / whole.sigma,
        epsilon=found["epsilon"],
        epsilon_due=epsilon_of(whole.sample_rate, noise, whole.releases, DELTA),
        canaries=audit_scores(whole.canaries.scores(), delta=DELTA, claimed_epsilon=found["epsilon"]),
        found=found,
    )
