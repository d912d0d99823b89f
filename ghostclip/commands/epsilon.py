"""Bound epsilon of a private training.

examples:
  ghostclip epsilon --noise-multiplier 1 --samples 60000 --batch-size 256 --epochs 10
      a training with Poisson sampling, and a check of delta against 1/60000
  ghostclip epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 1000 --delta 1e-6 --plot epsilon.png
      the same in rates and steps, with a picture
  ghostclip epsilon --segment 1.2 0.01 500 --segment 0.8 0.01 100
      noise that changes on the way: noise multiplier, sample rate and steps of each part
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ghostclip._files import reason_of
from ghostclip.commands import privacy
from ghostclip.commands.options import FILE, Options, require_files
from ghostclip.commands.privacy import Segment
from ghostclip.errors import DataError, InvalidOptionError

OPTIONS: Final[Options] = {
    **privacy.OPTIONS,
    "--segment": {"nargs": 3, "type": float, "action": "append", "metavar": ("S", "Q", "T"), "default": [], "help":
                  "noise multiplier, sample rate and steps of one part of the training; may be given several times"},
    "--schedule": {**FILE, "help": "segments from a file, one in each line, or JSON"},
}  # fmt: skip


def run(given: dict[str, Any]) -> int:
    """Print ε with its assumptions, and return 0."""
    require_files(given)
    sigma, rate, steps = privacy.mechanism(given)
    segments = [*([] if given["schedule"] is None else _read(given["schedule"])), *map(_segment, given["segment"])]
    for number, (noise, share, _) in enumerate(segments, start=1):
        privacy.require_noise(f"segment {number}: noise multiplier", noise)
        privacy.require_rate(f"segment {number}: sample rate {share:g}", share)
    if sigma is None and segments:
        ignored = [name for name, value in (("--sample-rate", rate), ("--steps", steps)) if value is not None]
        if ignored:
            raise InvalidOptionError(f"{', '.join(ignored)} without --noise-multiplier: segments bring their own.")
    elif sigma is None or rate is None or steps is None:
        wanted = {
            "--noise-multiplier": sigma, "--sample-rate, or --samples and --batch-size": rate,
            "--steps or --epochs": steps,
        }  # fmt: skip
        missing = "; ".join(name for name, value in wanted.items() if value is None)
        raise InvalidOptionError(f"{missing}: needed (or --segment, or --schedule).")
    else:
        segments.insert(0, (sigma, rate, steps))
    return privacy.release(given, segments)


def _segment(values: list[float]) -> Segment:
    sigma, rate, steps = values
    if not steps.is_integer():
        raise InvalidOptionError(f"--segment: {steps} steps; expected a whole number.")
    return sigma, rate, int(steps)


def _whole(steps: str | float) -> int:
    """Return a number of steps; a part of one is no number of steps, and cutting it off would count too few."""
    whole = int(steps)
    if not isinstance(steps, str) and whole != steps:
        raise ValueError(f"{steps} steps")
    return whole


def _read(path: Path) -> list[Segment]:
    """Return segments of a file: JSON [[sigma, q, steps], ...], or lines "sigma q steps", commas and # comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--schedule {path}: cannot be read ({reason_of(error)}).") from error
    except UnicodeDecodeError:
        raise DataError(f"--schedule {path}: is no text in UTF-8.") from None
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [line.split("#")[0].replace(",", " ").split() for line in text.splitlines()]
        segments = [(float(sigma), float(rate), _whole(steps)) for sigma, rate, steps in filter(None, rows)]
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{path}: expected noise multiplier, sample rate and steps in each line ({error}).") from error
    if not segments:
        raise DataError(f"{path}: holds no segment.")
    return segments
