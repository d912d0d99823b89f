"""The batch sampler: which position a training is at, and which records of a draw are this rank's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Sampler

from ghostclip.accounting.history import SamplingEvent
from ghostclip.data.schemes import Poisson, SamplingScheme
from ghostclip.distributed.agreement import Group, gathered, require_equal, require_group
from ghostclip.errors import InvalidOptionError, ResumeError
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
        """Draw from a scheme with a fresh key, or one that follows a seed or generator."""
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

    @property
    def num_samples(self) -> int:
        """N, the number of records."""
        return self.scheme.num_samples

    @property
    def sample_rate(self) -> float:
        """Probability q of the accounting event."""
        return self.scheme.event.sample_rate

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.scheme.steps

    @property
    def expected_batch_size(self) -> float:
        """Records in a batch on average, over all replicas: the public constant that sums are divided by."""
        return self.scheme.expected_batch_size

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of a step (of shuffled batches: an epoch)."""
        return self.scheme.event

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
        self._key.load(state["key"])
        # Nothing is changed before here, and nothing fails from here on.
        self._drawn = self.delivered = position
        self._epoch_end = position + remaining
        self.resuming = remaining > 0
        self.draws.forget()


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
