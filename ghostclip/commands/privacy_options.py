"""Options that `ghostclip epsilon` and `ghostclip calibrate` have in common, and the assumptions they state."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostclip._files import reason_of, require_picture, require_writable, write_text
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.terminal import Working

if TYPE_CHECKING:
    from ghostclip.accounting import Accountant, Bounds

_RELATIONS = {
    "zero_out": "one sample replaced by one without contribution (the number of samples is public)",
    "add_remove": "one sample added or removed",
    "replace_one": "one sample replaced by any other",
}

# Its square is computed with; more noise than this has no epsilon to speak of.
_MOST_NOISE = 1e100

Segment = tuple[float, float, int]
"""(σ, q, steps)."""


@dataclass(frozen=True)
class Setting:
    """Values of the options, None where they were left out.

    Attributes:
        sigma: σ.
        rate: q.
        steps: T.
        samples: N.
        delta: δ.
        accountant: Name.
        relation: What neighbouring data sets are.
    """

    sigma: float | None
    rate: float | None
    steps: int | None
    samples: int | None
    delta: float
    accountant: str
    relation: str


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that both commands have.

    Args:
        parser: The sub-command's parser.
    """
    parser.add_argument("--noise-multiplier", type=float, metavar="S", help="noise over sensitivity (sigma)")
    parser.add_argument("--sample-rate", type=float, metavar="Q", help="probability of each sample to be in a batch")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples in the data set, for the rate and a check of delta"
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="expected batch size: the rate is B / N")
    parser.add_argument("--steps", type=int, metavar="T", help="optimizer steps")
    parser.add_argument("--epochs", type=float, metavar="E", help="passes over the data instead: E / Q steps")
    parser.add_argument("--delta", type=float, metavar="D", help="delta of the guarantee (default: 1e-05)")
    parser.add_argument("--accountant", metavar="NAME", help="best, pld, prv, rdp or dp_accounting (default: best)")
    parser.add_argument(
        "--neighbours", choices=tuple(_RELATIONS), help="what two neighbouring data sets are (default: zero_out)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="picture of epsilon over steps and noise (.png, .pdf)"
    )


def check_files(given: dict[str, Any]) -> None:
    """Refuse files that could not be written, before anything is computed for them.

    Args:
        given: The options that were given.
    """
    if "plot" in given:
        require_picture(given["plot"], "--plot")
    if "json" in given and str(given["json"]) != "-":
        require_writable(given["json"], "--json")


def read_setting(given: dict[str, Any]) -> Setting:
    """Return what the options say.

    Args:
        given: The options that were given.

    Returns:
        The setting.

    Raises:
        InvalidOptionError: If options contradict each other.
    """
    samples, batch, rate = given.get("samples"), given.get("batch_size"), given.get("sample_rate")
    if rate is not None and batch is not None:
        raise InvalidOptionError("--sample-rate and --batch-size: give one of the two.")
    if batch is not None:
        if samples is None:
            raise InvalidOptionError(f"--batch-size {batch}: needs --samples, how many there are in the data set.")
        if not 0 < batch <= samples:
            raise InvalidOptionError(f"--batch-size {batch}: must be from 1 to --samples, {samples}.")
        rate = batch / samples
    if rate is not None and not 0 < rate <= 1:
        raise InvalidOptionError(f"--sample-rate {rate}: must be greater than 0 and at most 1.")
    sigma = given.get("noise_multiplier")
    if sigma is not None:
        require_noise("--noise-multiplier", sigma)
    return Setting(
        sigma=sigma,
        rate=rate,
        steps=_steps(given, rate),
        samples=samples,
        delta=given.get("delta", 1e-5),
        accountant=given.get("accountant", "best"),
        relation=given.get("neighbours", "zero_out"),
    )


def _steps(given: dict[str, Any], rate: float | None) -> int | None:
    steps, epochs = given.get("steps"), given.get("epochs")
    if steps is not None and epochs is not None:
        raise InvalidOptionError("--steps and --epochs: give one of the two.")
    if epochs is None:
        if steps is not None and steps < 1:
            raise InvalidOptionError(f"--steps {steps}: must be at least 1.")
        return steps
    if rate is None:
        raise InvalidOptionError("--epochs needs --sample-rate, or --samples and --batch-size.")
    if not 0 < epochs < math.inf:
        raise InvalidOptionError(f"--epochs {epochs}: must be greater than 0.")
    return max(1, math.ceil(epochs / rate - 1e-9))


def require_noise(place: str, sigma: float) -> None:
    """Refuse noise that no accountant can compute with.

    Args:
        place: The option, or the part of it, for the message.
        sigma: The noise multiplier.

    Raises:
        InvalidOptionError: It is negative, not a number, or too large for floating-point numbers.
    """
    if not 0 <= sigma <= _MOST_NOISE:
        raise InvalidOptionError(f"{place} {sigma:g}: must be from 0 to {_MOST_NOISE:g}.")


