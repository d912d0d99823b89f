"""Break the engine on purpose, one line at a time: `python -m benchmarks.mutations` writes mutations.md.

Each mutation is made in a copy of the sources, and the tests that `make test` runs have to see it: the first of them
that fails is written down.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import head, parser, refuse_unknown, table, write
from benchmarks.report import heading

ROOT = Path(__file__).resolve().parent.parent
QUICK = "not slow and not thorough"
# What tests read beside the package.
_COPIED = ("ghostclip", "tests", "benchmarks", "paper_repro", "docs")
_FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt")


class Mutation(NamedTuple):
    """One change to the sources, the promise that it breaks, and the quick tests that are asked about it."""

    name: str
    promise: str
    file: str
    """Below ghostclip/."""
    old: str
    """Occurs exactly once."""
    new: str
    tests: str
    """Files, or tests of files, below tests/, separated by spaces."""


# fmt: off
MUTATIONS = (
    Mutation("coefficient rounded up", "coefficient · norm ≤ C in floating point", "clipping/bounds.py",
             "return max_grad_norm * (1 - 4 *", "return max_grad_norm * (1 + 1 *",
             "clipping/test_clip_policies.py clipping/test_step.py"),
    Mutation("coefficient above 1", "a gradient inside the ball is kept as it is", "clipping/bounds.py",
             "outside_B = torch.threshold(norm_B, max_grad_norm, bound)", "outside_B = norm_B",
             "clipping/test_clip_policies.py clipping/test_step.py"),
    Mutation("second group not clipped", "every clip group is clipped", "clipping/decisions.py",
             "coef_B = self.coef_GB[group]\n",
             "coef_B = self.coef_GB[group] if not group else self.coef_GB[0] * 0 + 1\n",
             "clipping/test_clip_policies.py clipping/test_norm_sums.py"),
    Mutation("error bound dropped", "norms are over-estimated by what rounding may hide", "clipping/norms.py",
             "return norm.value_B if norm.error_B is None else (norm.value_B + norm.error_B).clamp_(min=0)",
             "return norm.value_B.clamp(min=0)",
             "clipping/test_norm_sums.py exactness/test_uses_that_cancel.py factors"),
    Mutation("no cross terms", "uses of one parameter are added before they are squared", "clipping/norms.py",
             "value_B = 2 * sum_tensors(", "value_B = 0 * sum_tensors(",
             "clipping/test_norm_sums.py exactness/test_clipped_sums.py"),
    Mutation("biases not in the norm", "a norm is of all parameters", "clipping/norms.py",
             "norm = factor.unfinished()\n        norms = factor",
             'if name.endswith("bias"):\n            return\n        '
             "norm = factor.unfinished()\n        norms = factor",
             "clipping/test_step.py exactness/test_clipped_sums.py"),
    Mutation("largest conv group alone", "all groups of a convolution count in a norm", "factors/outer.py",
             "values_N.view(-1, self.slots).sum(1)", "values_N.view(-1, self.slots).amax(1)",
             "factors exactness/test_clipped_sums.py"),
    Mutation("repeated ids apart", "look-ups of one row are added before they are squared", "factors/rows.py",
             "if self.ids_BT.shape[1] <= 1:", "if self.ids_BT.shape[1] >= 1:",
             "factors exactness/test_clipped_sums.py"),
    Mutation("rows in reversed order", "each sample is measured by its own rows", "factors/base.py",
             "return tensor.index_select(0, index_D.to(tensor.device))",
             "return tensor.index_select(0, index_D.to(tensor.device)).flip(0)",
             "factors clipping/test_norm_sums.py exactness/test_uses_that_cancel.py"),
    Mutation("NaN times 0 is added", "a sample that is not finite adds nothing", "clipping/decisions.py",
             "included = factor if self.keep_B is None else factor.masked(self.keep_B)", "included = factor",
             "clipping/test_step.py exactness/test_sensitivity_search.py audit/test_sensitivity.py"),
    Mutation("mean taken for a sum", "norms are of each sample's own loss", "clipping/strategies.py",
             "return (float(max(1, forward.batch_size)) if is_mean else 1.0) / forward.start", "return 1.0",
             "clipping/test_step.py clipping/test_scalar_losses.py"),
    Mutation("dummy sample counts", "an empty batch adds nothing", "clipping/decisions.py",
             "if forward.is_dummy:\n            self.norm_GB",
             "if forward.is_dummy and not coef_GB:\n            self.norm_GB",
             "clipping/test_step.py clipping/test_clip_policies.py"),
    Mutation("16-bit accumulators", "sums of 16-bit parameters are formed in float32", "clipping/store.py",
             "wide = torch.promote_types(dtype, torch.float32)\n            buffer", "wide = dtype\n            buffer",
             "clipping/test_sums_kept.py exactness/test_low_precision.py"),
    Mutation("first physical batch lost", "every record of a draw is in the sum once", "clipping/store.py",
             "buffer = self._sums.get(parameter) if self.owned else", "buffer = None if self.owned else",
             "data/test_physical_batches.py data/test_batch_memory_manager.py"),
    Mutation("half a part kept", "after out-of-memory sums are put back", "data/physical_batches.py",
             "        undo()\n        if not again", "        if not again",
             "data/test_out_of_memory.py data/test_physical_batches.py"),
    Mutation("zero_grad keeps sums", "zero_grad() discards what was accumulated", "optim/dp_optimizer.py",
             "            self._hide_sums()\n            self.clipper.discard()", "            self._hide_sums()",
             "optim/test_dp_optimizer.py facade/test_facade.py"),
    Mutation("frozen parameters trained", "a frozen parameter gets no gradient", "optim/dp_optimizer.py",
             "trainable = [p for p in self.params if p.requires_grad]\n        if",
             "trainable = self.params\n        if",
             "optim/test_dp_optimizer.py clipping/test_step.py"),
    Mutation("noise not times C", "noise has standard deviation σ·C", "optim/dp_optimizer.py",
             "gradient_noise_multiplier(self._noise_multiplier) * self.clipper.sensitivity()",
             "gradient_noise_multiplier(self._noise_multiplier)", "optim/test_dp_optimizer.py"),
    Mutation("noise on one parameter", "every coordinate gets noise", "optim/dp_optimizer.py",
             "add_noise_(self.noise_source, released, std, divisor)",
             "add_noise_(self.noise_source, released[:1], std, divisor)\n"
             "            if len(released) > 1 and divisor != 1:\n"
             "                _torch.divide_all_(released[1:], divisor)",
             "optim/test_dp_optimizer.py audit/test_mutations.py"),
    Mutation("noise used twice", "no noise is used again", "noise/keyed.py",
             "position, self._position = self._position, self._position + 1", "position = self._position",
             "noise/test_noise.py audit/test_mutations.py"),
    Mutation("counter not restored", "a resumed run continues the noise", "noise/keyed.py",
             "self._position = position\n        self._take_note()", "self._position = 0\n        self._take_note()",
             "noise/test_noise.py privacy/test_resume.py"),
    Mutation("a tenth too many records", "each record is drawn with probability q", "data/schemes.py",
             "independent_coins(words, self.num_samples, self.sample_rate)",
             "independent_coins(words, self.num_samples, min(1.0, 1.1 * self.sample_rate))",
             "data/test_sampler.py data/test_schemes.py audit/test_mutations.py"),
    Mutation("empty batch skipped", "an empty batch is released", "optim/dp_optimizer.py",
             "            self.clipper.mark_empty_batch()\n", "            raise SkipStep\n",
             "optim/test_draws.py engine/test_privacy_engine.py"),
    Mutation("release not charged", "every release is counted", "privacy/account.py",
             "self._add(events)\n", "self._add(events[1:])\n",
             "engine/test_privacy_engine.py privacy/test_ledger_and_budget.py"),
    Mutation("seen before its line", "a line is written before anything sees the release", "optim/dp_optimizer.py",
             "        try:\n            for release_hook in",
             "        for p, gradient in zip(trainable, released, strict=True):\n            p.grad = gradient\n"
             "        try:\n            for release_hook in",
             "optim/test_step_faults.py"),
    Mutation("no fsync", "a line is on the disk before its release", "privacy/ledger_file.py",
             "    os.fsync(descriptor)\n\n\ndef _folder", "    del descriptor\n\n\ndef _folder",
             "optim/test_step_faults.py privacy/test_ledger_file.py"),
    Mutation("chain not checked", "a changed ledger is refused", "privacy/ledger_file.py",
             "return written == _hash_of(body, after.chained).encode()", "return bool(written)",
             "privacy/test_ledger_file.py privacy/test_corruptions.py"),
    Mutation("RDP divided by α", "ε is an upper bound (RDP)", "accounting/rdp.py",
             "return log_a / (orders - 1) *", "return log_a / orders *", "accounting/test_rdp_curve.py"),
    Mutation("PLD rounded down", "ε is an upper bound (PLD)", "accounting/pairs.py",
             'build = _spread if side == "upper" else _pooled', "build = _pooled",
             "accounting/test_pairs.py accounting/test_edges.py"),
    Mutation("batch norm not refused", "layers that mix samples are refused", "rules/norm.py",
             'if call.get("training", False):', "if False:", "exactness/test_refusals.py"),
    Mutation("divided by tokens", "a factor that follows the batch is refused", "clipping/loss_scale.py",
             "    if not unclear:\n", "    if True:\n",
             "clipping/test_scalar_losses.py exactness/test_losses_of_transformers.py"),
    Mutation("samples keep their places", "whichever sample follows whichever place is seen", "checks/batches.py",
             "[moved.get(place, rest[0]) for place", "[place if place in moved else rest[0] for place",
             "checks/test_batch_independence.py"),
    Mutation("numbers of their own", "all samples meet the same random numbers", "checks/batches.py",
             "[1 if axis in self._axes else size for", "[size for", "checks/test_batch_independence.py"),
    Mutation("what is kept may move all", "what a loop keeps of a batch may not move several samples of a later one",
             "checks/loop_record.py", "self._changed(whole) > 1", "self._changed(whole) > self._batch.size",
             "checks/test_loop_record.py"),
    Mutation("hooks may mix", "a hook that changes gradients of a loss is refused", "capture/hooks.py",
             "            raise self._error()\n", "            return\n",
             "clipping/test_hooks_on_losses.py capture/test_hooks_on_gradients.py"),
    Mutation("padding of graphs counts", "padding samples add nothing", "graph/rewrite.py",
             "torch.where(valid_B & certain_B, coef_B, 0.0)", "torch.where(certain_B, coef_B, 0.0)",
             "graph/test_steps.py"),
    Mutation("graph not compared", "a graph is held against the eager engine", "graph/step.py",
             "doubt is None and self._agrees(outcome, before)", "doubt is None", "graph/test_refusals.py"),
)
# fmt: on


def mutated(text: str, mutation: Mutation) -> str:
    """Return a file's text with a mutation."""
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: ghostclip/{mutation.file} has its text {text.count(mutation.old)} times")
    return text.replace(mutation.old, mutation.new)


