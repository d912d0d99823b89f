"""The stages, in the order of what they decide, and the share of the time that each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from ghostclip.kernels import runtime

# Ways to train a large model beside ordinary training, the most important first.
DEFAULT = "bookkeeping"
WAYS = ("nonprivate", "bookkeeping", "ghost", "compiled", "opacus-ghost")


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
        name: What it is called where it does not end by itself.
        arguments: Of Python.
        seconds: Its own limit.
        writes_rows: Whether it takes `--rows`; otherwise its last line and exit status are its only row.
        good: Exit statuses that are no failure, where it writes no rows.
        environment: Added to this process's.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    writes_rows: bool = True
    good: tuple[int, ...] = (0,)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Jobs that answer one question.

    Attributes:
        name: Short name.
        title: The question.
        jobs: In order.
        share: Of the whole time, at most.
        decides: What the names of cases end with whose failure ends the run; None where nothing does.
    """

    name: str
    title: str
    jobs: tuple[Job, ...]
    share: float
    decides: str | None = None


def stages(device: torch.device, *, quick: bool) -> list[Stage]:
    """What is run."""
    shared = ("--device", str(device), *(["--quick"] if quick else []))
    # Without a GPU, kernels can be interpreted where they are small.
    interpreted = {"TRITON_INTERPRET": "1"} if device.type != "cuda" and runtime.installed() else {}

    def job(module: str, name: str, seconds: float, *own: str, environment: Mapping[str, str] | None = None) -> Job:
        arguments = ("-m", f"benchmarks.gpu.{module}", *shared, *own)
        return Job(name, arguments, seconds, environment=environment or {})

    def way(case: str, engine: str, kernels: str = "off") -> Job:
        options = ("--case", case, "--engine", engine, "--kernels", kernels)
        return job("large", f"{case}: {engine} kernels {kernels}", 45.0, *options)

    gpt2 = (
        *(way("gpt2-large", engine) for engine in WAYS[:2]),
        way("gpt2-large", DEFAULT, "auto"),
        *(way("gpt2-large", engine) for engine in WAYS[2:]),
    )
    llama = (
        *(way("llama-1b", engine) for engine in WAYS[:2]),
        way("llama-1b", "bookkeeping", "auto"),
        *(way("llama-1b", engine) for engine in WAYS[2:] if not quick),
    )
    # One line a test, so that the log of a run that is cut short says which failed.
    tests = (
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "--device",
        str(device),
        "-m",
        "(gpu or cuda) and not slow and not thorough",
    )
    tests += ("-p", "no:cacheprovider", *(["tests/exactness/test_clipped_sums.py", "-k", "linear_3d"] if quick else []))
    # pytest's 5: nothing was selected.
    last = (Job("tests marked gpu", tests, 600.0, writes_rows=False, good=(0, 5)),) if find_spec("pytest") else ()
    return [
        Stage(
            "agreement", "Does it run, and agree with float64?", (job("agreement", "agreement", 600.0),), 1 / 8, DEFAULT
        ),
        Stage("products", "Which products?", (job("products", "products", 600.0),), 0.5 / 8),
        Stage("twins", "Which kernels?", (job("twins", "twins", 600.0, environment=interpreted),), 1.34 / 8),
        Stage("gpt2-large", "GPT-2 large: time and memory", gpt2, 1.9 / 8),
        Stage("llama-1b", "Llama 1B: time and memory", llama, 1.9 / 8),
        Stage(
            "graph",
            "The step as one graph",
            tuple(job("graph", f"graph: {case}", 120.0, "--case", case) for case in ("mnist-cnn", "gpt2-large")),
            1.3 / 8,
        ),
        Stage(
            "rest", "Where does the time go?", (job("one_step", "one step", 90.0, "--case", "gpt2-large"), *last), 1.0
        ),
    ]
