"""The schedule of checks, made predictable for tests: the 1st, 4th, 16th, 64th, ... forward is asked about."""

import random

from ghostclip.evidence import unchecked


def after_three_times(number: int, _: random.Random) -> int:
    """As many forwards later that the numbers are the powers of four."""
    return 3 * number


def predictable() -> None:
    """Make it so in this process, for good."""
    unchecked.forwards_between = after_three_times