def _copy(place: Path) -> None:
    for name in _COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "_build")
        shutil.copytree(ROOT / name, place / name, ignore=ignored, symlinks=True)
    for name in _FILES:
        shutil.copy(ROOT / name, place / name)


def _tested(place: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run quick tests in a copy until one fails."""
    about = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    imported = [sys.executable, "-c", "import ghostclip; print(ghostclip.__file__)"]
    found = subprocess.run(imported, cwd=place, env=about, capture_output=True, text=True, check=False)
    if not found.returncode and Path(found.stdout.strip()) != place / "ghostclip" / "__init__.py":
        raise RuntimeError(f"tests would run on {found.stdout.strip()}")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", QUICK]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in tests)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=place, env=about, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    if done.returncode not in (0, 1) and not failed:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {"caught_by": failed[0] if failed else None, "seconds": round(time.perf_counter() - began, 1)}


def run(mutations: Sequence[Mutation]) -> list[dict[str, Any]]:
    """Make mutations one after the other in a copy of the sources."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        _copy(place)
        for mutation in mutations:
            path = place / "ghostclip" / mutation.file
            whole = path.read_text(encoding="utf-8")
            path.write_text(mutated(whole, mutation), encoding="utf-8")
            rows.append({**mutation._asdict(), **_tested(place, mutation.tests.split())})
            path.write_text(whole, encoding="utf-8")
            print(f"{mutation.name}: {rows[-1]['caught_by'] or 'NOT CAUGHT'} ({rows[-1]['seconds']} s)", flush=True)
        seen_by = sorted({row["caught_by"] for row in rows} - {None})
        unbroken = _tested(place, seen_by)["caught_by"] if seen_by else None
        if unbroken is not None:
            raise RuntimeError(f"{unbroken} fails without a mutation, too")
    return rows


def _markdown(report: dict[str, Any]) -> str:
    rows = report["mutations"]
    shown = ("**nothing**" if row["caught_by"] is None else f"`{row['caught_by']}`" for row in rows)
    cells = [[row["name"], row["promise"], by, f"{row['seconds']:.0f}"] for row, by in zip(rows, shown, strict=True)]
    return (
        f"{heading(report)}\n{sum(row['caught_by'] is not None for row in rows)} of {len(rows)} mutations of the "
        "engine are seen by the quick tests (`make test`). Seconds: of a process that runs some of these until one "
        "fails.\n\n" + table("mutation | breaks | seen by | seconds", cells, left=3)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Break the engine and write down what the tests see."""
    options = parser("benchmarks.mutations", __doc__)
    options.add_argument("--only", action="append", metavar="NAME", help="this mutation; may be repeated")
    given = options.parse_args(arguments)
    refuse_unknown(options, "--only", given.only, [mutation.name for mutation in MUTATIONS])
    report = head("benchmarks.mutations", arguments)
    report["mutations"] = run([mutation for mutation in MUTATIONS if not given.only or mutation.name in given.only])
    write(given.out, "mutations", report, _markdown(report))
    return 0 if all(row["caught_by"] for row in report["mutations"]) else 1


if __name__ == "__main__":
    sys.exit(main())
