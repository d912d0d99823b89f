"""Resume points of a run: a checkpoint of the engine with the run's own entries, beside the engine's ledger.

Privacy:
    The folder ``resume`` holds exact losses, a hash of the data, and the keys of noise and sampling, so it is as
    secret as the data. It is removed when the run is done. After a stop between two steps noise and sampling go on
    where they were. After a crash, when the ledger is ahead of the checkpoint, they start with *fresh* keys: a step
    that was lost need not come out the same again, and the same noise must not hide two different sums.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ghostclip.errors import ResumeError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import RESUME_FOLDER, RESUME_STATE
from ghostclip.privacy import checkpoints
from ghostclip.privacy.ledger_file import LedgerFile

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


@dataclass(frozen=True)
class Interrupted:
    """An interrupted run: the options it was begun with, its state up to the ledger, and the steps that were lost."""

    options: dict[str, object]
    state: RunState
    lost: int


@dataclass(frozen=True)
class ResumePoint:
    """The files that an interrupted run goes on from.

    ``path`` is the engine's checkpoint, ``ledger`` the engine's ledger.
    """

    path: Path
    ledger: Path

    @classmethod
    def of(cls, output: Path) -> ResumePoint:
        """Return the resume point of an output folder.

        Args:
            output: The folder.

        Returns:
            Its resume point, whether there is one or not.
        """
        folder = output / RESUME_FOLDER
        return cls(folder / RESUME_STATE, folder / "ledger.txt")

    def entries(self, options: FinetuneOptions, state: RunState) -> dict[str, Any]:
        """Return the run's own entries of the checkpoint.

        Args:
            options: The run's options.
            state: What happened so far.

        Returns:
            What ``save_checkpoint`` takes as ``checkpoint_dict``.
        """
        return {_OPTIONS: options.recorded(), _STATE: asdict(state)}

    def load(self) -> Interrupted:
        """Read the run's own entries, and count steps that were begun after they were saved.

        A step that the ledger holds and the checkpoint does not may have been released before the crash. It stays
        spent: its place in ``losses`` is ``None``, and the run has that many steps less to go.

        Returns:
            The interrupted run.

        Raises:
            ResumeError: There is none, a file is damaged or of another version, or the ledger is another run's.
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
