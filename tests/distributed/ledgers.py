"""What each of two ranks does with a ledger that they share, or must not share."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.data import DPDataLoader
from ghostclip.errors import ResumeError
from ghostclip.privacy.ledger_file import Entry, LedgerFile
from tests.distributed import said_by
from tests.distributed.loops import data, model, snapshot
from tests.distributed.refusals import outcome
from tests.private_run import PrivateRun
from tests.process_group import process_group

BATCH, SIGMA, DELTA = 7, 1.0, 1e-3
FAILURES = {
    "disk full": ("ghostclip.privacy.ledger_file._to_disk", 0, OSError("No space left on device")),
    "release of rank 1": ("ghostclip.privacy.account.fingerprint", 1, MemoryError("out of memory")),
}
"""What fails in a release, on which rank, and how."""


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[None]:
    """Lay the files that ranks find; hold the ledger of another training until they are done.

    Args:
        folder: Where the ranks work; each has a folder of its own in it, from which paths are relative.

    Yields:
        Nothing.
    """
    for rank in range(2):
        (folder / f"at{rank}").mkdir()
    _written(folder / "damaged")
    for path in (folder / "damaged", folder / "at0" / "damaged first", folder / "at1" / "damaged second"):
        _written(path)
        path.write_bytes(path.read_bytes().replace(b"print", b"prinz"))
    _written(folder / "at0" / "damaged second")
    _written(folder / "at0" / "apart")
    _written(folder / "at1" / "apart", count=5)
    held = LedgerFile(folder / "held")
    held.lock()
    yield
    held.close()


def _written(path: Path, *, count: int = 2) -> None:
    ledger = LedgerFile(path)
    for number in range(count):
        ledger.append(Entry(f"run of {path.parent.name}", number, ((SIGMA, BATCH / len(data()), 1),), "print"))
    ledger.close()


class Run(PrivateRun):
    """A private training on this rank.

    Args:
        ledger: The path of its ledger.
        engine: Another engine than one of its own.
        alone: Whether this rank trains apart from the others.
    """

    def __init__(self, ledger: Any, *, engine: PrivacyEngine | None = None, alone: bool = False) -> None:
        loader: Any = DataLoader(data(), batch_size=BATCH)
        loader = DPDataLoader.from_data_loader(loader, distributed=False) if alone else loader
        super().__init__(
            data(), model=model(), engine=engine, ledger=ledger, sigma=SIGMA, max_grad_norm=0.5, data_loader=loader
        )
        self.net, self.trained = self.bare, self.model

    def steps(self, count: int) -> None:
        """Make steps.

        Args:
            count: How many.

        Raises:
            GhostClipError: If one is refused.
            OSError: If one fails.
        """
        for _, (_, x, y) in zip(range(count), self.loader, strict=False):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.trained(x), y).backward()
            before = snapshot(self.net)
            try:
                self.optimizer.step()
            except Exception:
                assert all(torch.equal(before[name], p) for name, p in snapshot(self.net).items()), "released"
                assert all(p.grad is None for p in self.net.parameters()), "released"
                raise

    def state(self) -> dict[str, Any]:
        """What all ranks must have in common."""
        return {
            "epsilon": self.engine.get_epsilon(DELTA),
            "history": list(self.engine.accountant.history),
            "place": self.engine._account.ledger_position(),
            "parameters": snapshot(self.net),
        }


def run(rank: int, ranks: int, folder: str) -> None:
    """Be one rank.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.chdir(Path(folder) / f"at{rank}")
    place = Path(folder)
    early = PrivacyEngine(ledger=place / "early")
    with process_group(rank, ranks, folder):
        found: dict[str, Any] = {
            "trained": _trained(rank, place),
            "early": _state_after(lambda: Run(None, engine=early), 2),
            "elsewhere": _state_after(lambda: Run("apart"), 1),
            "damaged second": _state_after(lambda: Run("damaged second"), 1),
        }
        found["resumed"] = _resumed(rank, place)
        found["taken over"] = _taken_over(rank, place)
        found["failures"] = {name: _failing(rank, place / name, name) for name in FAILURES}
        tries = _refused(rank, place)
        found["refused"] = {name: outcome(attempt) for name, attempt in tries.items()}
        last = LedgerFile(place / "last")
        last.share(fresh=True)
        last.append(Entry("run", 0, ((SIGMA, 0.1, 1),), "print"))
    found["group is gone"] = said_by(lambda: last.append(Entry("run", 1, ((SIGMA, 0.1, 1),), "print")))
    torch.save(found, place / f"rank{rank}.pt")