def accountant_of(segments: list[Segment], setting: Setting) -> Accountant:
    """Return an accountant that has recorded some steps.

    Args:
        segments: (σ, q, steps) one after another.
        setting: Names the accountant and the relation.

    Returns:
        The accountant.
    """
    from ghostclip.accounting import bounding_accountant

    accountant = bounding_accountant(setting.accountant, relation=setting.relation)
    accountant.load_state_dict({"mechanism": accountant.mechanism(), "relation": setting.relation, "history": segments})
    return accountant


def report(title: str, found: dict[str, Any], segments: list[Segment], setting: Setting) -> dict[str, Any]:
    """Print a result with everything that it assumes, and return it.

    Args:
        title: First words of the line with ε.
        found: What was solved for, by name.
        segments: (σ, q, steps) one after another.
        setting: The options.

    Returns:
        Plain values.
    """
    from ghostclip.accounting import delta_too_large

    with Working("bounding epsilon"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bounds: Bounds = accountant_of(segments, setting).epsilon_bounds(setting.delta)
    lines = [f"{name} = {value:.6g}" for name, value in found.items()]
    lines += [f"{title}epsilon <= {_upwards(bounds.upper)} at delta = {setting.delta:g}"]
    lines += [f"no accountant can go below epsilon = {_downwards(bounds.lower)}"]
    lines += [f"steps: {sum(steps for _, _, steps in segments)}; " + _describe(segments)]
    full = all(rate == 1 for _, rate, _ in segments)
    sampling = "every sample in every batch" if full else "Poisson: each sample joins each batch independently"
    lines += [f"sampling: {sampling} (shuffled batches: one step of rate 1 per epoch)"]
    lines += [f"neighbours: {setting.relation}: {_RELATIONS[setting.relation]}"]
    lines += ["a sample: what is clipped as one, once in the data set"]
    lines += [f"accountant: {setting.accountant}"]
    print("\n".join(lines))
    too_large = delta_too_large(setting.delta, setting.samples)
    if too_large:
        print(f"warning: {too_large}", file=sys.stderr)
    return {
        **found,
        "epsilon": _plain(bounds.upper),
        "epsilon_lower_bound": _plain(bounds.lower),
        "delta": setting.delta,
        "segments": [list(segment) for segment in segments],
        "sampling": "full" if full else "poisson",
        "neighbours": setting.relation,
        "accountant": setting.accountant,
        "warnings": [too_large] if too_large else [],
    }


def _upwards(value: float) -> str:
    """Return a number with five digits, never below it."""
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.5g}"


def _downwards(value: float) -> str:
    """Return a number with five digits, never above it."""
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return f"{math.floor(value / unit * (1 + 1e-12)) * unit:.5g}"


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _describe(segments: list[Segment]) -> str:
    shown = [f"noise multiplier {sigma:g}, sample rate {rate:g}, {steps} steps" for sigma, rate, steps in segments[:4]]
    return "; ".join(shown) + (f"; and {len(segments) - 4} more segments" if len(segments) > 4 else "")


def write_files(given: dict[str, Any], result: dict[str, Any], segments: list[Segment], setting: Setting) -> None:
    """Write what --json and --plot ask for.

    Args:
        given: The options that were given.
        result: What `report` returned.
        segments: (σ, q, steps) one after another.
        setting: The options.
    """
    if "json" in given:
        text = json.dumps(result, indent=2) + "\n"
        if str(given["json"]) == "-":
            print(text, end="")
        else:
            write_text(given["json"], text)
    if "plot" in given:
        from ghostclip.commands.privacy_plot import plot_epsilon

        with Working("drawing"):
            plot_epsilon(segments, setting, given["plot"])


def _whole(steps: str | float) -> int:
    """Return a number of steps; a part of one is no number of steps, and cutting it off would count too few."""
    whole = int(steps)
    if not isinstance(steps, str) and whole != steps:
        raise ValueError(f"{steps} steps")
    return whole


def read_schedule(path: Path) -> list[Segment]:
    """Read segments from a file: JSON [[sigma, q, steps], ...], or lines "sigma q steps" (commas allowed, # comments).

    Args:
        path: The file.

    Returns:
        The segments.

    Raises:
        DataError: If it does not hold segments.
    """
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
            lines = (line.split("#")[0].replace(",", " ").split() for line in text.splitlines())
            rows = [line for line in lines if line]
        segments = [(float(sigma), float(rate), _whole(steps)) for sigma, rate, steps in rows]
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{path}: expected noise multiplier, sample rate and steps in each line ({error}).") from error
    if not segments:
        raise DataError(f"{path}: holds no segment.")
    return segments
