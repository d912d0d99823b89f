"""The table of loops, family by family, and whether the outcome of one is what it should be."""

from __future__ import annotations

import re
from importlib.util import find_spec

from tests.loops import hugging, lights, mixing, opacus_scripts, plain, several, trl_loops
from tests.loops.loop import Loop, Outcome
from tests.loops.oracle import measure
from tests.loops.ranks import see_on_ranks

FAMILIES: dict[str, list[Loop]] = {
    "Plain PyTorch": plain.LOOPS,
    "Models that look at the batch": mixing.LOOPS,
    "transformers' Trainer": hugging.LOOPS,
    "trl": trl_loops.LOOPS,
    "Lightning and Fabric": lights.LOOPS,
    "accelerate, and several processes": several.LOOPS,
    "Scripts written for Opacus": opacus_scripts.LOOPS,
}
LOOPS = [loop for loops in FAMILIES.values() for loop in loops]
# Each record that is left out on several ranks is a pair of processes, and with a host it is a trainer.
_LEFT_OUT_ON_RANKS, _LEFT_OUT_OF_HOSTS = 2, 2


def missing_hosts(loop: Loop) -> list[str]:
    """Libraries that a loop needs and that are not installed."""
    return [name for name in loop.hosts if find_spec(name) is None]


def outcome_of(loop: Loop) -> Outcome:
    """Measure a loop of the table."""
    if loop.ranks > 1:
        return measure(loop, see_on_ranks, left_out=_LEFT_OUT_ON_RANKS)
    return measure(loop, left_out=_LEFT_OUT_OF_HOSTS) if loop.hosts else measure(loop)


def shortfall(loop: Loop, outcome: Outcome) -> str:
    """Say what is not as it should be."""
    said = "; ".join(outcome.problems) or outcome.message
    allowed = ("exact", "refused") if loop.expect == "either" else (loop.expect,)
    if outcome.outcome not in allowed:
        return f"{outcome.outcome} where it has to be {' or '.join(allowed)}: {said}"
    if outcome.outcome == "refused" and not re.search(loop.match, outcome.message):
        return f"refused without a word of {loop.match!r}: {said}"
    return ""
