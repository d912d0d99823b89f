"""The private loader, its sampler, and which loaders it can stand for.

Lightning and Fabric leave loaders alone whose sampler is a `DistributedSampler`, accelerate those that say to be
prepared: draws are not dealt out to ranks once more. Both then expect that the loader moves its batches to the device.

The batch sampler: which position a training is at, and which records of a draw are this rank's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from torch import distributed
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ghostclip._validate import fraction, options_of, positive_int, takes
from ghostclip.accounting.history import SamplingEvent
from ghostclip.data.collation import EmptyBatchCollate
from ghostclip.data.schemes import Poisson, SamplingScheme
from ghostclip.distributed.agreement import (
    Group,
    gathered,
    noting_each,
    refusals_shared,
    require_equal,
    require_group,
    world_size,
)
from ghostclip.errors import DataError, InvalidOptionError, ResumeError
from ghostclip.noise.keys import Owner, RandomKey
from ghostclip.optim.draws import Draw, DrawLog

_REMEDY = (
    "Make the loader (and what make_private() returns) in the process that trains; one that shall continue loads the "
    "original's state_dict()."
)


class Records(list[int]):
    """Records of one rank's share of a draw; ``most`` is the size of the largest share of any rank."""

    def __init__(self, records: Iterable[int] = (), *, most: int = 0) -> None:
        super().__init__(records)
        self.most = most


