"""Commands on what a training has done: what its `ledger` says was released, and what an `audit` proves by scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from ghostclip.commands.options import DELTA, FILE, Options, require_files, write_json
from ghostclip.errors import DataError

LEDGER: Final[Options] = {
    "action": {"choices": ("show",), "help": "what to do"},
    "file": {"type": Path, "metavar": "LEDGER", "help": "file that a training was given as its ledger"},
    **DELTA,
    "--json": {**FILE, "help": "write what is shown as JSON; - for standard output"},
}
# Of a mechanism, what is said of it in this order where it is known.
_SAID: Final = (
    "noise_multiplier", "max_grad_norm", "sample_rate", "sampling", "expected_batch_size", "noise_level", "relation",
)  # fmt: skip


def run_ledger(given: dict[str, Any]) -> int:
    """Check a ledger, and say what was released with it and what that costs.

    examples:
      ghostclip ledger show run.ledger
          verify its chain of hashes; releases by mechanism, and their epsilon; also while a training writes to it
      ghostclip ledger show run.ledger --delta 1e-6 --json -
          the same for another delta, as JSON
    """
    from ghostclip import PrivacyEngine
    from ghostclip.privacy.ledger_file import LedgerFile
    from ghostclip.privacy.summary import rounded_down, rounded_up

    path, delta = given["file"], given["delta"]
    if not path.exists():
        # An engine would begin a new one: ε = 0.
        raise DataError(f"{path}: no such file; expected the ledger of a training.")
    require_files(given)
    # Its chain is verified when it is read. A training may write on meanwhile: ε is then of more lines, never of fewer.
    parts = _by_mechanism(path, lines=LedgerFile(path).place()["lines"])
    bounds = PrivacyEngine(ledger=path).epsilon_bounds(delta)
    releases = sum(part["releases"] for part in parts)
    if str(given["json"]) != "-":
        print(f"{path}: every line continues the one before it; {releases} releases")
        for part in parts:
            said = ", ".join(f"{name.replace('_', ' ')} {part[name]}" for name in _SAID if name in part)
            print(f"{part['releases']} releases: {said or 'brought in from a checkpoint'}")
        print(f"epsilon <= {rounded_up(bounds.upper)} at delta = {delta:g}")
        print(f"no accountant can go below epsilon = {rounded_down(bounds.lower)}")
        print("whole lines that were cut off its end are missed only by a checkpoint that has seen them")
    plain = ["inf" if math.isinf(value) else value for value in (bounds.upper, bounds.lower)]
    values = {"epsilon": plain[0], "epsilon_lower_bound": plain[1], "delta": delta}
    write_json(given["json"], {"ledger": str(path), "releases": releases, **values, "mechanisms": parts})
    return 0


def _by_mechanism(path: Path, lines: int) -> list[dict[str, Any]]:
    """Return the mechanisms of so many verified lines in order, each with the number of releases under it."""
    parts: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines()[:lines]:
        entry = json.loads(line.rpartition("\t")[0])
        if "mechanism" in entry:
            parts.append({**entry["mechanism"], "releases": 0})
        elif "run" in entry:
            parts[-1]["releases"] += 1
    return [part for part in parts if part["releases"]]


EXIT_CONTRADICTED = 3
AUDIT: Final[Options] = {
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


def run_audit(given: dict[str, Any]) -> int:
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
