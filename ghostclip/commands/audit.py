"""``ghostclip audit``: what the scores that a training script recorded prove about its ε."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ghostclip._files import require_picture, require_writable, write_text
from ghostclip.errors import DataError

EXIT_CONTRADICTED = 3
EXAMPLES = """\
examples:
  ghostclip audit scores.csv --claimed-epsilon 3 --delta 1e-6
      canaries of one training: what their scores prove, and whether it contradicts a claim
  ghostclip audit losses.json --lower-is-member --plot audit.png
      losses instead of scores, and a picture
  ghostclip audit runs.npz --method clopper-pearson --guesses 100
      one score of each of many independent trainings

scores.csv has two columns, for example
  score,included
  1.7,1
  0.2,0
"""

_METHODS = ("one-run", "one-run-f-dp", "one-run-gaussian", "clopper-pearson", "gaussian")
_DEFAULTS: dict[str, Any] = {"delta": 1e-5, "confidence": 0.95, "method": "one-run", "threshold": "union"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.

    Args:
        parser: The sub-command's parser.
    """
    parser.add_argument(
        "scores",
        type=Path,
        metavar="SCORES",
        help="file .csv, .json or .npz with the columns score, and included (or member); higher scores mean included",
    )
    parser.add_argument("--delta", type=float, metavar="D", help="delta of the guarantee (default: 1e-05)")
    parser.add_argument(
        "--confidence", type=float, metavar="P", help="probability with which the bound is right (default: 0.95)"
    )
    parser.add_argument(
        "--method",
        choices=_METHODS,
        help="rows are canaries of one training (one-run...) or independent trainings (clopper-pearson, gaussian); the "
        "gaussian ones prove more and take the mechanism for a Gaussian one (default: one-run)",
    )
    parser.add_argument(
        "--threshold",
        choices=("split", "union"),
        help="for independent trainings: choose the threshold on a random half, or pay for several (default: union)",
    )
    parser.add_argument(
        "--guesses", type=int, metavar="R", help="for one training: canaries to guess (default: several, each paid for)"
    )
    parser.add_argument(
        "--claimed-epsilon", type=float, metavar="E", help="a claim; exit status 3 if the scores contradict it"
    )
    parser.add_argument("--lower-is-member", action="store_true", help="lower scores mean included, as for losses")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture of scores and ROC curve (.png, .pdf, .svg)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the finding as JSON")


def run(given: dict[str, Any]) -> int:
    """Audit the scores and print one sentence about ε, and one about what it rests on.

    Args:
        given: The options that were given.

    Returns:
        0, or 3 if the scores contradict the claim.

    Raises:
        DataError: If a result would replace the scores.
        InvalidOptionError: If an option is out of range.
    """
    from ghostclip.audit import audit_scores, load_scores, plot_audit

    options = {**_DEFAULTS, **given}
    for name in ("plot", "json"):
        if name in options and options[name].resolve() == options["scores"].resolve():
            raise DataError(f"--{name} {options[name]}: would replace the scores.")
    if "plot" in options:
        require_picture(options["plot"], "--plot")
    if "json" in options:
        require_writable(options["json"], "--json")
    scores = load_scores(options["scores"])
    if "lower_is_member" in options:
        scores = scores.negated()
    finding = audit_scores(
        scores,
        delta=options["delta"],
        confidence=options["confidence"],
        method=options["method"],
        threshold=options["threshold"],
        guesses=options.get("guesses"),
        claimed_epsilon=options.get("claimed_epsilon"),
    )
    print(finding.sentence())
    print(finding.basis())
    if "plot" in options:
        plot_audit(scores, finding, options["plot"])
    if "json" in options:
        write_text(options["json"], json.dumps(finding.as_dict(), indent=2) + "\n")
    return EXIT_CONTRADICTED if finding.contradicts else 0
