"""A private training inside a host's loop: loader, optimizer, parts of a batch and ε, from options that hosts share.

The options are fields that any class of training arguments is joined with. Versions of hosts that this was tested with
are listed here, and what is said once beside another one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from ghostclip import _validate, mechanisms
from ghostclip.accounting import get_noise_multiplier
from ghostclip.clipping.plan import MEMORY_BUDGET
from ghostclip.data import DPDataLoader, PhysicalBatches
from ghostclip.data.loader import checked_batch_size, dataset_length, record_sampler
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.facade import mode_of
from ghostclip.language import CHOICES
from ghostclip.mechanisms import Correlated, calibrated
from ghostclip.noise.continuous import LEVELS
from ghostclip.optim import release_of
from ghostclip.options import CLIPPINGS
from ghostclip.privacy.budget import Budget

TESTED: Final[dict[str, tuple[str, str]]] = {
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "peft": ("0.21", "0.21"),
    "pytorch-lightning": ("2.6", "2.6"),
    "timm": ("1.0", "1.0"),
    "transformers": ("5.23", "5.23"),
    "trl": ("1.16", "1.16"),
}
"""First and last tested version of each distribution, as far as they are compared: later figures do not count."""


@lru_cache
def warn_if_untested(distribution: str) -> None:
    """Warn, once in a process, of a distribution older than in `TESTED`."""
    # Of all these hosts, or of what they need.
    from packaging.version import Version

    first, last = TESTED[distribution]
    installed = metadata.version(distribution)
    figures, oldest = (Version(version).release for version in (installed, first))
    if figures[: len(oldest)] < oldest:
        tested = first if first == last else f"{first} to {last}"
        warnings.warn(
            f"{distribution} {installed} is installed; this integration was tested with {distribution} {tested}. What "
            "a version does differently is mostly refused, and may be missing in logs or checkpoints: compare a short "
            "run.",
            stacklevel=3,
        )


_MODES = ("auto", "bookkeeping", "ghost", "fast", "hooks", "graph")
# By the number of bands.
_MECHANISMS: dict[str, Callable[[int], mechanisms.Mechanism]] = {
    "poisson": lambda _: mechanisms.PoissonSampling(),
    "balls_in_bins": lambda _: mechanisms.BallsInBins(),
    "unamplified": lambda _: mechanisms.UnamplifiedSampling(),
    "banded_inverse": lambda bands: mechanisms.BandedInverse(bands=bands),
    "banded_matrix_factorization": lambda bands: mechanisms.BandedMatrixFactorization(bands=bands),
    "buffered_toeplitz": lambda buffers: mechanisms.BufferedToeplitz(buffers=buffers),
}
MECHANISMS = tuple(_MECHANISMS)
_CHOICES = {
    "clipping": CLIPPINGS,
    "grad_sample_mode": _MODES,
    "vocabulary_head": CHOICES,
    "noise_level": LEVELS,
    "mechanism": MECHANISMS,
}
_NUMBERS: dict[str, Callable[[object, str], float]] = {
    "noise_multiplier": _validate.non_negative,
    "target_epsilon": _validate.positive,
    "planned_epochs": _validate.positive,
    "expected_batch_size": _validate.positive_int,
    "noise_bands": _validate.positive_int,
}
_A = TypeVar("_A", bound="PrivacyArguments")


@dataclass
class PrivacyArguments:
    """Privacy options, in addition to those of `TrainingArguments`; its `max_grad_norm` is C, the bound on each record.

    The gradient of the batch is not clipped a second time. `per_device_train_batch_size` is the physical batch, which
    is computed at once. Times `gradient_accumulation_steps` and the number of processes it is the expected size of a
    Poisson batch, unless `expected_batch_size` is given.

    Attributes:
        target_epsilon: ε that the whole training may cost. The noise follows from it, unless it is given.
        target_delta: δ, well below 1/N for N records.
        noise_multiplier: σ, the standard deviation of the noise in units of C. With `target_epsilon` as well, the step
            that would exceed that ε is refused.
        planned_epochs: Number of epochs for which `target_epsilon` shall last, if the training will be resumed and
            continue beyond the trainer's own number of epochs, which is the least it can be.
        expected_batch_size: Average number of records in a Poisson batch, from 1 to all of them.
        clipping: As in `PrivacyEngine.make_private`.
        physical_batch: "auto" measures memory and finds the size of physical batches; None uses
            `per_device_train_batch_size`. Either way, a physical batch that does not fit is halved.
        grad_sample_mode: "auto", "bookkeeping", "ghost", "fast", "hooks" or "graph".
        compile: Of "auto": None begins eagerly, and has graphs compute the step once they are known to be quicker,
            where the loss is a known one; True has them compute it from the beginning, as the Trainer's
            `torch_compile=True` does; False never does.
        vocabulary_head: "auto" computes the loss of causal language models without their logits where that fits,
            "fused" refuses models where it does not, "logits" never does.
        memory_budget: How much a backward may hold, relative to an ordinary one. Below 1, repeated blocks are run
            again, and some get two backwards; see `PrivacyEngine.make_private`.
        noise_level: "fast", "secure" or "exact".
        mechanism: How records are drawn and noise is added: "poisson", "balls_in_bins" (each record once an epoch),
            "unamplified", or noise that takes earlier noise back: "banded_inverse", "banded_matrix_factorization" (with
            sampling) or "buffered_toeplitz"; see `ghostclip.mechanisms`.
        noise_bands: Bands of correlated noise; of "buffered_toeplitz" its buffers.
        ledger: A file that every release is written to before it is applied.
        reproducible_seed: What sampling and noise follow from, and so not private against who knows it; for tests.
    """

    target_epsilon: float | None = field(default=None, metadata={"help": "ε that the whole training may cost."})
    target_delta: float | None = field(default=None, metadata={"help": "δ, well below 1 / number of records."})
    noise_multiplier: float | None = field(default=None, metadata={"help": "σ, in place of target_epsilon."})
    planned_epochs: float | None = field(default=None, metadata={"help": "Epochs that target_epsilon is to last for."})
    expected_batch_size: int | None = field(default=None, metadata={"help": "Records of a Poisson batch on average."})
    clipping: str = field(default="flat", metadata={"help": f"How records are clipped: {', '.join(CLIPPINGS)}."})
    physical_batch: str | None = field(default=None, metadata={"help": '"auto": as large as memory allows.'})
    grad_sample_mode: str = field(default="auto", metadata={"help": f"Strategy: {', '.join(_MODES)}."})
    compile: bool | None = field(default=None, metadata={"help": "Whether the step is compiled; None: where it pays."})
    vocabulary_head: str = field(default="auto", metadata={"help": f"Loss of a head: {', '.join(CHOICES)}."})
    memory_budget: float = field(
        default=MEMORY_BUDGET, metadata={"help": "Memory of a backward, over an ordinary one's."}
    )
    noise_level: str = field(default="fast", metadata={"help": f"Source of noise: {', '.join(LEVELS)}."})
    mechanism: str = field(default="poisson", metadata={"help": f"Sampling and noise: {', '.join(MECHANISMS)}."})
    noise_bands: int = field(default=4, metadata={"help": "Bands, or buffers, of correlated noise."})
    ledger: str | None = field(default=None, metadata={"help": "File that every release is written to first."})
    reproducible_seed: int | None = field(default=None, metadata={"help": "For tests: not private."})

    def __post_init__(self) -> None:
        # The next in line is the host's, where this is joined with one.
        following = getattr(super(), "__post_init__", None)
        if following is not None:
            following()
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise InvalidOptionError("target_epsilon=None, noise_multiplier=None: give one of the two.")
        if self.target_delta is None:
            raise InvalidOptionError("target_delta=None: give δ, well below 1 / number of records (1e-5 for 10,000).")
        _validate.probability(self.target_delta, "target_delta")
        for name, check in _NUMBERS.items():
            if getattr(self, name) is not None:
                check(getattr(self, name), name)
        for name, known in _CHOICES.items():
            _validate.choice(getattr(self, name), name, known)
        if self.compile is None and self.grad_sample_mode == "auto" and getattr(self, "torch_compile", False):
            self.compile = True
        self.grad_sample_mode = mode_of(self.grad_sample_mode, self.compile)
        _validate.positive(self.memory_budget, "memory_budget", allow_infinity=True)
        if self.physical_batch not in (None, "auto"):
            raise InvalidOptionError(
                f"physical_batch={self.physical_batch!r}: None or 'auto'; a number is per_device_train_batch_size."
            )
        bound = getattr(self, "max_grad_norm", 1.0)
        if bound is None or not bound > 0:
            raise InvalidOptionError(
                f"max_grad_norm={bound}: it is C here, the bound of each record's gradient, and the batch's is not "
                "clipped again. Give a number above 0."
            )


def suggests_fields(kind: type[_A]) -> type[_A]:
    """Let a dataclass that is given a field it does not have name the nearest one that it has."""
    kind.__init__ = _validate.suggests_options(kind.__init__)  # type: ignore[method-assign]
    return kind


Contradiction = tuple[str, Callable[[Any], bool], str, str]
"""Name of a host's option, whether a value contradicts a private training, why, and what to do."""


