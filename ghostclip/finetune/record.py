"""The JSON record of a run: what was asked, what was done, what it cost, and what the numbers hold under."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import ghostclip
from ghostclip._files import write_text
from ghostclip.finetune.checkpoint import RunState
from ghostclip.finetune.comparison import seconds_per_step
from ghostclip.finetune.losses import Quality
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.privacy import ACCOUNTANT, Mechanism
from ghostclip.finetune.steps import StepMeasures

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Source of the samples; counts of passages, and of the longest document's."""

    source: str
    tokens: str
    documents: int
    training: int
    held_out: int
    evaluated: int
    most_per_document: int
    passage_length: int
    unit: str = "passage"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that report, plot and record are made from.

    ``epsilon`` is the guarantee, ``epsilon_lower`` what no accountant could go below, ``summary`` what they mean,
    ``unchecked`` the checks that did not run.
    ``private`` are the private steps that ``ordinary`` ones are compared with; ``ordinary`` is None where none was
    taken.
    """

    options: FinetuneOptions
    output: Path
    data: DataFacts
    model: str
    strategy: str
    device: str
    processes: int
    mechanism: Mechanism
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    state: RunState
    epsilon: float
    epsilon_lower: float
    summary: str
    unchecked: tuple[str, ...]
    after: Quality
    private: StepMeasures
    all_private: StepMeasures
    ordinary: StepMeasures | None
    ordinary_missing: str

    @property
    def before(self) -> Quality:
        """Held-out quality of the initial weights."""
        return Quality(**self.state.before)  # type: ignore[arg-type]

    @property
    def private_seconds(self) -> float | None:
        """Seconds of a private step of the expected batch size."""
        return seconds_per_step(self.private, self.mechanism.batch_size)

    @property
    def ordinary_seconds(self) -> float | None:
        """Seconds of an ordinary step of the same size."""
        return None if self.ordinary is None else seconds_per_step(self.ordinary, self.mechanism.batch_size)

    @property
    def is_private(self) -> bool:
        """Whether the noise was secret."""
        return self.options.unsafe_noise_seed is None


def write_record(outcome: Outcome, path: Path) -> None:
    """Write the record atomically.

    Privacy:
        It holds the exact training losses and batch sizes: it is for whoever may see the data.

    Args:
        outcome: The run.
        path: The JSON file.
    """
    write_text(path, json.dumps(as_json(outcome), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def as_json(outcome: Outcome) -> dict[str, object]:
    """Give the record as plain values.

    Args:
        outcome: The run.

    Returns:
        Nested dictionaries; a number that JSON cannot hold is None.
    """
    batch_size = outcome.mechanism.batch_size
    ordinary = None if outcome.ordinary is None else _cost(outcome.ordinary, outcome.ordinary_seconds)
    return {
        "schema": SCHEMA,
        "versions": {
            "ghostclip": ghostclip.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {**machine(outcome.device), "processes": outcome.processes},
        "options": outcome.options.recorded(),
        "seed": outcome.state.seed,
        "sessions": outcome.state.sessions,
        "data": asdict(outcome.data),
        "model": outcome.model,
        "strategy": outcome.strategy,
        "privacy": {
            "private": outcome.is_private,
            "epsilon": _finite(outcome.epsilon),
            "epsilon_lower_bound": _finite(outcome.epsilon_lower),
            "summary": outcome.summary,
            "accountant": ACCOUNTANT,
            "unit": outcome.data.unit,
            "steps_spent": outcome.state.step,
            **asdict(outcome.mechanism),
            "assumptions": list(outcome.assumptions),
            "warnings": list(outcome.warnings),
        },
        **_qualities(outcome),
        "cost": {
            "private": _cost(outcome.private, outcome.private_seconds),
            "ordinary": ordinary,
            "all_private": _cost(outcome.all_private, seconds_per_step(outcome.all_private, batch_size)),
            "ordinary_missing": outcome.ordinary_missing or None,
        },
        "not_private": {"losses": outcome.state.losses, "samples": outcome.state.samples},
    }


def _qualities(outcome: Outcome) -> dict[str, object]:
    before, after = outcome.before, outcome.after
    if after.accuracy is None:
        return {"held_out_perplexity": {"before": _finite(before.perplexity), "after": _finite(after.perplexity)}}
    return {
        "held_out_loss": {"before": _finite(before.loss), "after": _finite(after.loss)},
        "held_out_accuracy": {"before": before.accuracy, "after": after.accuracy},
    }


def machine(device: str) -> dict[str, object]:
    """Describe what the run computed on.

    Args:
        device: The device's name for torch.

    Returns:
        Plain values.
    """
    facts: dict[str, object] = {
        "device": device,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def _cost(measures: StepMeasures, seconds: float | None) -> dict[str, object]:
    return {
        "seconds_per_step": seconds,
        "timed_steps": len(measures.timed),
        "peak_bytes_above_weights_and_optimizer": measures.peak_bytes,
        "physical_batch": measures.physical_batch,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
