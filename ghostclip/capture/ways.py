"""Which of several ways a call site is consumed in, and what the evidence has shown about that.

An operation may be read in more than one way: a product with a stack of parameters has rows of samples on another axis,
or one matrix for each sample. Sizes suggest a way, and with another batch size they may suggest another. What was
confirmed once therefore holds for good, and what was refuted is not tried again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ghostclip.capture.inputs import in_backward
from ghostclip.capture.usage import Record, Site

OWN_ROWS: Final = "own rows"
RULE: Final = "rule"
RULE_ON_COPIES: Final = "rule on copies"
SPREAD: Final = "spread"
SPREAD_ROUTED: Final = "spread over selected rows"
GENERAL: Final = "general"
# Where these were refuted another one may serve: copies of a parameter need not be one a sample.
_REFUTABLE: Final = (OWN_ROWS, RULE_ON_COPIES, SPREAD, SPREAD_ROUTED)
# Whether rows were selected may change from batch to batch.
_ALIKE: Final = {SPREAD: SPREAD_ROUTED, SPREAD_ROUTED: SPREAD}


@dataclass(eq=False)
class Ways:
    """What a session remembers of the ways of its call sites.

    Attributes:
        settled: The way that evidence confirmed, by call site.
        refuted: The ways that it refuted.
        taken: The latest call site with the way that is being taken there.
    """

    settled: dict[Any, str] = field(default_factory=dict)
    refuted: set[tuple[Any, str]] = field(default_factory=set)
    taken: tuple[Any, str] = (None, "")

    def arrive(self, key: Any, record: Record) -> None:
        """Come to a call site.

        Args:
            key: Its parameters and operation.
            record: The forward, which counts its calls.
        """
        # What checkpointing runs again must run as it did, and its calls come in another order.
        if not in_backward():
            record.visits["way", key] += 1
        self.taken = (key, 1 if in_backward() else record.visits["way", key]), ""

    def take(self, way: str, record: Record) -> bool:
        """Take a way at the latest call site unless the evidence speaks against it.

        Args:
            way: The way.
            record: The forward; one sample alone can be read in every way.

        Returns:
            Whether it is taken.
        """
        place = self.taken[0]
        before = record.ways.get(place, way) if in_backward() else way
        other = self.settled.get(place, before) not in (way, _ALIKE.get(way))
        if record.batch_size > 1 and (other or (place, way) in self.refuted):
            return False
        self.taken = place, way
        record.ways[place] = way
        return True

    def settle(self, record: Record) -> None:
        """Keep the ways of a forward that the evidence confirmed.

        Args:
            record: The forward.
        """
        for place, way in record.ways.items():
            self.settled.setdefault(place, way)

    def refute(self, sites: Iterable[Site]) -> bool:
        """Give up the ways of call sites that the evidence contradicts.

        Args:
            sites: The call sites.

        Returns:
            Whether another way is left to try.
        """
        found = {site.way for site in sites if site.way[1] in _REFUTABLE}
        found -= self.refuted | set(self.settled.items())
        self.refuted |= found
        return bool(found)
