"""Kill private trainings with SIGKILL and resume them: `python -m benchmarks.faults` writes kill-test.json and .md.

Each training runs in a process of its own, which is killed at random times and, every second time, at a random point of
a step (also between the halves of a line of the ledger, and before the line is on the disk), and started again. After
every kill the ledger must hold each release that was applied; at the end the model must equal that of a run that nobody
killed, bit for bit, and so must the account.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import head, machine_line, parser, table, write
from ghostclip import GraphStep, PrivacyEngine
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.graph import takeover
from ghostclip.graph.takeover import Compiled, CompiledRecord
from ghostclip.privacy import ledger_file
from ghostclip.privacy.ledger_file import LedgerFile
from tests.graph.at_once import at_once

# Where a process kills itself.
POINTS = (
    "before the ledger",
    "after the ledger",
    "after the update",
    "in a save",
    "between physical batches",
    "half a ledger line",
    "ledger line before fsync",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"max_grad_norm": 0.5},
    "adaptive": {"max_grad_norm": 0.5, "clipping": "adaptive"},
    "per_layer, ghost": {"max_grad_norm": 1.0, "clipping": "per_layer", "grad_sample_mode": "ghost"},
    "flat, graphs take over": {"max_grad_norm": 0.5, "criterion": nn.CrossEntropyLoss()},
}
# The release that graphs take over at, where they do, so that trainings can be compared.
_HAND_OVER = 60
_SAVE_EVERY = 4
# Steps that a process gets before it is killed: more than it needs to reach a save.
_REACH = 6
_DELTA = 1e-5
LastWord = Callable[[str], None]


class Training:
    """One process of a training: continues from the folder's checkpoint, and saves there every few steps."""

    def __init__(self, folder: Path, options: dict[str, Any], last_word: LastWord) -> None:
        self._folder, self._last_word = folder, last_word
        self._criterion: Any = None
        torch.manual_seed(5)
        data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))
        folder.mkdir(parents=True, exist_ok=True)
        self.engine = PrivacyEngine(ledger=folder / "ledger")
        private: Any = self.engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            **options,
        )
        self.model, self.optimizer, self.loader = private[0], private[1], private[-1]
        if "grad_sample_mode" not in options and "criterion" in options:
            self._criterion = private[2]
        if (folder / "run.pt").exists():
            self.engine.load_checkpoint(path=folder / "run.pt", module=self.model, optimizer=self.optimizer)
        self.optimizer.attach_step_hook(lambda _: last_word("before the ledger"))
        self.optimizer.attach_release_hook(lambda *_: last_word("after the ledger"))

    def save(self) -> None:
        """Write the checkpoint."""
        replace = Path.replace

        def interrupted(path: Path, target: Path) -> Path:
            self._last_word("in a save")
            return replace(path, target)

        Path.replace = interrupted  # type: ignore[method-assign,assignment]
        try:
            self.engine.save_checkpoint(path=self._folder / "run.pt", module=self.model, optimizer=self.optimizer)
        finally:
            Path.replace = replace  # type: ignore[method-assign]

    def run(self, steps: int) -> None:
        """Train until so many steps were released, counted from the very beginning."""
        while self.optimizer.releases < steps:
            with BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=5, optimizer=self.optimizer
            ) as batches:
                for inputs, targets in batches:
                    self._step(inputs, targets)
                    if self.optimizer.last_step_was_virtual:
                        self._last_word("between physical batches")
                        continue
                    self._applied()
                    if self.optimizer.releases >= steps:
                        break

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if self._criterion is None:
            losses_B = nn.functional.cross_entropy(self.model(inputs), targets, reduction="none")
            self.optimizer.clipper.backward(losses_B)
        else:
            self._criterion(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _applied(self) -> None:
        number = self.optimizer.releases - 1
        with (self._folder / "applied").open("a") as file:
            file.write(f"{number}\n")
        self._last_word("after the update")
        if self.optimizer.releases % _SAVE_EVERY == 0:
            self.save()

    def outcome(self) -> dict[str, Any]:
        """Return what must not depend on kills."""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        moments = self.optimizer.state_dict()["state"]
        for state in moments.values():
            digest.update(b"".join(value.numpy().tobytes() for value in state.values()))
        accountant, compiled = self.engine.accountant, self.optimizer.compiled.known
        return {
            "compiled since": None if compiled is None else compiled.since,
            "sha256": digest.hexdigest(),
            "steps": len(accountant),
            "epsilon": accountant.get_epsilon(_DELTA),
            "bound": self.optimizer.max_grad_norm,
        }


@dataclass
class Killed:
    """One training that was killed, and what was seen."""

    options: str
    kills: int = 0
    kills_at_points: dict[str, int] = field(default_factory=dict)
    lost_steps: int = 0
    kills_between_ledger_and_update: int = 0
    ledger_below_released: int = 0
    equal: bool = False
    epsilon: float = 0.0
    points: list[str] = field(default_factory=list)


def _in_child(work: Callable[[], None], *, kill_after: float | None = None) -> bool:
    """Run something in a forked process, perhaps kill it; return whether it came to its end."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            warnings.simplefilter("ignore")
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - the parent is told by the exit status
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status != 0:
        raise RuntimeError("the training failed by itself; see the error above.")
    return True


def _train_in(folder: Path, name: str, steps: int, last_word: LastWord) -> Callable[[], None]:
    def work() -> None:
        _watch_ledger(last_word)
        training = Training(folder, OPTIONS[name], last_word)
        training.run(steps)
        (folder / "outcome").write_text(json.dumps(training.outcome()))

    return work


def _watch_ledger(last_word: LastWord) -> None:
    """Write this process's ledger lines in halves, and say so between them and before they are on the disk."""
    whole = ledger_file._write_all

    def in_halves(file: IO[bytes], line: bytes, *, at: int) -> None:
        half = len(line) // 2
        whole(file, line[:half], at=at)
        last_word("half a ledger line")
        whole(file, line[half:], at=at + half)
        last_word("ledger line before fsync")

    ledger_file._write_all = in_halves


def _start(folder: Path, name: str) -> None:
    """Write the checkpoint that the undisturbed and the killed run both begin with: the same keys, no step."""
    Training(folder, OPTIONS[name], lambda _: None).save()


def _look(folder: Path, seen: Killed) -> None:
    """Compare the ledger with what was applied."""
    applied_file, ledger_file = folder / "applied", folder / "ledger"
    lines = applied_file.read_text().split("\n")[:-1] if applied_file.exists() else []
    applied = {int(line) for line in lines}
    entries = LedgerFile(ledger_file).entries if ledger_file.exists() else []
    written = {entry.number for entry in entries}
    seen.ledger_below_released += len(applied - written)
    seen.kills_between_ledger_and_update += len(written) > len(applied)
    if (folder / "run.pt").exists():
        saved = torch.load(folder / "run.pt", weights_only=True)["ghostclip_releases"]
        seen.lost_steps += max(0, len(applied) - saved)


def _dies_at(point: str, after: int) -> LastWord:
    reached = 0

    def last_word(here: str) -> None:
        nonlocal reached
        reached += here == point
        if here == point and reached > after:
            os.kill(os.getpid(), signal.SIGKILL)

    return last_word


def kill_one_training(name: str, steps: int, kills: int, chance: random.Random, *, at_points: bool) -> Killed:
    """Run a training once undisturbed and once with kills."""
    seen = Killed(name)
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place, "whole"), Path(place, "killed")
        whole.mkdir()
        _in_child(lambda: _start(whole, name))
        shutil.copytree(whole, killed)
        startup = _seconds(_train_in(killed, name, 0, lambda _: None))
        length = _seconds(_train_in(whole, name, steps, lambda _: None))
        reach = startup + _REACH * (length - startup) / steps
        finished = False
        while not finished and seen.kills < kills:
            if at_points:
                point: str | None = POINTS[seen.kills % len(POINTS)]
            else:
                point = chance.choice(POINTS) if seen.kills % 2 else None
            # At the latest after so many steps, so that no training ends before it was killed often enough.
            after = chance.randrange(3 if at_points else _REACH) if point else _REACH
            last_word = _dies_at(point or "after the update", after)
            delay = None if point else chance.uniform(0.0, reach)
            finished = _in_child(_train_in(killed, name, steps, last_word), kill_after=delay)
            if not finished:
                seen.kills += 1
                where = point or f"at a random time, {_REACH + 1} steps after the start at the latest"
                seen.kills_at_points[where] = seen.kills_at_points.get(where, 0) + 1
                seen.points.append(point or f"{delay:.3f} s")
            _look(killed, seen)
        if not finished:
            _in_child(_train_in(killed, name, steps, lambda _: None))
        first, second = (json.loads((folder / "outcome").read_text()) for folder in (whole, killed))
        seen.equal, seen.epsilon = first == second, second["epsilon"]
    return seen


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    _in_child(work)
    return time.perf_counter() - began


