"""Test a claimed epsilon with the scores of an attack.

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

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ghostclip.commands.options import DELTA, FILE, Options, require_files, write_json
from ghostclip.errors import DataError

EXIT_CONTRADICTED = 3
OPTIONS: Final[Options] = {
    "scores": {"type": Path, "metavar": "SCORES", "help": "file .csv, .json or .npz with the columns score, and "
               "included (or member); higher scores mean included"},
    **DELTA,
    "--confidence": {"type": float, "metavar": "P", "default": 0.95,
                     "help": "probability with which the bound is right (default: %(default)s)"},
    "--method": {"choices": ("one-run", "one-run-f-dp", "one-run-gaussian", "clopper-pearson", "gaussian"),
                 "default": "one-run", "help": "rows are canaries of one training (one-run...) or independent "
                 "trainings (clopper-pearson, gaussian); the gaussian ones prove more and take the mechanism for a "
                 "Gaussian one (default: %(default)s)"},
    "--threshold": {"choices": ("split", "union"), "default": "union", "help": "for independent trainings: choose the "
                    "threshold on a random half, or pay for several (default: %(default)s)"},
    "--guesses": {"type": int, "metavar": "R",
                  "help": "for one training: canaries to guess (default: several, each paid for)"},
    "--claimed-epsilon": {"type": float, "metavar": "E",
                          "help": "a claim; exit status 3 if the scores contradict it"},
    "--lower-is-member": {"action": "store_true", "help": "lower scores mean included, as for losses"},
    "--plot": {**FILE, "help": "picture of scores and ROC curve (.png, .pdf, .svg)"},
    "--json": {**FILE, "help": "write the finding as JSON; - for standard output"},
}  # fmt: skip


def run(given: dict[str, Any]) -> int:
    """Print what the scores prove and what it rests on, and return 0, or 3 if they contradict the claim."""
    from ghostclip.audit import audit_scores, load_scores, plot_audit

    for name in ("plot", "json"):
        if given[name] is not None and given[name].resolve() == given["scores"].resolve():
            raise DataError(f"--{name} {given[name]}: would replace the scores.")
    require_files(given)
    scores = load_scores(given["scores"])
    if given["lower_is_member"]:
        scores = scores.negated()
    names = ("delta", "confidence", "method", "threshold", "guesses", "claimed_epsilon")
    finding = audit_scores(scores, **{name: given[name] for name in names})
    print(finding.sentence())
    print(finding.basis())
    if given["plot"] is not None:
        plot_audit(scores, finding, given["plot"])
    write_json(given["json"], finding.as_dict())
    return EXIT_CONTRADICTED if finding.contradicts else 0
