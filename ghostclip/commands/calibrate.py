"""Find the noise, sample rate or number of steps that keeps a privacy budget.

examples:
  ghostclip calibrate --target-epsilon 3 --samples 60000 --batch-size 256 --epochs 10
      how much noise such a training needs
  ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --sample-rate 0.01
      how many steps may be taken
  ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --steps 1000
      how large the batches may be
"""

from __future__ import annotations

from typing import Any, Final

from ghostclip.commands import privacy
from ghostclip.commands.options import Options, require_files
from ghostclip.errors import InvalidOptionError
from ghostclip.terminal import Working

OPTIONS: Final[Options] = {
    **privacy.OPTIONS,
    "--target-epsilon": {"type": float, "metavar": "E", "help": "epsilon not to be exceeded; of noise multiplier, "
                         "sample rate and steps, give two and leave one out"},
}  # fmt: skip


def run(given: dict[str, Any]) -> int:
    """Solve for what was left out, print it with the ε that it reaches, and return 0."""
    from ghostclip import accounting

    require_files(given)
    values = dict(zip(("noise_multiplier", "sample_rate", "steps"), privacy.mechanism(given), strict=True))
    if given["target_epsilon"] is None:
        raise InvalidOptionError("--target-epsilon: needed (`ghostclip epsilon` tells what given values cost).")
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) != 2:
        raise InvalidOptionError(
            "of --noise-multiplier, --sample-rate (or --samples and --batch-size) and --steps (or --epochs), give two; "
            "the third is solved for."
        )
    (name,) = values.keys() - known
    with Working("searching", logger="ghostclip.accounting.calibration"):
        solved = getattr(accounting, f"get_{name}")(
            target_epsilon=given["target_epsilon"], target_delta=given["delta"], accountant=given["accountant"],
            relation=given["neighbours"], **known,
        )  # fmt: skip
    sigma, rate, steps = {**values, name: solved}.values()
    return privacy.release(given, [(sigma, rate, steps)], {name: solved})
