"""``ghostclip epsilon``: what a training with given noise, sampling and length costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ghostclip.commands.privacy_options import (
    Segment,
    Setting,
    add_common_arguments,
    check_files,
    read_schedule,
    read_setting,
    report,
    require_noise,
    write_files,
)
from ghostclip.errors import InvalidOptionError

EXAMPLES = """\
examples:
  ghostclip epsilon --noise-multiplier 1 --samples 60000 --batch-size 256 --epochs 10
      a training with Poisson sampling, and a check of delta against 1/60000
  ghostclip epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 1000 --delta 1e-6 --plot epsilon.png
      the same in rates and steps, with a picture
  ghostclip epsilon --segment 1.2 0.01 500 --segment 0.8 0.01 100
      noise that changes on the way: noise multiplier, sample rate and steps of each part
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Args:
        parser: The sub-command's parser.
    """
    add_common_arguments(parser)
    parser.add_argument(
        "--segment",
        nargs=3,
        type=float,
        action="append",
        metavar=("S", "Q", "T"),
        help="noise multiplier, sample rate and steps of one part of the training; may be given several times",
    )
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="segments from a file, one in each line, or JSON")


def run(given: dict[str, Any]) -> int:
    """Print ε with its assumptions.

    Args:
        given: The options that were given.

    Returns:
        0.

    Raises:
        InvalidOptionError: If an option is missing, out of range, or contradicts another.
    """
    check_files(given)
    setting = read_setting(given)
    segments = _segments(given, setting)
    result = report("", {}, segments, setting)
    write_files(given, result, segments, setting)
    return 0


def _segments(given: dict[str, Any], setting: Setting) -> list[Segment]:
    segments = read_schedule(given["schedule"]) if "schedule" in given else []
    for sigma, rate, steps in given.get("segment", ()):
        if not float(steps).is_integer():
            raise InvalidOptionError(f"--segment: {steps} steps; expected a whole number.")
        segments.append((sigma, rate, int(steps)))
    for number, (sigma, rate, _) in enumerate(segments, start=1):
        require_noise(f"segment {number}: noise multiplier", sigma)
        if not 0 < rate <= 1:
            raise InvalidOptionError(f"segment {number}: sample rate {rate:g}: must be greater than 0 and at most 1.")
    one = {"--noise-multiplier": setting.sigma, "--sample-rate": setting.rate, "--steps": setting.steps}
    if setting.sigma is not None or not segments:
        missing = [name for name, value in one.items() if value is None]
        if missing:
            instead = {
                "--steps": "--steps or --epochs",
                "--sample-rate": "--sample-rate, or --samples and --batch-size",
            }
            wanted = "; ".join(instead.get(name, name) for name in missing)
            raise InvalidOptionError(f"{wanted}: needed (or --segment, or --schedule).")
        segments.insert(0, (setting.sigma or 0.0, setting.rate or 0.0, setting.steps or 0))
    else:
        ignored = [name for name, value in one.items() if value is not None]
        if ignored:
            raise InvalidOptionError(f"{', '.join(ignored)} without --noise-multiplier: segments bring their own.")
    return segments
