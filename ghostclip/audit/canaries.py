"""Canaries: records that are made for the audit, each included in the training data by a coin.

In input space they are records like others. In gradient space they are the strongest a record can be, without a forward
or a backward of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from ghostclip._validate import fraction, positive_int, probability
from ghostclip.audit.methods import Scores
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.optim import DPOptimizer, release_of


def flip_coins(count: int, *, inclusion: float = 0.5, seed: int | None = None) -> NDArray[np.bool_]:
    """Decide for every canary independently whether it is included.

    Args:
        count: m, canaries.
        inclusion: Probability of inclusion; the one-run methods need 1/2.
        seed: Makes the coins repeatable; fresh entropy by default.

    Returns:
        Booleans, shape [m].
    """
    chance = probability(inclusion, "inclusion")
    return np.asarray(np.random.default_rng(seed).random(positive_int(count, "count")) < chance)


class CanaryDataset(ConcatDataset[Any]):
    """A data set followed by those canaries that were included.

    The number of records of the result depends on the coins, and a private loader takes its sampling rate from that
    number; both count as public, so print neither beside the canaries' own coins if those are to be secret.

    Args:
        dataset: The training data, map-style with a length.
        canaries: Records of the same form.
        included: Which of them take part, shape [m], as `flip_coins` returns it.

    Raises:
        DataError: If there are not as many coins as canaries.
    """

    def __init__(self, dataset: Dataset[Any], canaries: Sequence[Any] | Dataset[Any], included: Sequence[bool]) -> None:
        count = len(canaries)  # type: ignore[arg-type]
        if len(included) != count:
            raise DataError(f"{count} canaries and {len(included)} coins: one coin for each.")
        chosen = np.flatnonzero(np.asarray(included, dtype=bool)).tolist()
        super().__init__([dataset, Subset(canaries, chosen)])  # type: ignore[arg-type]


def mislabelled(
    dataset: Dataset[Any], *, count: int, classes: int, seed: int | None = None
) -> tuple[list[tuple[Any, Any]], list[int]]:
    """Make canaries that only memory can explain: records with a wrong label, drawn at random.

    Leave the originals out of the training data: `torch.utils.data.Subset` with the indices that are not returned.

    Args:
        dataset: Records (x, y) with y a class number.
        count: How many.
        classes: Number of classes, at least 2.
        seed: Makes the choice repeatable.

    Returns:
        The canaries, and the indices of the records they were made from.

    Raises:
        InvalidOptionError: If there is no other class.
        DataError: If the data set has fewer records.
    """
    length = len(dataset)  # type: ignore[arg-type]
    if positive_int(classes, "classes") < 2:
        raise InvalidOptionError(f"classes={classes}: a wrong label needs at least two classes.")
    if positive_int(count, "count") > length:
        raise DataError(f"count={count}: the data set has only {length} records.")
    stream = np.random.default_rng(seed)
    chosen = sorted(int(index) for index in stream.choice(length, count, replace=False))
    canaries = []
    for index in chosen:
        x, y = dataset[index]
        shift = int(stream.integers(1, classes))
        wrong = (int(y) + shift) % classes
        canaries.append((x, torch.tensor(wrong) if isinstance(y, torch.Tensor) else wrong))
    return canaries, chosen


class GradientCanaries:
    """Audits a training by canaries whose clipped gradient is C in one coordinate of the parameters, zero elsewhere.

    While it is attached, every included canary joins every step with the sampling rate, as a record would, and adds
    C to its coordinate of what is released; the canary's score is the sum of its coordinate over all releases. No two
    canaries share a coordinate. The update sees the canaries, so train a model for the audit, not one to keep.

    It measures the noise, its scale, the division and the sampling rate that is accounted. Per-sample clipping it does
    not measure, since its gradients are clipped by construction: for that use `CanaryDataset`.

    Example:
        >>> from ghostclip.audit import GradientCanaries, audit_scores
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> with GradientCanaries(optimizer, count=30, sample_rate=loader.sample_rate) as canaries:
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        >>> print(audit_scores(canaries.scores(), delta=1e-5, claimed_epsilon=3.0).sentence())
        epsilon >= ...

    Args:
        optimizer: The private optimizer.
        count: m, canaries; at most as many as trainable parameters' entries.
        sample_rate: q with which a record joins a step.
        included: Coins, shape [m]; fair ones are flipped by default.
        seed: Makes coins, coordinates and sampling of the canaries repeatable.

    Raises:
        InvalidOptionError: If an option is out of range.
        DataError: If there are not as many coins as canaries.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        *,
        count: int,
        sample_rate: float,
        included: Sequence[bool] | NDArray[np.bool_] | None = None,
        seed: int | None = None,
    ) -> None:
        optimizer = release_of(optimizer)
        if not isinstance(optimizer, DPOptimizer):
            raise InvalidOptionError(f"optimizer: expected a private one, got {type(optimizer).__name__}.")
        self.optimizer = optimizer
        self.sample_rate = fraction(sample_rate, "sample_rate")
        streams = np.random.SeedSequence(seed).spawn(2)
        self._stream = np.random.default_rng(streams[0])
        coins = flip_coins(count, seed=int(streams[1].generate_state(1)[0])) if included is None else included
        self.included = np.asarray(coins, dtype=bool)
        if self.included.shape != (positive_int(count, "count"),):
            raise DataError(f"{count} canaries and coins of shape {self.included.shape}: one coin for each.")
        self._parameters = [p for p in optimizer.params if p.requires_grad]
        self._coordinates = self._choose(count)
        self._score_M = np.zeros(count)
        self._handle: Any = None
        self.steps = 0

    def _choose(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each parameter, which canaries (first) have which of its entries (second)."""
        total = sum(p.numel() for p in self._parameters)
        if count > total:
            raise InvalidOptionError(f"count={count}: the optimizer has only {total} trainable entries.")
        entry_M = self._stream.choice(total, count, replace=False)
        chosen, first = [], 0
        for p in self._parameters:
            canaries = np.flatnonzero((first <= entry_M) & (entry_M < first + p.numel()))
            entries = torch.from_numpy(entry_M[canaries] - first).to(p.device)
            chosen.append((torch.from_numpy(canaries), entries))
            first += p.numel()
        return chosen

    def __enter__(self) -> GradientCanaries:
        self._handle = self.optimizer.register_step_pre_hook(self._observe)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    @torch.no_grad()
    def _observe(self, _optimizer: object, _args: object, _options: object) -> None:
        """Add the canaries of this step to the release, and read every canary's coordinate."""
        mean = self.optimizer.loss_reduction == "mean"
        divisor = float(self.optimizer.expected_batch_size or 1.0) if mean else 1.0
        bound = self.optimizer.max_grad_norm
        taking_part = self.included & (self._stream.random(self.included.size) < self.sample_rate)
        share_M = torch.from_numpy(taking_part * (bound / divisor))
        for p, (canaries, entries) in zip(self._parameters, self._coordinates, strict=True):
            if canaries.numel() == 0 or p.grad is None:
                continue
            flat = p.grad.reshape(-1)
            flat[entries] += share_M[canaries].to(flat)
            if flat.data_ptr() != p.grad.data_ptr():
                p.grad.copy_(flat.view_as(p.grad))
            self._score_M[canaries.numpy()] += flat[entries].double().cpu().numpy() * (divisor / bound)
        self.steps += 1

    def scores(self) -> Scores:
        """Return the sum of every canary's coordinate, in units of C, for the one-run methods of `audit_scores`.

        Returns:
            A score for each canary, and whether it was included.

        Raises:
            DataError: If no step was released.
        """
        if self.steps == 0:
            raise DataError("gradient canaries: no step was released while they were attached.")
        return Scores.of(self._score_M, self.included)
