"""What every report shares: the head of its JSON, and the files it is written to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

RESULTS = Path(__file__).resolve().parent / "results"


def head(program: str, arguments: Sequence[str], device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Say how and on what a report was made."""
    return {
        "command": " ".join([f"python -m {program}", *arguments]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "quick": quick,
        "machine": machine.describe(device),
    }


def stem(kind: str, device: torch.device, *, quick: bool) -> str:
    """The name of a report's files."""
    return f"{kind}-{device.type}{'-quick' if quick else ''}"


def write(folder: Path, name: str, report: dict[str, Any], text: str) -> Path:
    """Write a report as JSON and as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return folder / name
