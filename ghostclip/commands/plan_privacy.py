"""Compare ways to draw records and to add noise for a privacy budget, and recommend one.

examples:
  ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3
      how much noise each of them leaves in the parameters
  ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --momentum 0.9
      the same for an optimizer with momentum
  ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --schedule cosine
      the same for a learning rate that falls to 0
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

from ghostclip.commands.options import DELTA, FILE, Options, require_files, require_least, write_json
from ghostclip.errors import InvalidOptionError
from ghostclip.terminal import Working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ghostclip.mechanisms import CalibratedMechanism

_SCHEDULES: Final[dict[str, list[float] | None]] = {
    "constant": None, "linear": [1 - step / 1000 for step in range(1000)],
    "cosine": [math.cos(math.pi * step / 2000) ** 2 for step in range(1000)],
}  # fmt: skip
"""Learning rates over a training, which falls to 0 but for the first."""
OPTIONS: Final[Options] = {
    "--samples": {"type": int, "metavar": "N", "help": "samples in the data set"},
    "--batch-size": {"type": int, "metavar": "B", "help": "samples of a batch, on average"},
    "--epochs": {"type": int, "metavar": "E", "help": "passes over the data"},
    "--target-epsilon": {"type": float, "metavar": "E", "help": "epsilon not to be exceeded"},
    **DELTA,
    "--momentum": {"type": float, "metavar": "M", "default": 0.0, "help": "of the optimizer (default: %(default)s)"},
    "--schedule": {
        "choices": tuple(_SCHEDULES),
        "default": "constant",
        "help": "of the learning rate (default: %(default)s)",
    },
    "--json": {**FILE, "help": "write the result as JSON; - for standard output"},
}
_NEEDED: Final = ("samples", "batch_size", "epochs", "target_epsilon")
_LARGER: Final = (1, 4, 16)
_ADVICE: Final = """\
what to tune, and in which order:
  1. the batch size: the noise of a step over it, as above; take the largest that time allows
  2. the learning rate, at the clipping norm 1 (or clipping="automatic", which has none to tune)
  3. the clipping norm, if at all: half and twice of it, with the learning rate divided and multiplied by as much
  tune on public data of that kind, or on fewer samples at the same noise over the batch size; every run on the
  private samples costs what a training costs, unless only the best of a random number of them is looked at
"""


def run(given: dict[str, Any]) -> int:
    """Print what each mechanism leaves of noise, and what to take; return 0."""
    from ghostclip.accounting import delta_too_large
    from ghostclip.mechanisms import plan_privacy
    from ghostclip.mechanisms.plan import described, noise_to_batch, recommendation

    require_files(given)
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if given[name] is None]
    if missing:
        raise InvalidOptionError(f"{', '.join(missing)}: needed.")
    require_least(given, {"samples": 1, "batch_size": 1, "epochs": 1})
    samples, size = given["samples"], given["batch_size"]
    if size > samples:
        raise InvalidOptionError(f"--batch-size {size}: must be from 1 to --samples, {samples}.")
    if not 0 <= given["momentum"] < 1:
        raise InvalidOptionError(f"--momentum {given['momentum']:g}: must be at least 0 and below 1.")

    def plans_at(batch_size: int) -> list[CalibratedMechanism]:
        return plan_privacy(
            num_samples=samples, batch_size=batch_size, epochs=given["epochs"], target_epsilon=given["target_epsilon"],
            target_delta=given["delta"], momentum=given["momentum"], learning_rates=_SCHEDULES[given["schedule"]],
        )  # fmt: skip

    sizes = [size * times for times in _LARGER if size * times <= samples]
    with Working("comparing mechanisms"):
        by_size = {one: plans_at(one) for one in sizes}
    plans = by_size[size]
    too_large = delta_too_large(given["delta"], samples)
    if too_large:
        print(f"warning: {too_large}", file=sys.stderr)
    rows = [_row(plan) for plan in plans]
    batches = {
        one: {described(p.mechanism): noise_to_batch(p, num_samples=samples, batch_size=one) for p in found}
        for one, found in by_size.items()
    }
    if str(given["json"]) != "-":
        _show(plans, rows, batches, recommendation(plans))
    write_json(given["json"], {"mechanisms": rows, "noise_to_batch": batches, "recommendation": recommendation(plans)})
    return 0


def _row(plan: CalibratedMechanism) -> dict[str, Any]:
    from ghostclip.mechanisms.plan import described

    return {
        "mechanism": described(plan.mechanism), "noise_multiplier": plan.noise_multiplier, "epsilon": plan.epsilon,
        "noise_in_parameters": plan.noise, "draws": plan.draws, "buffers": plan.buffers,
        "theorem": plan.mechanism.theorem,
    }  # fmt: skip


def _show(
    plans: Sequence[CalibratedMechanism], rows: list[dict[str, Any]], batches: dict[int, dict[str, float]], take: str
) -> None:
    least = plans[0].noise
    print(f"take {take}", "", sep="\n")
    print(f"{'mechanism':34}{'sigma':>9}{'epsilon':>10}{'noise in parameters':>22}{'noise drawn':>13}{'buffers':>9}")
    for row in rows:
        noise = f"{row['noise_in_parameters']:.4g} ({row['noise_in_parameters'] / least:.2f} x)"
        cells = (
            f"{row['noise_multiplier']:>9.4g}{row['epsilon']:>10.4g}{noise:>22}{row['draws']:>11} x{row['buffers']:>9}"
        )
        print(f"{row['mechanism']:34}{cells}")
    print("  noise in parameters: root mean square over steps of SGD, learning rate 1 (at most), per clipping norm")
    print("", "noise of one step over the batch size", sep="\n")
    print(f"{'batch size':34}" + "".join(f"{size:>12}" for size in batches))
    sizes = list(batches.values())
    for name in sizes[0]:
        # Where an epoch has fewer batches than a mechanism has bands, there is no such mechanism.
        print(f"{name:34}" + "".join(f"{found[name]:>12.3g}" if name in found else f"{'-':>12}" for found in sizes))
    print("", "proved by", *(f"  {row['mechanism']}: {row['theorem']}" for row in rows), "", _ADVICE, sep="\n", end="")
