"""What a run is, and what an interrupted one goes on from: the engine's checkpoint and ledger, in one folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ghostclip.errors import ResumeError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import RESUME_FOLDER, RESUME_STATE
from ghostclip.finetune.privacy import Mechanism
from ghostclip.finetune.ranks import Ranks
from ghostclip.finetune.samples import Split
from ghostclip.finetune.tokens import TokenEncoder
from ghostclip.privacy import checkpoints
from ghostclip.privacy.ledger_file import LedgerFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ghostclip.scaling import Mesh

_OPTIONS, _STATE = "finetune_options", "finetune_state"


@dataclass(kw_only=True)
class RunState:
    """State of a run between two steps.

    ``before`` is the held-out quality of the initial weights. ``losses`` and ``samples`` have one entry per step of
    the ledger; ``None`` where none is known.
    """

    seed: int
    fingerprint: str
    before: dict[str, float | None]
    losses: list[float | None] = field(default_factory=list)
    samples: list[int | None] = field(default_factory=list)
    sessions: int = 1

    @property
    def step(self) -> int:
        """Private steps begun."""
        return len(self.losses)


class Interrupted(NamedTuple):
    """An interrupted run: the options it was begun with, its state up to the ledger, and the steps that were lost."""

    options: dict[str, object]
    state: RunState
    lost: int


class ResumePoint(NamedTuple):
    """The files that an interrupted run goes on from: the engine's checkpoint with the run's entries, its ledger."""

    path: Path
    ledger: Path

    @classmethod
    def of(cls, output: Path) -> ResumePoint:
        """Return the resume point of an output folder, whether there is one or not."""
        folder = output / RESUME_FOLDER
        return cls(folder / RESUME_STATE, folder / "ledger.txt")

    def load(self) -> Interrupted:
        """Read the run's own entries, and count steps that were begun after they were saved.

        A step that the ledger holds and the checkpoint does not may have been released before the crash. It stays
        spent: its place in ``losses`` is ``None``, and the run has that many steps less to go.
        """
        if not self.path.is_file():
            raise ResumeError(f"{self.path.parent.parent}: holds no interrupted run (a finished run cannot be resumed)")
        content = checkpoints.load(self.path, {"map_location": "cpu"})
        if _OPTIONS not in content or _STATE not in content:
            raise ResumeError(f"{self.path}: a checkpoint that ghostclip finetune did not write")
        ledger, state = LedgerFile(self.ledger), RunState(**content[_STATE])
        ledger.require(content[checkpoints.LEDGER])
        lost = max(0, len(ledger.entries) - state.step)
        state.losses += [None] * lost
        state.samples += [None] * lost
        state.sessions += 1
        return Interrupted(content[_OPTIONS], state, lost)


@dataclass(frozen=True, kw_only=True)
class FinetuneRun:
    """A run that can begin: everything is loaded and checked, nothing is written.

    ``data`` names the source of the samples and counts them, for record and report; ``config`` is the model's own.
    ``lost`` counts the steps that the ledger holds and the checkpoint does not; it is None for a new run.
    """

    options: FinetuneOptions
    output: Path
    device: torch.device
    tokens: TokenEncoder
    split: Split
    data: dict[str, Any]
    model: PreTrainedModel
    model_text: str
    config: dict[str, Any]
    physical_batch: int
    ranks: Ranks
    mesh: Mesh
    mechanism: Mechanism
    warnings: tuple[str, ...]
    state: RunState
    lost: int | None

    @property
    def unfinished(self) -> bool:
        """Whether steps are left."""
        return self.state.step < self.mechanism.steps

    def entries(self) -> dict[str, Any]:
        """Return the run's own entries of a checkpoint."""
        return {_OPTIONS: self.options.recorded(), _STATE: asdict(self.state)}