class PrivateSampler(Sampler[list[int]]):
    """Batch sampler over a scheme: owns the key, the position, the rank, and the accounting event.

    Privacy:
        Batch number n of a training is a function of (key, n), and no n is ever drawn twice, also after an abandoned
        loop: what prefetching workers had drawn ahead is dropped unseen. Which records were drawn, and how many, stays
        secret: batch sizes are not covered by the guarantee. Replicas (see `deal`) all draw the same batch and keep
        every n-th record, so that records are neither repeated nor lost nor drawn with correlation.

    Attributes:
        rank: Number of this replica.
        num_replicas: How many share each batch.
        draws: The draws that no release has used yet.

    Args:
        scheme: What is drawn.
        generator: torch generator to draw the key from, once; warns.
        seed: Whole number to derive the key from; warns.
    """

    def __init__(
        self, scheme: SamplingScheme, *, generator: torch.Generator | None = None, seed: int | None = None
    ) -> None:
        self._scheme = scheme
        self.rank, self.num_replicas = 0, 1
        self.draws = DrawLog(once_a_pass=scheme.event.kind == "shuffled")
        self._owner = Owner(self)
        self._key = RandomKey("sampling", seed=seed, generator=generator)
        self._drawn = 0  # batches, in the whole training
        self.delivered = 0  # batches, in the whole training
        self._epoch_end = 0  # number of the first batch after this epoch
        self.resuming = False  # whether the next pass continues an epoch that was interrupted
        self._loop: object = None  # identity of the newest pass
        self._tracker: object = None  # identity of the newest `tracking` context; None where draws count as delivered

    @property
    def scheme(self) -> SamplingScheme:
        """The scheme that is drawn from; fixed, as the account goes by it."""
        return self._scheme

    num_samples = property(attrgetter("scheme.num_samples"), doc="N, the number of records.")
    sample_rate = property(attrgetter("scheme.event.sample_rate"), doc="Probability q of the accounting event.")
    steps = property(attrgetter("scheme.steps"), doc="Batches per epoch.")
    event = property(attrgetter("scheme.event"), doc="The accounting event of a step (of shuffled batches: an epoch).")
    expected_batch_size = property(
        attrgetter("scheme.expected_batch_size"), doc="Records in a batch of all replicas on average; public."
    )

    @property
    def periods_begun(self) -> int:
        """Events (steps, epochs or rounds) of which a batch was delivered, also before a resumption."""
        return -(-self.delivered // self.event.steps_per_event)

    def __len__(self) -> int:
        return self.steps

    def draw(self, position: int) -> list[int]:
        """Return this rank's records of batch number `position` of the whole training, ascending; always the same."""
        self._owner.require(self, remedy=_REMEDY)
        return self.scheme.draw(self._key, position)[self.rank :: self.num_replicas].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one epoch of fresh batches; after `load_state_dict`, what was left of the interrupted one."""
        loop = self._loop = object()
        self._begin_epoch()
        self.draws.begin_pass()
        if self._tracker is not None:
            self.draws.follow_deliveries()
        while self._drawn < self._epoch_end:
            position = self._drawn
            # Counted before it is handed out: whatever happens to this batch, it is never drawn again.
            self._drawn = position + 1
            if self._tracker is None:
                self.delivered = self._drawn
            mine = self.draw(position)
            whole = mine if self.num_replicas == 1 else self.scheme.draw(self._key, position)
            self.draws.add(Draw(position, len(mine), len(whole)))
            yield mine if whole is mine else Records(mine, most=-(-len(whole) // self.num_replicas))
            if self._loop is not loop:
                raise InvalidOptionError("a newer loop over this private loader has started; use one at a time.")
        self.draws.end_pass()

    def _begin_epoch(self) -> None:
        """Set where the epoch that starts now ends."""
        if not self.resuming:
            if self.event.kind == "shuffled":
                # An epoch that was left early is over: the batches left of its order are not part of the next one.
                self._drawn = self.steps * -(-self._drawn // self.steps)
                self.delivered = self._drawn
            self._epoch_end = self._drawn + self.steps
        self.resuming = False

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Let a loader that draws ahead say by `mark_delivered` which batches its user has received."""
        # Within this context `state_dict` counts deliveries instead of draws, so that prefetched batches are not lost.
        tracker = self._tracker = object()
        self.delivered = self._drawn
        try:
            yield
        finally:
            if self._tracker is tracker:
                self._tracker = None

    def mark_delivered(self) -> None:
        """Count one batch as received by the user."""
        self.delivered += 1
        self.draws.deliver()

    def deal(self, rank: int, num_replicas: int) -> None:
        """Yield only every `num_replicas`-th record of each batch from now on, from number `rank` on."""
        # Replicas of one number keep the same records: ranks of which each has a part of the model, say.
        if not 0 <= rank < num_replicas:
            raise InvalidOptionError(f"rank={rank!r}: must lie in [0, num_replicas={num_replicas!r}).")
        self.rank, self.num_replicas = rank, num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the key and the position as plain Python values, the same on all replicas.

        Privacy:
            The state contains the key: keep it where the noise's and the data's secrets are kept.
        """
        unused = self.draws.next_number if self.draws.claimed else None
        # What was handed out and not released is drawn again: a prefetcher may hold it, or a step not be taken yet.
        position = self.delivered if unused is None else min(unused, self.delivered)
        return {
            "key": self._key.secret.hex(),
            "position": position,
            "remaining": max(0, self._epoch_end - position),
            **self.scheme.describe(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a saved sampler was: the next epoch yields what was left of the interrupted one."""
        described = self.scheme.describe()
        missing = {"key", "position", "remaining", *described} - state.keys()
        if missing:
            raise ResumeError(f"sampler state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        for name, value in described.items():
            if state[name] != value:
                raise ResumeError(
                    f"sampler state: {name}={state[name]!r} was saved, this sampler has {value!r}; "
                    "resume with the data and the batch size of the interrupted run."
                )
        position, remaining = int(state["position"]), int(state["remaining"])
        self._owner.move_here(self, remedy=_REMEDY)
        anew = state["key"] != self._key.secret.hex()
        self._key.load(state["key"])
        # Nothing is changed before here, and nothing fails from here on.
        self._drawn = self.delivered = position
        self._epoch_end = position + remaining
        self.resuming = remaining > 0
        self.draws.forget(anew=anew)


class PoissonSampler(PrivateSampler):
    """Batch sampler in which every record joins every batch independently with probability q.

    A batch may be empty, and has any size up to the number of records (or to `max_batch_size`). The distribution is
    that of N coins, in time proportional to the batch.

    Privacy:
        This is the sampling that the accountants assume; see `PrivateSampler`.

    Args:
        num_samples: N, the number of records.
        sample_rate: q in (0, 1].
        generator: torch generator to draw the key from, once; warns.
        steps: Batches per epoch; round(1/q), at least 1, by default.
        seed: Whole number to derive the key from; warns.
        max_batch_size: Keep a uniformly random subset of so many where more were sampled; its event is another one.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
        seed: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        scheme = Poisson(num_samples=num_samples, sample_rate=sample_rate, epoch_steps=steps, truncation=max_batch_size)
        super().__init__(scheme, generator=generator, seed=seed)


def share_sampler(sampler: PrivateSampler, group: Group = None) -> None:
    """Let all ranks draw the same batches, by rank 0's key and position, and share the records of each among them.

    Privacy:
        Every batch is one draw, as accounted. Each of its records is on exactly one rank.
    """
    require_group()
    states = gathered("sampling", sampler.state_dict(), group)
    names = sampler.scheme.describe()
    require_equal("sampling", [{name: state.get(name) for name in names} for state in states])
    sampler.load_state_dict(states[0])
    sampler.deal(distributed.get_rank(group), distributed.get_world_size(group))


_REMEDIES: tuple[tuple[type, str], ...] = (
    (WeightedRandomSampler, "weights give every record another privacy loss; leave the sampler out"),
    (SubsetRandomSampler, "pass torch.utils.data.Subset(dataset, indices) as the data set and leave the sampler out"),
)

FETCHING: Final = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip
"""torch's options on how records are fetched: workers, pinning, time limit."""


def refuse_wrapped(loader: Any) -> None:
    """Refuse an object that is no loader of torch's but wraps one."""
    if not isinstance(loader, DataLoader):
        if not hasattr(loader, "dataset"):
            raise DataError(
                f"data_loader: {type(loader).__name__} is no torch.utils.data.DataLoader, whose records can be drawn. "
                "Give DataLoader(data_set, batch_size=B) with a map-style data set; a list of records is one."
            )
        raise DataError(
            f"data_loader: {type(loader).__name__} is no torch.utils.data.DataLoader, so that its sampling cannot be "
            "replaced. Call make_private with the DataLoader itself, and let a framework set up (fabric."
            "setup_dataloaders) the loader that it returns."
        )


def dataset_length(dataset: Dataset[Any]) -> int:
    """Return the number of records of a data set, at least 1; refuse a stream."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__}: records cannot be drawn independently from a stream; "
            "use a map-style data set with __getitem__ and __len__."
        )
    length = len(dataset)
    if not length:
        raise DataError(f"{type(dataset).__name__}: the data set is empty.")
    return length


def warn_of_repetitions(dataset: Any) -> None:
    """Warn where `Subset` or `ConcatDataset` repeat records: ε then protects a position, not a record."""
    records = _origins(dataset, {}) if isinstance(dataset, (Subset, ConcatDataset)) else np.zeros(1)
    repeated = len(records) - len(np.unique(records))
    if repeated:
        warnings.warn(
            f"data set: {repeated} of its {len(records)} records are there before ({type(dataset).__name__} with "
            "repeated indices or data sets). ε protects one position of the data set: a record that is there k times "
            "counts as k, and what they reveal together may cost k times ε. Leave repetitions out (weights belong "
            "into the loss), or "
            "protect all copies at once: ghostclip.data.UserDataset(records, users), with a number for each record.",
            stacklevel=6,
        )


def _origins(dataset: Any, firsts: dict[int, int]) -> np.ndarray:
    """Return a number for each record, the same for the same entry of the same data set."""
    if isinstance(dataset, Subset):
        return _origins(dataset.dataset, firsts)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_origins(part, firsts) for part in dataset.datasets])
    return firsts.setdefault(id(dataset), len(firsts) << 40) + np.arange(len(dataset))


def record_sampler(loader: DataLoader[Any]) -> Any:
    """Return a loader's sampler, also from inside a plain batch sampler."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def checked_batch_size(loader: DataLoader[Any]) -> int:
    """Return records per batch, over all ranks, of a loader whose sampling may be replaced by a private sampler's."""
    # Beside a `DistributedSampler` the loader's batch size is that of one rank.
    records = dataset_length(loader.dataset)
    if not getattr(loader, "in_order", True):
        raise InvalidOptionError("in_order=False: a private loader delivers batches in the order they are drawn.")
    batches = loader.batch_sampler
    if batches is None:
        raise InvalidOptionError("batch_size=None: the loader does not form batches; give it a batch_size.")
    if type(batches) is not BatchSampler:
        raise InvalidOptionError(
            f"batch_sampler {type(batches).__name__}: what it draws is not what an accountant assumes; "
            "give the loader a batch_size instead, and pass it as it is before another library prepares it."
        )
    sampler: Any = batches.sampler
    for refused, remedy in _REMEDIES:
        if isinstance(sampler, refused):
            raise InvalidOptionError(f"sampler {type(sampler).__name__}: {remedy}.")
    if type(sampler) is DistributedSampler:
        return batches.batch_size * _ranks_of(sampler, records)
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == records
    )
    if not whole:
        raise InvalidOptionError(
            f"sampler {type(sampler).__name__}: only a RandomSampler or SequentialSampler over all records can be "
            "replaced by Poisson sampling; leave the sampler out, or select records with torch.utils.data.Subset."
        )
    return batches.batch_size


def _ranks_of(sampler: Any, records: int) -> int:
    """Return the number of ranks of a `DistributedSampler`; refuse one for other ranks or records."""
    if sampler.num_replicas != world_size():
        raise InvalidOptionError(
            f"sampler DistributedSampler with num_replicas={sampler.num_replicas}: {world_size()} rank(s) train here. "
            "Call torch.distributed.init_process_group first and leave num_replicas out, or leave the sampler out: the "
            "ranks share each batch of the loader, whose batch_size is then that of all ranks together."
        )
    if len(sampler.dataset) != records:
        raise InvalidOptionError(
            f"sampler DistributedSampler over {len(sampler.dataset)} records: the loader's data set has {records}. "
            "Make both from one data set, a torch.utils.data.Subset for a part of it."
        )
    return int(sampler.num_replicas)


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's options for `DataLoader` on how records are fetched."""
    own = getattr(loader, "_dataloader", loader)  # of what Fabric puts around a loader, which lacks its properties
    return {name: getattr(own, name) for name in FETCHING}


def started(start: Callable[[], Iterator[Any]], *, resuming: bool) -> Iterator[Any]:
    """Start a pass over a loader; one that resumes an epoch leaves torch's global generator as it is."""
    # torch draws a seed for workers from that generator whenever a pass starts. The interrupted run drew it before it
    # was saved, so that drawing it again would change every dropout mask that follows.
    if not resuming:
        return start()
    state = torch.get_rng_state()
    try:
        return start()
    finally:
        torch.set_rng_state(state)


class TakenAsItIs(DataLoader[Any]):
    """A loader that frameworks take as it is.

    Attributes:
        device: Where batches are moved; None leaves them where they are.
        stop_when: Asked before each batch is handed out; True ends the pass (a privacy budget is spent).
    """

    device: torch.device | None = None
    stop_when: Callable[[], bool] | None = None
    _as_it_is = False

    def take_as_it_is(self, *, rank: int, replicas: int) -> None:
        """Let frameworks know, from now on, that nothing is left to do.

        Args:
            rank: This rank's number.
            replicas: Ranks that share each batch.
        """
        self._as_it_is = True
        if replicas > 1:
            # Past torch's refusal to exchange a sampler: nothing is drawn from it, it marks that records are dealt out.
            vars(self)["sampler"] = DistributedSampler(self.dataset, num_replicas=replicas, rank=rank, shuffle=False)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate leaves the loader alone; read when it prepares, which sets the device."""
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        if self._as_it_is and state is not None:
            self.device = state().device
        return self._as_it_is

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Take accelerate's own mark; a loader that it has made anew is another object."""
        self._as_it_is = self._as_it_is or value

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of a pass, or the rest of one, where they belong, each counted as received."""
        sampler: Any = self.batch_sampler
        with sampler.tracking():
            batches = started(super().__iter__, resuming=getattr(sampler, "resuming", False))
            if getattr(self, "persistent_workers", False) and not hasattr(self, "_keeps"):
                # Where the garbage collector takes both at once, the queues go before workers are told by them to end.
                self._keeps = weakref.finalize(self, id, batches)
            try:
                for batch in noting_each(batches):
                    if self.stop_when is not None and self.stop_when():
                        return
                    sampler.mark_delivered()
                    yield self.on_device(batch, sampler.draws)
            finally:
                sampler.draws.stop()

    def on_device(self, batch: Any, draws: DrawLog | None) -> Any:
        """Put a batch on the loader's device, and record it in a draw log.

        Args:
            batch: Tensors in nested tuples, lists, mappings.
            draws: The log that knows the batch's tensors from here on; None tells nobody.

        Returns:
            The batch, as it is where the loader has no device.
        """
        batch = batch if self.device is None else moved(batch, self.device)
        if draws is not None:
            draws.show(batch)
        return batch


def moved(batch: Any, device: torch.device) -> Any:
    """Return a nested batch moved to a device."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return with_entries(batch, lambda entry: moved(entry, device))


def with_entries(item: Any, call: Callable[[Any], Any]) -> Any:
    """Return a mapping, list or tuple of the same kind with every entry replaced; any other value as it is."""
    if isinstance(item, Mapping):
        made = {key: call(value) for key, value in item.items()}
        return made if type(item) is dict else type(item)(made)  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        entries = [call(entry) for entry in item]
        return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)
    return item