def _hand_over_early() -> None:
    """Let graphs take over in a short process, at one release; nothing is compiled, and a dict is the disk."""
    at_once(setattr)
    note, take_sizes = CompiledRecord.record, GraphStep.take_sizes

    def noted(record: CompiledRecord, compiled: Compiled) -> None:
        note(record, replace(compiled, since=max(_HAND_OVER, compiled.since)))

    for name in ("_RECENT", "_FIRST", "_TIMED"):
        setattr(takeover, name, 2)
    takeover._OF_ONE_FORM = 0.0
    CompiledRecord.record = noted  # type: ignore[method-assign]
    GraphStep.take_sizes = lambda step, sizes, keys=(), branches=None: take_sizes(step, (5, 2), keys, branches)  # type: ignore[method-assign]


def _warm_up() -> None:
    """Do once, before any process is forked, what torch does at its first step only, and what is compiled."""
    _hand_over_early()
    with tempfile.TemporaryDirectory() as place:
        name = next(reversed(OPTIONS))
        graphs = Training(Path(place), OPTIONS[name], lambda _: None)
        graphs.run(_HAND_OVER + 2)
        if graphs.outcome()["compiled since"] != _HAND_OVER:
            raise RuntimeError(f"graphs have not taken over: {graphs.model.deferral.step.takeover.why}")
    with tempfile.TemporaryDirectory() as place:
        training = Training(Path(place), OPTIONS["flat"], lambda _: None)
        training.run(2)
        training.save()
        training.outcome()


