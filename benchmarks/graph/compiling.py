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
from typing import Any

import torch

import ghostclip
from benchmarks.graph.speed import token_losses
from benchmarks.memory import in_new_process
from benchmarks.models import GPT

WIDTH, POSITIONS, SAMPLES, VOCABULARY = 768, 128, 4, 5000
RUNS = ("nothing in the cache", "the cache of the run before")


def measure() -> list[dict[str, Any]]:
    """Run both.

    Returns:
        Plain values of each run.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return [{"name": name, **in_new_process("benchmarks.graph.compiling", [])} for name in RUNS]


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown.

    Args:
        report: What was measured.

    Returns:
        The page.
    """
    lines = [
        "# The private step as one graph: until the first step",
        "",
        f"`{report['command']}`, {report['date']}: {report['machine']['cpu']}, torch "
        f"{report['machine']['versions']['torch']}, float32. A GPT of 12 layers, width {WIDTH}, {POSITIONS} positions, "
        f"vocabulary {VOCABULARY}, {SAMPLES} samples: seconds until its first private step is done, the eager step "
        "that it is held against among them; CPU time is that of the process and of the compilers that it starts.",
        "",
        "| run | traced and rewritten (s) | compiled (s) | whole first step (s) | CPU time (s) | operations "
        "| cache hits |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        if "process_problem" in row:
            lines.append(f"| {row['name']} | {row['process_problem']} | | | | | |")
            continue
        seconds = " | ".join(f"{row[key]:.0f}" for key in ("traced_s", "compiled_s", "first_s", "cpu_s"))
        lines.append(f"| {row['name']} | {seconds} | {row['operations']} | {row['hits']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure in this process, and print one line of JSON."""
    argparse.ArgumentParser(prog="python -m benchmarks.graph.compiling", description=main.__doc__).parse_args()
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=WIDTH, heads=12, layers=12, positions=POSITIONS)
    ids = torch.randint(VOCABULARY, (SAMPLES, POSITIONS))
    taken: list[float] = []

    class Timed(ghostclip.GraphOptions):
        def compiled(self, graph: Any, inputs: Any) -> Any:
            begun = time.perf_counter()
            found = super().compiled(graph, inputs)
            taken.append(time.perf_counter() - begun)
            return found

    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph")
    step = ghostclip.GraphStep(clipper, token_losses, options=Timed())
    begun, eager = time.perf_counter(), []
    original = step._eager
    step._eager = lambda tree: (eager.append(time.perf_counter()), original(tree))[1]  # type: ignore[method-assign]
    step(ids)
    first = time.perf_counter() - begun
    from torch._dynamo.utils import counters

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(
        json.dumps(
            {
                "traced_s": eager[0] - begun - taken[0],
                "compiled_s": taken[0],
                "first_s": first,
                "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
                "operations": len(step.graphs[0].graph.graph.nodes),
                "hits": hits,
                "eager": dict(step.reasons),
            }
        )
    )


if __name__ == "__main__":
    main()
