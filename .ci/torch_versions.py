"""Run the core tests on other versions of torch, each in an environment of its own, and write down what passed.

    python .ci/torch_versions.py 2.8.0 2.15.0

The core tests are what a version of torch could break: the behaviour of its private names, exactness against one-sample
autograd and sensitivity for every case of the table, the checks, the compiler, the engine, accounting, resuming. Tests
that need a library that is not installed beside torch (transformers, peft, opacus) are skipped and counted as such.
Environments are made in the system's temporary folder (another one: --environments) and are kept for the next run.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "torch-versions.md"
NEEDED = ("numpy", "scipy", "opt_einsum", "pytest>=8", "pytest-xdist", "hypothesis")
CORE = (
    "tests/test_torch.py",
    "tests/exactness/test_clipped_sums.py",
    "tests/capture/test_compiled.py",
    "tests/capture/test_written.py",
    "tests/capture/test_routed_rows.py",
    "tests/capture/test_backward_entry.py",
    "tests/clipping/test_changed_in_backward.py",
    "tests/exactness/test_refusals.py",
    "tests/checks",
    "tests/clipping/test_scalar_losses.py",
    "tests/engine/test_privacy_engine.py",
    "tests/optim/test_dp_optimizer.py",
    "tests/privacy/test_account_in_state.py",
    "tests/audit/test_sensitivity.py",
    "tests/accounting/test_rdp_curve.py",
    "tests/privacy/test_resume.py",
)
# One strategy of one pass and one of two, in float64: the others differ in what is kept, not in what torch is asked.
CHOSEN = "not ((test_matches_one_sample_autograd or test_one_sample_moves) and (float32 or hooks or fast))"
HEAD = """# The core tests on several versions of torch

Written by `make test-torch TORCH="..."` (.ci/torch_versions.py names the tests): exactness against one-sample autograd,
sensitivity, the private names of torch, the checks, the compiler, the engine, accounting and resuming, on a CPU.

| torch | passed | failed | skipped | minutes | machine | day | skipped because |
|---|---|---|---|---|---|---|---|
"""


def environment(version: str, folder: Path) -> Path:
    """Make an environment with a version of torch, unless it is there; return its Python."""
    python = folder / f"torch-{version}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    index = os.environ.get("TORCH_INDEX")
    extra = ["--extra-index-url", index] if index else []
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *extra]
    subprocess.run([*pip, f"torch=={version}", *NEEDED], check=True)
    return python


def measured(version: str, python: Path, jobs: int) -> tuple[str, bool]:
    """Run the core tests; return the table's row and whether all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [python, "-m", "pytest", "-q", "-n", str(jobs), "-p", "no:cacheprovider", f"--junitxml={report}"]
        own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        done = subprocess.run([*pytest, "-k", CHOSEN, *CORE], cwd=ROOT, env=own, check=False)
        minutes = (time.monotonic() - began) / 60
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    reasons = collections.Counter(item.get("message", "").splitlines()[0] for item in skipped)
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common()).replace("|", "/") or "-"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    passed = len(cases) - failed - len(skipped)
    counts = f"{passed} | {failed} | {len(skipped)} | {minutes:.1f}"
    return f"| {version} | {counts} | {machine} | {date.today()} | {listed} |", done.returncode == 0


def write(rows: dict[str, str]) -> None:
    """Put rows into the results, in the place of older ones of the same versions."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    before = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "torch |" not in line}
    every = {**before, **rows}
    ordered = sorted(every, key=lambda version: [int(part) for part in version.split("+")[0].split(".")])
    RESULTS.write_text(HEAD + "\n".join(every[version] for version in ordered) + "\n", encoding="utf-8")


def main() -> int:
    """Run every version that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", help="versions of torch, such as 2.11.0")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--python", type=Path, help="run in this Python, which has torch, and make no environment")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    given = parser.parse_args()
    good = True
    for version in given.versions:
        python = given.python or environment(version, given.environments)
        row, passed = measured(version, python, given.jobs)
        good = good and passed
        write({version: row})
        print(row)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
