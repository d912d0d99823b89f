"""A private training inside a host's loop: loader, optimizer, parts of a batch and ε, from options that hosts share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from ghostclip.accounting import get_noise_multiplier
from ghostclip.clipping.options import factor_dtype_of
from ghostclip.data import DPDataLoader, PhysicalBatches
from ghostclip.data.accepted import checked_batch_size, dataset_length, record_sampler
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.integrations.training.arguments import PrivacyArguments
from ghostclip.mechanisms import (
    BallsInBins,
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    Mechanism,
    PoissonSampling,
    UnamplifiedSampling,
)
from ghostclip.mechanisms.mechanism import Correlated
from ghostclip.mechanisms.plan import calibrated
from ghostclip.optim import release_of
from ghostclip.privacy.budget import Budget

_GREATEST_SEED = 2**63
_WHOLE = 2**40


class HostTraining:
    """What makes the training of one host private.

    Attributes:
        engine: Keeps the account.
        loader: The private loader, once it is made.
        optimizer: What releases, once it is made.
        budget: What it must not exceed, where `target_epsilon` says so.

    Args:
        options: Privacy options.
        max_grad_norm: C.
        rank: Number of this process.
    """

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

    def private_loader(self, loader: Any, *, ranks: int, accumulated: int = 1, place: str) -> DPDataLoader:
        """Return a loader of Poisson batches in the place of a host's loader.

        The loader's batch size is what a process computes at once; times processes and accumulated batches it is the
        expected size of a draw, where `expected_batch_size` says no other.

        Args:
            loader: The host's, before it was dealt out to processes; a `DPDataLoader` is taken as it is.
            ranks: Processes that share a draw.
            accumulated: Batches that the host accumulates into a step.
            place: Where the loader came from, for errors.

        Returns:
            The private loader; the same one for the same training.

        Raises:
            DataError: If it is no loader, or a draw is larger than the data.
            InvalidOptionError: If its sampling cannot be replaced, or batches of a private loader are accumulated.
        """
        if isinstance(loader, DPDataLoader):
            if accumulated > 1:
                raise InvalidOptionError(
                    f"{place}: it is private already, and {accumulated} of its draws would be added up in a step, "
                    f"which costs more ε than one draw of {accumulated} times the size. Give the loader as it was."
                )
            self.loader, self._at_once = loader, None
            return loader
        if not isinstance(loader, DataLoader):
            raise DataError(
                f"{place}: expected one torch.utils.data.DataLoader, got {type(loader).__name__}. Join several data "
                "sets with torch.utils.data.ConcatDataset: one draw is over all records."
            )
        dealt = type(record_sampler(loader)) is DistributedSampler
        each = checked_batch_size(loader) // (ranks if dealt else 1)
        records = dataset_length(loader.dataset)
        expected = self.options.expected_batch_size or each * ranks * accumulated
        if expected > records:
            product = f"batch_size={each} × {accumulated} accumulated × {ranks} process(es) = "
            raise DataError(
                f"{place}: {'expected_batch_size=' if self.options.expected_batch_size else product}{expected}, of "
                f"{records} records: an expected batch has at most all of them. Use a smaller batch "
                "size (per_device_train_batch_size in a Trainer), or accumulate less."
            )
        made = DPDataLoader.from_data_loader(
            loader,
            scheme=self._mechanism().scheme(records, expected),
            generator=self._generator(0),
        )
        if loader.generator is None:
            # Each pass draws a seed for its workers; from the global generator a resumed training would draw one more.
            made.generator = torch.Generator().manual_seed(torch.initial_seed() % _GREATEST_SEED)
        self.loader, self._at_once = made, each
        return made

    def make_private(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, steps: int | None, wrap_model: bool
    ) -> tuple[nn.Module, Any]:
        """Make model and optimizer private.

        Args:
            model: The model.
            optimizer: Its optimizer, or several in a list.
            steps: Releases of the whole training, for `target_epsilon`; None where the host does not know.
            wrap_model: As for `PrivacyEngine.make_private`.

        Returns:
            The model, and the private optimizer or optimizers.

        Raises:
            InvalidOptionError: If ε is to be met and the number of steps is not known.
        """
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
            self.budget = Budget(options.target_epsilon, _given(options.target_delta))
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
            factor_dtype=factor_dtype_of(options.factor_dtype),
        )
        self.optimizer = release_of(private)
        at_once = "auto" if options.physical_batch == "auto" else self._at_once
        self._parts = None if at_once is None else PhysicalBatches(self.optimizer, max_physical_batch_size=at_once)
        # Before anything is trained: it warns of a δ that promises nothing.
        self.epsilon()
        return cast("nn.Module", module), private

    def run(self, batch: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Run forward and backward of a draw in parts that fit in memory; see `PhysicalBatches.run`.

        Args:
            batch: The batch.
            work: Runs forward and backward on a part.

        Returns:
            What `work` returned, part by part.
        """
        if self._parts is None:
            # The user's own private loader, whose batches were to be computed whole: they still may be too large.
            self._parts = PhysicalBatches(self.optimizer, max_physical_batch_size=_WHOLE)
        return self._parts.run(batch, work)

    def leave(self) -> None:
        """Detach from the model, which is an ordinary one again; the account stays."""
        if self.optimizer is not None:
            self.optimizer.clipper.remove()

    def epsilon(self) -> float:
        """Return ε at the δ that was given, of all releases up to now."""
        releases = len(self.engine.accountant)
        if self._epsilon[0] != releases:
            self._epsilon = (releases, self.engine.get_epsilon(_given(self.options.target_delta)))
        return self._epsilon[1]

    def _mechanism(self) -> Mechanism:
        """Return what draws records and adds noise, for any number of epochs."""
        options = self.options
        made: dict[str, Callable[[], Mechanism]] = {
            "poisson": PoissonSampling,
            "balls_in_bins": BallsInBins,
            "unamplified": UnamplifiedSampling,
            "banded_inverse": lambda: BandedInverse(bands=options.noise_bands),
            "banded_matrix_factorization": lambda: BandedMatrixFactorization(bands=options.noise_bands),
            "buffered_toeplitz": lambda: BufferedToeplitz(buffers=options.noise_bands),
        }
        return made[options.mechanism]()

    def _noise_for(self, steps: int | None, mechanism: Mechanism) -> float:
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
            budget = _given(options.target_epsilon), _given(options.target_delta)
            return calibrated(mechanism, loader.private_sampler.scheme, math.ceil(steps / len(loader)), budget)[0]
        return get_noise_multiplier(
            target_epsilon=_given(options.target_epsilon),
            target_delta=_given(options.target_delta),
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


def _given(value: float | None) -> float:
    assert value is not None, "checked with the options"
    return value