def _state_after(made: Callable[[], Run], steps: int) -> dict[str, Any]:
    training = made()
    training.steps(steps)
    return training.state()


def _trained(rank: int, place: Path) -> dict[str, Any]:
    """Train three steps, saving after the second."""
    training = Run(place / "ledger")
    training.steps(2)
    training.save(place / f"checkpoint{rank}")
    with mock.patch("torch.save", side_effect=partial(_save_and_meet, torch.save)):
        training.save(place / "checkpoint of both")
    training.steps(1)
    training.engine.close()
    return training.state()


def _save_and_meet(save: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    save(*arguments, **options)
    distributed.barrier()


def _resumed(rank: int, place: Path) -> dict[str, Any]:
    """Continue from the other rank's checkpoint: the third step is made again, the fourth is new."""
    training = Run(place / "ledger")
    at_once = training.state()["history"]
    training.load(place / f"checkpoint{1 - rank}")
    training.steps(1)
    again = training.state()
    # The next line opens the file anew.
    training.engine.close()
    training.steps(1)
    return {"at once": at_once, "again": again, "after": training.state()}


def _taken_over(rank: int, place: Path) -> dict[str, Any]:
    """Continue what began without a ledger."""
    begun = Run(None)
    begun.steps(2)
    begun.save(place / f"without ledger{rank}")
    training = Run(place / "taken over")
    training.load(place / f"without ledger{rank}")
    training.steps(1)
    return training.state()


def _failing(rank: int, path: Path, name: str) -> dict[str, Any]:
    """Let the second of three releases fail on one rank."""
    where, failing, error = FAILURES[name]
    training = Run(path)
    training.steps(1)
    with mock.patch(where, side_effect=error) if rank == failing else contextlib.nullcontext():
        told = outcome(lambda: training.steps(1))
    held = training.state()["history"]
    training.steps(1)
    return {"told": told, "held": held, "after": training.state()}


def _refused(rank: int, place: Path) -> dict[str, Callable[[], Any]]:
    def again(*, changed: bool) -> None:
        training = Run(place / "again")
        training.steps(1)
        training.save(place / f"begun{rank}")
        training.steps(1)
        training.engine.close()
        resumed = Run(place / "again")
        resumed.load(place / f"begun{rank}")
        with (
            mock.patch("ghostclip.privacy.account.fingerprint", return_value="other")
            if changed
            else contextlib.nullcontext()
        ):
            resumed.steps(1)

    def two_trainings() -> None:
        with _one_after_the_other(rank):
            training = Run(place / "alone", alone=True)
            training.steps(1)

    def then_alone() -> None:
        training = Run(place / "then alone")
        training.steps(1)
        Run(None, engine=training.engine, alone=True)

    def loaded_before() -> None:
        training = Run(None)
        training.steps(1)
        training.save(place / f"without{rank}")
        engine = PrivacyEngine(ledger="loaded before")
        engine.load_checkpoint(path=place / f"without{rank}", module=model())
        with contextlib.suppress(ResumeError):
            Run(None, engine=engine)
        Run(None, engine=engine)

    return {
        "held by another training": lambda: Run(place / "held"),
        "damaged": lambda: Run(place / "damaged"),
        "damaged first": lambda: Run("damaged first"),
        "folder": lambda: Run(place / "at0"),
        "another path": lambda: Run(place / f"path{rank}"),
        "on one only": lambda: Run(place / "one" if rank else None),
        "made again": lambda: again(changed=False),
        "made again otherwise": lambda: again(changed=rank == 1),
        "alone afterwards": then_alone,
        "two trainings": two_trainings,
        "loaded before": loaded_before,
    }


@contextlib.contextmanager
def _one_after_the_other(rank: int) -> Iterator[None]:
    """Let rank 0 go first, and keep what it has until rank 1 is done."""
    if rank == 1:
        distributed.barrier()
    try:
        yield
    finally:
        for _ in range(2 - rank):
            distributed.barrier()
