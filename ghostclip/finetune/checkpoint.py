"""Resume points: everything an interrupted run needs to go on, written atomically between two private steps.

Privacy:
    The folder ``resume`` holds exact losses, a hash of the data, and the keys of noise and sampling, so it is as
    secret as the data. It is removed when the run is done. After a stop between two steps noise and sampling go on
    where they were. After a crash, when the ledger is ahead of the resume point, they start with *fresh* keys:
    replaying the noise of steps that were lost, on other batches, would let an observer of both subtract it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

import torch

from ghostclip.errors import ResumeError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.output import RESUME_FOLDER, RESUME_STATE, atomic_path, write_text
from ghostclip.privacy.digest import digest_of
from ghostclip.privacy.ledger_file import LedgerFile

_OPTIONS, _LEDGER, _DIGEST = "options.json", "ledger.txt", "digest"


@dataclass(kw_only=True)
class RunState:
    """What happened so far.

    ``losses`` and ``samples`` have one entry per step of the ledger; ``None`` where none is known.
    """

    seed: int
    fingerprint: str
    perplexity_before: float
    losses: list[float | None] = field(default_factory=list)
    samples: list[int | None] = field(default_factory=list)
    sessions: int = 1

    @property
    def step(self) -> int:
        """Private steps begun."""
        return len(self.losses)


@dataclass(frozen=True)
class TensorState:
    """The parts of a resume point that torch fills: nested dictionaries of tensors and numbers.

    ``secrets`` are the keys and positions of noise and sampling.
    """

    model: dict[str, object]
    optimizer: dict[str, object]
    accountant: dict[str, object]
    generators: dict[str, object]
    secrets: dict[str, dict[str, object]]


class ResumePoint:
    """The resume folder of one run: what was asked, the state between two steps, and the ledger of begun steps."""

    def __init__(self, output: Path) -> None:
        self.folder = output / RESUME_FOLDER

    @cached_property
    def ledger(self) -> LedgerFile:
        """The ledger on disk, with one release for each step that has begun."""
        return LedgerFile(self.folder / _LEDGER)

    def begin(self, options: FinetuneOptions) -> None:
        """Make the folder and write down what was asked, as the last act before the first resume point.

        Args:
            options: The run's options.
        """
        self.folder.mkdir(parents=True)
        self.ledger.lock()
        write_text(self.folder / _OPTIONS, json.dumps(options.recorded(), indent=2) + "\n")

    def recorded_options(self) -> dict[str, object]:
        """Read what was asked when the run began.

        Returns:
            Options by field name.

        Raises:
            ResumeError: There is no interrupted run here.
        """
        if not (self.folder / RESUME_STATE).is_file():
            raise ResumeError(f"{self.folder.parent}: holds no interrupted run (a finished run cannot be resumed)")
        try:
            recorded = json.loads((self.folder / _OPTIONS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResumeError(f"{self.folder / _OPTIONS}: cannot be read ({error})") from error
        if not isinstance(recorded, dict):
            raise ResumeError(f"{self.folder / _OPTIONS}: holds no options")
        return recorded

    def save(self, state: RunState, tensors: TensorState) -> None:
        """Replace the resume point.

        Args:
            state: What happened so far.
            tensors: Model, optimizer, accountant and generators.
        """
        parts = {field_.name: getattr(tensors, field_.name) for field_ in fields(TensorState)}
        content = {"run": asdict(state), "ledger": self.ledger.place(), **parts}
        with atomic_path(self.folder / RESUME_STATE) as temporary:
            torch.save({**content, _DIGEST: digest_of(content)}, temporary)

    def load(self) -> tuple[RunState, TensorState]:
        """Read the resume point, and count steps that were begun after it.

        A step that the ledger holds and the resume point does not may have been released before the crash. It stays
        spent: its place in ``losses`` is ``None``, and the run has that many steps less to go.

        Returns:
            The state, brought up to the ledger, and the tensors as they were saved.

        Raises:
            ResumeError: The file or the ledger is damaged or of another version, or the ledger is another run's.
        """
        path = self.folder / RESUME_STATE
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            digest = content.pop(_DIGEST)
            state = RunState(**content["run"])
            tensors = TensorState(**{field_.name: content[field_.name] for field_ in fields(TensorState)})
        except Exception as error:
            # Whatever torch stumbles over: a bit may have changed anywhere.
            raise ResumeError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
        if digest != digest_of(content):
            raise ResumeError(f"{path}: cannot be read (it is damaged, or was changed by hand)")
        self.ledger.require(content["ledger"])
        lost = max(0, len(self.ledger.entries) - state.step)
        state.losses += [None] * lost
        state.samples += [None] * lost
        state.sessions += 1
        return state, tensors

    def remove(self) -> None:
        """Delete the folder of a run that is done."""
        shutil.rmtree(self.folder)


def generator_states() -> dict[str, object]:
    """Read torch's global generators, which drive dropout.

    Returns:
        States by device.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_generators(states: dict[str, object]) -> None:
    """Put torch's global generators back, as far as the devices are the same.

    Args:
        states: What ``generator_states`` gave.
    """
    torch.set_rng_state(states["cpu"])  # type: ignore[arg-type]
    cuda = states["cuda"]
    if isinstance(cuda, list) and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