logger = logging.getLogger(__name__)


class DPDataLoader(TakenAsItIs):
    """Loader in which every record joins every batch independently with probability `sample_rate`, or as a scheme says.

    Everything else (workers, pinned memory, collate function) is torch's. A batch without records is delivered too,
    with the structure of the others and zero rows: a step on it releases noise alone.

    Privacy:
        Draws the batches that its accounting `event` states (see `PrivateSampler`). The number of records, the
        structure of a batch and `expected_batch_size` count as public; the size and the content of a batch do not, and
        a loop must not treat an empty batch differently from the outside.

    Attributes:
        sample_rate: q, the probability with which a record joins a batch.
        stop_when: Asked before each batch is handed out; True ends the pass (a privacy budget is spent).
        batch_sampler: The `PrivateSampler`.
        device: Where batches are moved; None leaves them where they are.

    Args:
        dataset: Map-style data set with a length.
        batch_size: Expected number of records in a Poisson batch, at most the length.
        sample_rate: q of Poisson batches, in place of `batch_size`.
        scheme: Another way to sample, in place of both.
        steps: Batches per epoch; round(length / batch_size) by default.
        max_batch_size: Largest batch: of a larger sample a random subset is kept, which its event accounts for.
        distributed: All ranks draw one batch and share its records; as for `from_data_loader`.
        drop_last: Of no effect: every batch is a Poisson sample.
        batch_first: Of no effect: the batch axis of an empty batch is found by evidence.
        rand_on_empty: Refused, as in `from_data_loader`.
        collate_fn: As torch's, never called with an empty list.
        generator: Fixes the sampling and the workers' seeds; warns.
        fetching: torch's `num_workers`, `pin_memory`, `timeout`, `worker_init_fn`, `multiprocessing_context`,
            `prefetch_factor`, `persistent_workers`, `pin_memory_device`.

    Raises:
        DataError: If the data set is empty, has no length, or is smaller than a batch.
        InvalidOptionError: If an option is out of range.

    Example:
        >>> private = ghostclip.DPDataLoader.from_data_loader(loader)
        >>> len(private), private.sample_rate
        (8, 0.125)
    """

    @takes(*options_of(DataLoader, *FETCHING, "pin_memory_device"))
    def __init__(  # noqa: PLR0913 - torch's own options, named instead of swallowed
        self,
        dataset: Dataset,
        *,
        batch_size: int | None = None,
        sample_rate: float | None = None,
        scheme: SamplingScheme | None = None,
        steps: int | None = None,
        max_batch_size: int | None = None,
        distributed: bool | None = None,
        drop_last: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        generator: torch.Generator | None = None,
        fetching: dict[str, Any],
    ) -> None:
        del drop_last, batch_first
        refuse_invented_records(rand_on_empty=rand_on_empty)
        if scheme is None:
            rate = _rate(dataset, batch_size, sample_rate)
            length = dataset_length(dataset)
            scheme = Poisson(num_samples=length, sample_rate=rate, epoch_steps=steps, truncation=max_batch_size)
        elif (batch_size, sample_rate, steps, max_batch_size) != (None, None, None, None):
            raise InvalidOptionError(
                "batch_size, sample_rate, steps and max_batch_size belong to the scheme; give them to it only."
            )
        if scheme.num_samples != dataset_length(dataset):
            raise DataError(f"scheme over {scheme.num_samples} records: the data set has {dataset_length(dataset)}.")
        self.sample_rate = scheme.event.sample_rate
        sampler = PrivateSampler(scheme, generator=generator)
        if _is_shared(distributed):
            share_sampler(sampler)
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=EmptyBatchCollate(dataset, collate_fn or torch.utils.data.default_collate),
            generator=generator,
            **{**fetching, "pin_memory": fetching["pin_memory"] and _pins()},
        )
        # A loader made anew around the sampler would not tell which draws it hands out.
        self.take_as_it_is(rank=sampler.rank, replicas=sampler.num_replicas)

    @property
    def expected_batch_size(self) -> float:
        """Average number of records in a batch over all replicas, the public divisor of a mean gradient."""
        return self.private_sampler.expected_batch_size

    @property
    def private_sampler(self) -> PrivateSampler:
        """The sampler, under its own type."""
        assert isinstance(self.batch_sampler, PrivateSampler)
        return self.batch_sampler

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of a step."""
        return self.private_sampler.event

    @classmethod
    def from_data_loader(  # noqa: PLR0913 - Opacus's options and ours
        cls,
        data_loader: DataLoader,
        *,
        generator: torch.Generator | None = None,
        scheme: SamplingScheme | None = None,
        max_batch_size: int | None = None,
        distributed: bool | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DPDataLoader:
        """Return a loader over the same data with the same options, but with Poisson batches.

        Random and sequential samplers are replaced, which is logged. `drop_last` has no effect, and a warning in the
        log says so: an epoch has round(records / batch_size) batches of any size. A `DistributedSampler` is replaced
        too: as its loader has the batch size of one rank, the batch that the ranks share has that times their number,
        on average, and no record twice.

        Args:
            data_loader: Any loader whose sampling a Poisson sampler can stand for; a `DPDataLoader` is returned as is.
            generator: Fixes the sampling, and warns; the loader's own generator by default, if it has one.
            scheme: How to sample, instead of Poisson sampling with the loader's batch size.
            max_batch_size: Largest Poisson batch.
            distributed: All ranks draw one batch and share its records. By default so where torch.distributed runs
                with several of them; False is for ranks that train apart from each other.
            batch_first: Of no effect: the batch axis of an empty batch is found by evidence.
            rand_on_empty: Refused: an invented record in place of an empty batch doubles the sensitivity.

        Returns:
            The private loader.

        Raises:
            InvalidOptionError: If the sampling or an option breaks the privacy analysis.
            DataError: If the data set cannot be sampled from.

        Cost:
            Ranks that share batches exchange a key once.
        """
        del batch_first
        refuse_invented_records(rand_on_empty=rand_on_empty)
        if isinstance(data_loader, DPDataLoader):
            return data_loader
        with refusals_shared("loader") if _is_shared(distributed) else nullcontext():
            batch_size = checked_batch_size(data_loader)
            _log_replacement(data_loader, batch_size, shared=_is_shared(distributed))
            return cls(
                data_loader.dataset,
                batch_size=batch_size if scheme is None else None,
                scheme=scheme,
                max_batch_size=max_batch_size,
                distributed=distributed,
                collate_fn=data_loader.collate_fn,
                generator=data_loader.generator if generator is None else generator,
                **worker_options(data_loader),
                pin_memory_device=data_loader.pin_memory_device,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's key and how many batches were delivered (not: prefetched).

        Privacy:
            Contains the sampling key; see `PrivateSampler.state_dict`.

        Returns:
            Plain Python values.
        """
        return self.private_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after the last one delivered.

        Args:
            state: What `state_dict` returned.
        """
        self.private_sampler.load_state_dict(state)


@cache
def _pins() -> bool:
    """Return whether memory can be pinned, and say once in a process that it cannot: torch says so at every pass."""
    pins = torch.accelerator.is_available()
    if not pins:
        logger.warning("pin_memory=True: no effect, as there is no accelerator.")
    return pins


def _rate(dataset: Dataset, batch_size: int | None, sample_rate: float | None) -> float:
    """Return the sampling rate, from the rate or the expected size of a batch."""
    length = dataset_length(dataset)
    if sample_rate is not None and batch_size is None:
        return fraction(sample_rate, "sample_rate")
    if sample_rate is not None:
        raise InvalidOptionError(f"batch_size={batch_size}, sample_rate={sample_rate}: give one of the two.")
    if positive_int(batch_size, "batch_size") > length:
        raise DataError(f"batch_size={batch_size}: the data set has only {length} records; use a smaller batch.")
    assert batch_size is not None, "refused above"
    return batch_size / length


def _is_shared(distributed: bool | None) -> bool:  # noqa: FBT001 - the user's option
    """Return whether ranks share batches: by default if there are several."""
    return world_size() > 1 if distributed is None else distributed


def _log_replacement(data_loader: DataLoader, batch_size: int, *, shared: bool) -> None:
    """Log, or refuse, what replacing a loader's own sampling changes."""
    sampler = record_sampler(data_loader)
    if not shared and getattr(sampler, "num_replicas", 1) > 1:
        raise InvalidOptionError(
            f"sampler {type(sampler).__name__} with distributed=False: it deals records out to ranks that train "
            "together. Leave the sampler or distributed=False out."
        )
    logger.info(
        "%s and drop_last are replaced by private sampling of %s records a batch%s.",
        type(sampler).__name__,
        batch_size,
        f", shared by {world_size()} ranks" if shared else "",
    )
    own = type(data_loader).__iter__
    if not own.__module__.startswith("torch"):
        logger.warning("%s is not used: change batches in the collate_fn, or in the loop.", own.__qualname__)
    if getattr(data_loader.batch_sampler, "drop_last", False):
        logger.warning(
            "drop_last=True: no effect. Private batches are random samples, whose sizes vary, and the guarantee counts "
            "small and empty ones too; a step on any of them is right as it is."
        )


def refuse_invented_records(*, rand_on_empty: bool) -> None:
    """Refuse Opacus's ``rand_on_empty``, which trains on made-up records."""
    if rand_on_empty:
        raise InvalidOptionError(
            "rand_on_empty=True: an invented record that appears only when nobody was drawn makes one person's "
            "influence twice the clipping bound; leave it out, empty batches are supported."
        )