def _markdown(record: dict[str, Any]) -> str:
    trainings = record["trainings"]
    counts = ("kills", "lost_steps", "kills_between_ledger_and_update", "ledger_below_released")
    rows = [
        [t["options"], *(t[name] for name in counts), "yes" if t["equal"] else "**no**", f"{t['epsilon']:.4f}"]
        for t in trainings
    ]
    points: Counter[str] = Counter()
    for training in trainings:
        points.update(training["kills_at_points"])
    lines = ["| training | kills | steps made again | ledger ahead of the update | released, not in the ledger | "
             "equal to the undisturbed run | ε |", "|---|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    return "\n".join([
        f"`{record['command']}` on {machine_line(record)}\n",
        f"{sum(t['kills'] for t in trainings)} kills over {len(trainings)} trainings of {record['steps']} steps.\n",
        *lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), "",
        table("killed | times", sorted(points.items())),
    ])  # fmt: skip


def _options() -> argparse.Namespace:
    options = parser("benchmarks.faults", __doc__)
    options.add_argument("--kills", type=int, default=500, help="kill so often (default: %(default)s)")
    options.add_argument("--steps", type=int, default=800, help="length of each training (default: %(default)s)")
    options.add_argument("--seed", type=int, default=1, help="of the times of the kills (default: %(default)s)")
    options.add_argument("--points", action="store_true", help="kill at each point of a step, not at random times")
    return options.parse_args()


def main() -> int:
    """Kill trainings until there were enough kills."""
    options = _options()
    os.nice(19)
    torch.set_num_threads(1)
    chance, trainings = random.Random(options.seed), []
    names = list(OPTIONS)
    most = options.kills if options.points else -(-options.kills // len(names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _warm_up()
    while sum(seen.kills for seen in trainings) < options.kills:
        most = min(most, options.kills - sum(seen.kills for seen in trainings))
        name = names[len(trainings) % len(names)]
        trainings.append(kill_one_training(name, options.steps, most, chance, at_points=options.points))
        print(json.dumps(asdict(trainings[-1])), flush=True)
    record = head("benchmarks.faults", None)
    record |= {"steps": options.steps, "trainings": [asdict(seen) for seen in trainings]}
    write(options.out, "kill-test", record, _markdown(record))
    good = all(seen.equal and not seen.ledger_below_released for seen in trainings)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
