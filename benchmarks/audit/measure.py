"""The measurements: checks and audit of every engine, and how the audit itself fares on mechanisms of known ε."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import numpy as np

from ghostclip.audit import Scores, audit_scores, flip_coins, gaussian_epsilon
from tests.audit.checks import CHECKS, audit_of_a_step
from tests.audit.mutations import MUTATIONS
from tests.audit.subject import CLAIMED_EPSILON, DELTA, SIGMA
from tests.audit.surrounding_mutations import SURROUNDING_MUTATIONS
from tests.audit.surroundings import SURROUNDINGS

CHEAP = {name: check for name, check in CHECKS.items() if name != "audit_stays_below_the_claim"} | SURROUNDINGS
MANY_RUNS = (("gaussian", "union"), ("gaussian", "split"), ("clopper-pearson", "union"), ("clopper-pearson", "split"))
ONE_RUN = ("one-run", "one-run-f-dp", "one-run-gaussian")


def engines(runs: int) -> list[dict[str, Any]]:
    """Check and audit the engine as it is, then every broken one.

    Args:
        runs: Steps of each side of an audit.

    Returns:
        One row per engine.
    """
    broken = {"the engine as it is": contextlib.nullcontext, **MUTATIONS, **SURROUNDING_MUTATIONS}
    return [_engine(name, mutation, runs) for name, mutation in broken.items()]


def _engine(name: str, mutation: Any, runs: int) -> dict[str, Any]:
    started = time.process_time()
    with mutation():
        said = {check: words for check in CHEAP if (words := _complaint(check))}
        found = audit_of_a_step(runs)
    where, highest = max(found.items(), key=lambda pair: pair[1].epsilon)
    seconds = time.process_time() - started
    print(f"{name}: {len(said)} checks, epsilon >= {highest.epsilon:.2f}, {seconds:.0f} s", file=sys.stderr)
    return {
        "name": name,
        "seen_by": said,
        "epsilon": highest.epsilon,
        "where": where,
        "epsilon_of_all": found["all"].epsilon,
        "contradicted": highest.contradicts,
        "cpu_seconds": seconds,
    }


def _complaint(check: str) -> str:
    """What a check says against the engine, or nothing."""
    try:
        CHEAP[check]()
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


def statistics(repeats: int) -> list[dict[str, Any]]:
    """Audit Gaussian mechanisms of known μ: how often the bound exceeds the truth, and how near it comes.

    Args:
        repeats: Audits of each kind.

    Returns:
        One row per method and number of scores.
    """
    stream = np.random.default_rng(11)
    rows = []
    for size in (400, 1500, 10_000):
        for method, threshold in MANY_RUNS:
            rows.append(_many_runs(stream, size, method, threshold, repeats))
    for size in (1000, 10_000):
        rows += [_one_run(stream, size, method, max(10, repeats // (20 if size > 1000 else 4))) for method in ONE_RUN]
    return rows


def _many_runs(stream: np.random.Generator, size: int, method: str, threshold: str, repeats: int) -> dict[str, Any]:
    found = []
    for _ in range(repeats):
        scores = Scores.of_runs(member=stream.normal(1.0, 1.0, size), other=stream.normal(0.0, 1.0, size))
        found.append(audit_scores(scores, delta=DELTA, method=method, threshold=threshold).epsilon)
    return _summary(f"{method}, {threshold}", f"{size} runs a side", found)


def _one_run(stream: np.random.Generator, size: int, method: str, repeats: int) -> dict[str, Any]:
    found = []
    for _ in range(repeats):
        included = flip_coins(size, seed=int(stream.integers(2**32)))
        scores = Scores.of(stream.normal(included.astype(float), 1.0), included)
        found.append(audit_scores(scores, delta=DELTA, method=method).epsilon)
    return _summary(method, f"{size} canaries of one run", found)


def _summary(method: str, rows: str, found: list[float]) -> dict[str, Any]:
    truth = gaussian_epsilon(1.0, delta=DELTA)
    low, median, high = (float(value) for value in np.quantile(found, (0.05, 0.5, 0.95)))
    above = sum(epsilon > truth for epsilon in found)
    print(f"{method}, {rows}: median {median:.2f}, {above} of {len(found)} above {truth:.2f}", file=sys.stderr)
    return {
        "method": method,
        "rows": rows,
        "repeats": len(found),
        "above_the_truth": above,
        "median": median,
        "low": low,
        "high": high,
        "truth": truth,
    }


def claim() -> dict[str, float]:
    """Return what the audited step claims."""
    return {"sigma": SIGMA, "delta": DELTA, "epsilon": CLAIMED_EPSILON, "confidence": 0.95}
