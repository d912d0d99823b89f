"""The checks that are made of a model's forwards, and why some of them could not run.

A check that was switched off, or asked for in vain, proves nothing: whoever relies on it must be told.
"""

import logging
import random
import secrets
from typing import Final

_log = logging.getLogger(__name__)

ROWS: Final = "which rows belong to which sample"
ORDER: Final = "which rows belong to which sample (samples in reverse)"
REPLACED: Final = "batch independence (samples replaced)"
FEWER: Final = "batch independence (samples left out)"
BEHIND: Final = "batch independence (behind closed gates)"
REMEMBERED: Final = "batch independence (of the batch before)"
BACKWARDS: Final = "batch independence (of gradients)"
BESIDE: Final = "batch independence (of values that the model does not return)"
PADDING: Final = "batch independence (padding cut off)"
LOSSES: Final = "losses of one sample each"
SCALARS: Final = "scalars that the model computes (half of the samples)"
CRITERION: Final = "losses of a known criterion (samples replaced)"
LOOP: Final = "what a loop computes (samples replaced)"
# Steps in a row that are looked at while all samples are alike in something, as in a rare class's absence.
MOST_ALIKE: Final = 32
_ALL: Final = (ROWS, REPLACED, FEWER, BEHIND, LOSSES)
_LONE: Final = "every batch so far had fewer than two samples"
# After so many batches of one sample it is said that they prove nothing.
_ALONE: Final = 4


_SEED_BITS: Final = 64
# After so many forwards, one in some hundreds is asked about.
_SETTLED: Final = 100
_RARELY: Final = 600


def forwards_between(number: int, numbers: random.Random) -> int:
    """Return after how many forwards, by chance, the next one is proved again."""
    # Up to five times as many as there were at first (`number` counts from 1); from the hundredth forward on 100 to
    # 700. `numbers` say what nobody can predict.
    return numbers.randint(number, 5 * number) if number < _SETTLED else _SETTLED + numbers.randint(0, _RARELY)


class CheckSchedule:
    """Which forwards are proved again after the first: at random, so that no model can adapt to it."""

    # A model that remembers a batch, takes another branch in every fifth forward, or orders its rows by what is in them
    # may look right in one forward and not in another. Its numbers are drawn from the system, or from a seed that ranks
    # have in common; no generator of the program is touched.
    def __init__(self, numbers: random.Random | None = None, *, asked: int = 0) -> None:
        """Schedule the first forward, or the one after number `asked`."""
        # `numbers`: None for the system's. `asked`: the number of the forward that was asked about last, from 1; 0 for
        # none.
        self._numbers = numbers or random.Random(secrets.randbits(_SEED_BITS))
        self._next = asked + (forwards_between(asked, self._numbers) if asked else 1)

    def is_due(self, number: int) -> bool:
        """Return whether the forward of this number is to be proved."""
        return number >= self._next

    def advance(self, number: int) -> bool:
        """Return whether the forward of this number is to be proved, and if so draw the next number."""
        due = self.is_due(number)
        if due:
            self._next = number + forwards_between(number, self._numbers)
        return due

    def repeat_after(self, number: int) -> None:
        """Let the forward after the one of this number be proved as well."""
        self._next = number + 1


class Unchecked:
    """Which checks of a model have not run, why, and when forwards are proved again."""

    def __init__(self, numbers: random.Random | None = None) -> None:
        # `numbers` say when to ask again: of ranks that exchange something in a forward, in common. None for the
        # system's.
        self._numbers = numbers
        self._why: dict[str, str] = {}  # by check, why it could not run
        self._done: set[str] = set()  # checks that ran
        self._warned: set[str] = set()  # checks that a warning has named
        self.forwards = 0  # number of the latest forward of several samples, since evidence was asked for anew
        # whether it is one that the schedule asks about after the first: its kind was asked about before
        self.is_scheduled_again = False
        self._alone, self._schedule = 0, CheckSchedule(numbers)  # `_alone`: batches of one sample so far
        self.as_long = set[int]()  # sizes of batches as long as an argument of a criterion that may be none of theirs
        self._repeats = 0  # forwards in which samples were alike in something

    def begin(self, batch_size: int, *, probes: bool, records: int | None = None) -> bool:
        """Count a forward, and return whether it is to be proved."""
        # One sample alone can prove nothing. `records`: how many of the samples are no copies of others; fewer than two
        # prove nothing, and are not counted. None for all. Of forwards of copies, those before one that is due are
        # asked about.
        if not probes:
            self.missed("probe=False", *_ALL)
            self.warn()
            return False
        if min(batch_size, batch_size if records is None else records) < 2:
            self._alone += 1
            if not self.forwards:
                self.missed(_LONE, *_ALL)
            if self._alone == _ALONE:
                self.warn()
            return batch_size > 1 and self._schedule.is_due(self.forwards + 1)
        # Whoever asks for the others says what became of it; the losses may be asked for by nobody.
        if self._why.get(LOSSES) == _LONE:
            del self._why[LOSSES]
        self.forwards += 1
        due = self._schedule.advance(self.forwards)
        self.is_scheduled_again = due and self.forwards > 1
        return due

    @property
    def is_due(self) -> bool:
        """Whether the next forward is one to ask about."""
        return self._schedule.is_due(self.forwards + 1)

    @staticmethod
    def asks_after(alike: int) -> bool:
        """Return whether to look again after so many looks in a row at samples that were alike in something."""
        return 0 < alike < MOST_ALIKE

    def ask_again(self) -> None:
        """Prove the next forward as well, half as often: in this one samples were alike in something."""
        self._repeats += 1
        if self.asks_after(2 * self._repeats):
            self._schedule.repeat_after(self.forwards)

    def renew(self) -> None:
        """Forget all proofs, so that the next forward is proved: the model was changed."""
        self.forwards, self._schedule = 0, CheckSchedule(self._numbers)

    def ran(self, *checks: str) -> None:
        """Record checks that ran and found nothing wrong."""
        self._done.update(checks)
        for check in checks:
            self._why.pop(check, None)

    def missed(self, why: str, *checks: str) -> None:
        """Record why checks could not run, unless they ran before."""
        # `why` is for a parenthesis.
        self._why.update((check, why) for check in checks if check not in self._done)

    def report(self, check: str, why: str) -> None:
        """Record that a check ran, or, where ``why`` is given, why it could not."""
        (self.missed(why, check) if why else self.ran(check))

    def reason(self, check: str) -> str:
        """Return why a check could not run; empty where it ran, or was not asked for."""
        return self._why.get(check, "")

    def warn(self) -> None:
        """Log a warning of the checks that could not run, once each."""
        if not self._warned.issuperset(self._why):
            self._warned.update(self._why)
            _log.warning("%s.", self)

    def __str__(self) -> str:
        """Return one clause, the checks by reason; empty if none is missing."""
        reasons = dict.fromkeys(self._why.values())
        parts = [f"{', '.join(c for c, w in self._why.items() if w == why)}: {why}" for why in reasons]
        return f"not checked: {'; '.join(parts)}" if parts else ""
