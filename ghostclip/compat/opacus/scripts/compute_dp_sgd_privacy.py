"""What a planned training will cost: `python -m ghostclip.compat.opacus.scripts.compute_dp_sgd_privacy --help`.

The arguments are those of the program of this name that Opacus's first releases had; `ghostclip epsilon` knows more.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from ghostclip._validate import positive_int
from ghostclip.accounting import RDPAccountant, bounding_accountant
from ghostclip.errors import GhostClipError


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compute_dp_sgd_privacy", description=__doc__)
    parser.add_argument("-r", "-s", "--sample-rate", type=float, required=True, help="probability to join a batch")
    parser.add_argument("-n", "--noise-multiplier", type=float, required=True, help="σ, in units of the bound")
    parser.add_argument("-e", "--epochs", type=int, required=True, help="passes over the data")
    parser.add_argument("-d", "--delta", type=float, default=1e-5, help="δ (default: %(default)s)")
    parser.add_argument(
        "-a", "--alphas", type=float, nargs="+", default=None, help="Rényi orders to search; a wide range by default"
    )
    return parser.parse_args(arguments)


def compute_dp_sgd_privacy(
    *,
    sample_rate: float,
    noise_multiplier: float,
    epochs: int,
    delta: float,
    alphas: Sequence[float] | None = None,
) -> tuple[float, float]:
    """Return the ε of a training by Rényi accounting, and the order that proves it.

    Args:
        sample_rate: Probability with which each record joins a batch.
        noise_multiplier: σ.
        epochs: Passes over the data.
        delta: δ.
        alphas: Orders to search.

    Returns:
        (ε, α).
    """
    accountant = bounding_accountant("rdp")
    assert isinstance(accountant, RDPAccountant)
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    accountant.history = [(noise_multiplier, sample_rate, steps_of(sample_rate, epochs))]
    return accountant.get_privacy_spent(delta=delta, alphas=alphas)


def steps_of(sample_rate: float, epochs: int) -> int:
    """Return the number of steps of a training.

    Args:
        sample_rate: Probability with which each record joins a batch.
        epochs: Passes over the data.

    Returns:
        Steps, rounded up.
    """
    return math.ceil(positive_int(epochs, "epochs") / sample_rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the cost of a training.

    Args:
        arguments: As on the command line.

    Returns:
        The exit status.
    """
    given = _options(arguments)
    try:
        epsilon, alpha = compute_dp_sgd_privacy(
            sample_rate=given.sample_rate,
            noise_multiplier=given.noise_multiplier,
            epochs=given.epochs,
            delta=given.delta,
            alphas=given.alphas,
        )
    except GhostClipError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    steps = steps_of(given.sample_rate, given.epochs)
    sys.stdout.write(
        f"DP-SGD with sampling rate {given.sample_rate:g}, noise multiplier {given.noise_multiplier:g} and {steps} "
        f"steps is (ε, δ) = ({epsilon:.4g}, {given.delta:g})-private, proved at order α = {alpha:g}.\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
