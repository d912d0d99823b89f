"""``ghostclip calibrate``: the noise, sampling rate or length of training that keeps a privacy budget."""

from __future__ import annotations

import argparse
from typing import Any

from ghostclip.commands.privacy_options import (
    Setting,
    add_common_arguments,
    check_files,
    read_setting,
    report,
    write_files,
)
from ghostclip.errors import InvalidOptionError
from ghostclip.terminal import Working

EXAMPLES = """\
examples:
  ghostclip calibrate --target-epsilon 3 --samples 60000 --batch-size 256 --epochs 10
      how much noise such a training needs
  ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --sample-rate 0.01
      how many steps may be taken
  ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --steps 1000
      how large the batches may be
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Args:
        parser: The sub-command's parser.
    """
    add_common_arguments(parser)
    parser.add_argument(
        "--target-epsilon",
        type=float,
        metavar="E",
        help="epsilon not to be exceeded; of noise multiplier, sample rate and steps, give two and leave one out",
    )


def run(given: dict[str, Any]) -> int:
    """Solve for what was left out and print it with the ε that it reaches.

    Args:
        given: The options that were given.

    Returns:
        0.

    Raises:
        InvalidOptionError: If not exactly one value was left out.
    """
    check_files(given)
    setting = read_setting(given)
    if "target_epsilon" not in given:
        raise InvalidOptionError("--target-epsilon: needed (`ghostclip epsilon` tells what given values cost).")
    with Working("searching", logger="ghostclip.accounting.calibration"):
        name, value = _solved(setting, given["target_epsilon"])
    sigma = value if name == "noise_multiplier" else setting.sigma
    rate = value if name == "sample_rate" else setting.rate
    steps = value if name == "steps" else setting.steps
    segments = [(float(sigma or 0), float(rate or 0), int(steps or 0))]
    shown = report("reached: ", {name: value}, segments, setting)
    write_files(given, {**shown, "target_epsilon": given["target_epsilon"]}, segments, setting)
    return 0


def _solved(setting: Setting, target: float) -> tuple[str, float]:
    from ghostclip import accounting

    sigma, rate, steps = setting.sigma, setting.rate, setting.steps
    budget: dict[str, Any] = {
        "target_epsilon": target,
        "target_delta": setting.delta,
        "accountant": setting.accountant,
        "relation": setting.relation,
    }
    if sigma is None and rate is not None and steps is not None:
        found = accounting.get_noise_multiplier(**budget, sample_rate=rate, steps=steps)
        return "noise_multiplier", found
    if rate is None and sigma is not None and steps is not None:
        return "sample_rate", accounting.get_sample_rate(**budget, noise_multiplier=sigma, steps=steps)
    if steps is None and sigma is not None and rate is not None:
        return "steps", accounting.get_steps(**budget, noise_multiplier=sigma, sample_rate=rate)
    raise InvalidOptionError(
        "of --noise-multiplier, --sample-rate (or --samples and --batch-size) and --steps (or --epochs), give two; "
        "the third is solved for."
    )
