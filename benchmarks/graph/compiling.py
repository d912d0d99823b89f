"""Seconds until the first private step of a GPT of twelve layers is done, without and with what an earlier run left.

Each run is a process of its own, on one folder of Inductor's cache, which begins empty.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import ghostclip
from benchmarks.graph.speed import token_losses
from benchmarks.harness import in_new_process
from benchmarks.models import GPT
from ghostclip.graph import compiled

WIDTH, POSITIONS, SAMPLES, VOCABULARY = 768, 128, 4, 5000
RUNS = ("nothing in the cache", "the cache of the run before")


def measure() -> list[dict[str, Any]]:
    """Run both."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return [{"name": name, **in_new_process("benchmarks.graph.compiling", [])} for name in RUNS]


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "# The private step as one graph: until the first step",
        "",
        f"`{report['command']}`, {report['date']}: {report['machine']['cpu']}, torch "
        f"{report['machine']['versions']['torch']}, float32. A GPT of 12 layers, width {WIDTH}, {POSITIONS} positions, "
        f"vocabulary {VOCABULARY}, {SAMPLES} samples. Seconds of CPU time, one thread; of two numbers the second is "
        "that of the compilers that the process starts. A graph is made by tracing, rewriting and compiling, or is "
        "read. The first batch is computed by the eager engine too, with its proofs, and compared. Others ran beside "
        f"it: the load was {max(row.get('load', 0) for row in report['rows']):.0f}.",
        "",
        "| run | traced (s) | rewritten (s) | compiled or read (s) | graph made (s) | first run, eager step (s) "
        "| on the clock (s) | read from disk |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in report["rows"]:
        if "process_problem" in row:
            lines.append(f"| {row['name']} | {row['process_problem']} | | | | | | |")
            continue
        both = (f"{row[key]:.1f} + {row[key + '_by_compilers']:.1f}" for key in ("compiled", "made"))
        seconds = [f"{row['traced']:.1f}", f"{row['rewritten']:.1f}", *both, f"{row['rest']:.1f}", f"{row['wall']:.0f}"]
        lines.append(f"| {row['name']} | {' | '.join(seconds)} | {'yes' if row['found'] else 'no'} |")
    return "\n".join(lines) + "\n"


def _cpu() -> tuple[float, float]:
    """Return CPU seconds of this process and of those that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, others = (one.ru_utime + one.ru_stime for one in used)
    return own, others


class _Parts(dict[str, tuple[float, float]]):
    """CPU seconds of parts by name."""

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its time to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begun = _cpu()
            try:
                return call(*args, **kwargs)
            finally:
                own, others = self.get(name, (0.0, 0.0))
                ended = _cpu()
                self[name] = own + ended[0] - begun[0], others + ended[1] - begun[1]

        return run


def main() -> None:
    """Measure in this process, and print one line of JSON."""
    argparse.ArgumentParser(prog="python -m benchmarks.graph.compiling", description=main.__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=WIDTH, heads=12, layers=12, positions=POSITIONS)
    ids = torch.randint(VOCABULARY, (SAMPLES, POSITIONS))
    step = ghostclip.GraphStep(ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph"), token_losses)
    parts = _Parts()
    for name, part in (("trace", "traced"), ("rewritten", "rewritten")):
        setattr(compiled, name, parts.timed(part, getattr(compiled, name)))
    step._step_for = parts.timed("made", step._step_for)  # type: ignore[method-assign]
    begun = time.perf_counter()
    parts.timed("whole", step)(ids)
    wall, (made, by_compilers) = time.perf_counter() - begun, parts["made"]
    traced, rewritten = parts["traced"][0], parts.get("rewritten", (0.0, 0.0))[0]
    row = {
        "traced": traced,
        "rewritten": rewritten,
        "compiled": made - traced - rewritten,
        "compiled_by_compilers": by_compilers,
        "made": made,
        "made_by_compilers": by_compilers,
        "rest": parts["whole"][0] - made,
        "wall": wall,
        "load": os.getloadavg()[0],
        "found": step.graphs[0].graph is None,
        "eager": dict(step.reasons),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