def refuse_options(table: Sequence[Contradiction], value_of: Callable[[str], Any], said: str) -> None:
    """Refuse values that contradict a private training, said as ``said`` with their name and text in its braces."""
    for name, contradicts, why, remedy in table:
        value = value_of(name)
        if value is not None and contradicts(value):
            text = repr(getattr(value, "value", value))
            shown = said.format(f"{name}={text if len(text) < 60 else type(value).__name__}")
            raise InvalidOptionError(f"{shown}: {why}. {remedy}.")


_GREATEST_SEED = 2**63
_WHOLE = 2**40


@contextmanager
def forgotten(owner: Any) -> Iterator[dict[str, Any]]:
    """Put the attributes of a trainer or a module back afterwards, which are yielded: a step is only looked at."""
    attributes: dict[str, Any] = owner.__dict__
    noted = dict(attributes)
    try:
        yield attributes
    finally:
        attributes.clear()
        attributes.update(noted)


class HostTraining:
    """What makes the training of one host private: engine, loader, what releases, the budget of `target_epsilon`."""

    # Loader and optimizer are None until they are made. `max_grad_norm` is C, `rank` the number of this process.
    def __init__(self, options: PrivacyArguments, *, max_grad_norm: float, rank: Callable[[], int]) -> None:
        self.options, self._max_grad_norm, self._rank = options, max_grad_norm, rank
        self.engine = PrivacyEngine(noise_level=options.noise_level, ledger=options.ledger)
        self.loader: DPDataLoader | None = None
        self.optimizer: Any = None
        self.budget: Budget | None = None
        self._at_once: int | None = None
        self._parts: PhysicalBatches | None = None
        self._epsilon: tuple[int, float] = (-1, 0.0)
        self._noise: torch.Generator | None = None

    def private_loader(self, loader: Any, *, ranks: int, accumulated: int = 1, source: str) -> DPDataLoader:
        """Return a loader of Poisson batches in the place of a host's; the same one for the same training."""
        # Its batch size is what a process computes at once; times `ranks`, processes that share a draw, and
        # `accumulated` batches of a step it is the expected size of a draw, where `expected_batch_size` says no other.
        # It comes before it was dealt out to processes; a `DPDataLoader` is taken as it is. `source`: where it came
        # from, for errors.
        if isinstance(loader, DPDataLoader):
            if accumulated > 1:
                raise InvalidOptionError(
                    f"{source}: it is private already, and {accumulated} of its draws would be added up in a step, "
                    f"which costs more ε than one draw of {accumulated} times the size. Give the loader as it was."
                )
            self.loader, self._at_once = loader, None
            return loader
        if not isinstance(loader, DataLoader):
            raise DataError(
                f"{source}: expected one torch.utils.data.DataLoader, got {type(loader).__name__}. Join several data "
                "sets with torch.utils.data.ConcatDataset: one draw is over all records."
            )
        dealt = type(record_sampler(loader)) is DistributedSampler
        each = checked_batch_size(loader) // (ranks if dealt else 1)
        records = dataset_length(loader.dataset)
        expected = self.options.expected_batch_size or each * ranks * accumulated
        if expected > records:
            product = f"batch_size={each} × {accumulated} accumulated × {ranks} process(es) = "
            raise DataError(
                f"{source}: {'expected_batch_size=' if self.options.expected_batch_size else product}{expected}, of "
                f"{records} records: an expected batch has at most all of them. Use a smaller batch "
                "size (per_device_train_batch_size in a Trainer), or accumulate less."
            )
        made = DPDataLoader.from_data_loader(
            loader, scheme=self._mechanism().scheme(records, expected), generator=self._generator(0)
        )
        if loader.generator is None:
            # Each pass draws a seed for its workers; from the global generator a resumed training would draw one more.
            made.generator = torch.Generator().manual_seed(torch.initial_seed() % _GREATEST_SEED)
        self.loader, self._at_once = made, each
        return made

    def make_private(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, steps: int | None, wrap_model: bool
    ) -> tuple[nn.Module, Any]:
        """Return model and optimizer, or several in a list, made private."""
        # `steps`: releases of the whole training, for `target_epsilon`; None where the host does not know.
        assert self.loader is not None, "the loader is made first"
        options = self.options
        if options.planned_epochs is not None:
            steps = max(steps or 0, math.ceil(options.planned_epochs * len(self.loader)))
        mechanism = self._mechanism()
        if isinstance(mechanism, Correlated) and steps is None:
            raise InvalidOptionError(
                f"mechanism={options.mechanism!r}: its noise follows from the number of epochs, which is not known. "
                "Say how long the training is (max_epochs, max_steps, planned_epochs)."
            )
        if steps is not None:
            mechanism = mechanism.for_epochs(math.ceil(steps / len(self.loader)))
        noise = self._noise_for(steps, mechanism) if options.noise_multiplier is None else options.noise_multiplier
        self._noise = self._noise or self._generator(1)  # trained further, it goes on where it was
        if options.target_epsilon is not None:
            self.budget = Budget(options.target_epsilon, _required(options.target_delta))
            if options.noise_multiplier is None and steps is not None and options.mechanism == "poisson":
                self.budget.known_to_fit((noise, self.loader.event.sample_rate, steps))
        # "ghost" has a criterion as well, before the loader.
        module, private, *_ = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=self.loader,
            noise_multiplier=noise,
            max_grad_norm=self._max_grad_norm,
            clipping=options.clipping,
            grad_sample_mode=options.grad_sample_mode,
            noise_generator=self._noise,
            wrap_model=wrap_model,
            budget=self.budget,
            mechanism=None if options.mechanism == "poisson" else mechanism,
            memory_budget=options.memory_budget,
        )
        self.optimizer = release_of(private)
        self._parts = None
        # Before anything is trained: it warns of a δ that promises nothing.
        self.epsilon()
        return cast("nn.Module", module), private

    def run(self, batch: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Run forward and backward of a draw in parts that fit in memory; see `PhysicalBatches.run`."""
        if self._parts is None:
            # Batches of the user's own private loader were to be computed whole: they still may be too large.
            at_once = "auto" if self.options.physical_batch == "auto" else self._at_once or _WHOLE
            self._parts = PhysicalBatches(self.optimizer, max_physical_batch_size=at_once)
        return self._parts.run(batch, work)

    def leave(self) -> None:
        """Detach from the model, which is an ordinary one again; the account stays."""
        if self.optimizer is not None:
            self.optimizer.clipper.remove()

    def epsilon(self) -> float:
        """Return ε at the δ that was given, of all releases up to now."""
        releases = len(self.engine.accountant)
        if self._epsilon[0] != releases:
            self._epsilon = (releases, self.engine.get_epsilon(_required(self.options.target_delta)))
        return self._epsilon[1]

    def _mechanism(self) -> mechanisms.Mechanism:
        """Return what draws records and adds noise, for any number of epochs."""
        return _MECHANISMS[self.options.mechanism](self.options.noise_bands)

    def _noise_for(self, steps: int | None, mechanism: mechanisms.Mechanism) -> float:
        options, loader = self.options, self.loader
        assert loader is not None, "the loader is made first"
        if steps is None:
            raise InvalidOptionError(
                "target_epsilon: the noise follows from the number of steps, which is not known here. Say how long the "
                "training is (max_epochs, max_steps, planned_epochs), or give noise_multiplier."
            )
        if options.noise_level == "exact":
            raise InvalidOptionError("target_epsilon with noise_level='exact': give noise_multiplier.")
        if options.mechanism != "poisson":
            # Rounds and epochs are charged when they begin.
            budget = _required(options.target_epsilon), _required(options.target_delta)
            return calibrated(mechanism, loader.private_sampler.scheme, math.ceil(steps / len(loader)), budget)[0]
        return get_noise_multiplier(
            target_epsilon=_required(options.target_epsilon),
            target_delta=_required(options.target_delta),
            sample_rate=loader.event.sample_rate,
            steps=steps,
            relation=loader.event.relation,
        )

    def _generator(self, purpose: int) -> torch.Generator | None:
        seed = self.options.reproducible_seed
        if seed is None:
            return None
        # Of one seed ranks sample alike, and each draws noise of its own.
        return torch.Generator().manual_seed((2 * seed + purpose + 1000 * self._rank()) % _GREATEST_SEED)


def _required(value: float | None) -> float:
    assert value is not None, "checked with the options"
    return value
