"""Damage the ledger and the checkpoint of a private training: `python -m benchmarks.corruptions` writes corruptions.md.

A training is saved after its last step. Then one of its files is damaged in a random place, and a new engine tries to
continue from both. It has to refuse, by an error of this package and with nothing changed; or the damage has to be
harmless: the account is not below what was released, and everything that was loaded is what was saved.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import head, machine_line, parser, table, write
from ghostclip import PrivacyEngine
from ghostclip.errors import GhostClipError
from ghostclip.optim.wrapped import ACCOUNT_KEY
from ghostclip.privacy.checkpoints import digest_of

_DELTA, _STEPS = 1e-5, 9
Damage = Callable[[bytes, bytes, random.Random], bytes]


class Training:
    """A small private training in a folder; made anew, it is the one that continues."""

    def __init__(self, folder: Path, *, sigma: float = 1.0) -> None:
        self.folder = folder
        data = TensorDataset(torch.linspace(-1, 1, 40 * 3).reshape(40, 3), torch.arange(40) % 2)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        folder.mkdir(parents=True, exist_ok=True)
        self.engine = PrivacyEngine(ledger=folder / "ledger")
        private: Any = self.engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            clipping="adaptive",
        )
        self.model, self.optimizer, self.loader = private

    def run(self) -> Training:
        """Train and save: a checkpoint of the engine's, and what a trainer saves."""
        while self.optimizer.releases < _STEPS:
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(inputs), targets).backward()
                self.optimizer.step()
                if self.optimizer.releases == _STEPS:
                    break
        self.engine.save_checkpoint(path=self.folder / "run.pt", module=self.model, optimizer=self.optimizer)
        text = self.optimizer.state_dict()["param_groups"][0][ACCOUNT_KEY]
        (self.folder / "account").write_text(text)
        self.engine.close()
        return self

    def load(self, file: str) -> None:
        """Continue from what was saved."""
        if file == "account":
            state = self.optimizer.state_dict()
            state["param_groups"][0][ACCOUNT_KEY] = (self.folder / "account").read_text(errors="replace")
            self.optimizer.load_state_dict(state)
        else:
            self.engine.load_checkpoint(path=self.folder / "run.pt", module=self.model, optimizer=self.optimizer)

    def state(self, *, account: bool = True) -> str:
        """Return a digest of everything that loading changes."""
        accountant = self.engine.accountant.state_dict() if account else {}
        inner = self.optimizer.original_optimizer.state_dict()
        positions = [self.optimizer.noise_source.state_dict(), self.loader.state_dict(), self.optimizer.releases]
        values = [self.optimizer.noise_multiplier, self.optimizer.max_grad_norm, torch.get_rng_state()]
        model = dict(self.model.state_dict())
        return digest_of({"all": [model, inner, dict(accountant), positions, values]})


def _flip(content: bytes, _: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def _delete(content: bytes, _: bytes, chance: random.Random) -> bytes:
    place, length = chance.randrange(len(content)), chance.choice((1, 1, 2, 30))
    return content[:place] + content[place + length :]


def _insert(content: bytes, _: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + chance.randbytes(chance.choice((1, 7))) + content[place:]


def _zero(content: bytes, _: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content))
    stop = min(len(content), start + chance.choice((8, 64, 512, 4096)))
    return content[:start] + bytes(stop - start) + content[stop:]


def _overwrite(content: bytes, _: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content))
    noise = chance.randbytes(min(len(content) - start, chance.choice((4, 100))))
    return content[:start] + noise + content[start + len(noise) :]


def _cut(content: bytes, _: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, len(content))]


def _append(content: bytes, _: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.choice((1, 20, 200))) + chance.choice((b"", b"\n"))


def _empty(_: bytes, __: bytes, ___: random.Random) -> bytes:
    return b""


def _foreign(_: bytes, foreign: bytes, __: random.Random) -> bytes:
    return foreign


def _line_out(content: bytes, _: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def _lines_cut(content: bytes, _: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: chance.randrange(1, len(lines))])


def _line_twice(content: bytes, _: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return b"".join(lines)


def _lines_swapped(content: bytes, _: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    one, two = chance.sample(range(len(lines)), 2)
    lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def _foreign_line(content: bytes, foreign: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(foreign.splitlines(keepends=True)))
    return b"".join(lines)


ANYWHERE: dict[str, Damage] = {
    "a bit flipped": _flip,
    "bytes deleted": _delete,
    "bytes inserted": _insert,
    "a range of zeros": _zero,
    "a range overwritten": _overwrite,
    "the end cut off": _cut,
    "garbage appended": _append,
    "emptied": _empty,
    "another training's file": _foreign,
}
OF_LINES: dict[str, Damage] = {
    "a line taken out": _line_out,
    "lines cut off": _lines_cut,
    "a line repeated": _line_twice,
    "two lines swapped": _lines_swapped,
    "another ledger's line": _foreign_line,
}
KINDS = [
    *(("ledger", name, damage) for name, damage in {**ANYWHERE, **OF_LINES}.items()),
    *(("run.pt", name, damage) for name, damage in ANYWHERE.items()),
    *(("account", name, damage) for name, damage in ANYWHERE.items()),
]
FILES = {"ledger": "ledger", "run.pt": "checkpoint", "account": "account in the optimizer's state"}


@dataclass
class Outcome:
    """What came of one damage."""

    file: str
    kind: str
    outcome: str
    """ "refused", "harmless", or what went wrong."""
    message: str = ""


class Corruptions:
    """A training, another one, and what continuing from them undamaged gives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        whole, foreign = folder / "whole", folder / "foreign"
        self._epsilon = Training(whole).run().engine.get_epsilon(_DELTA)
        # Less noise would show in ε, more noise would hide there.
        Training(foreign, sigma=20.0).run()
        self._loaded = {}
        for file in FILES:
            shutil.copytree(whole, folder / "try")
            self._loaded[file] = self._try(file).state(account=False)
            shutil.rmtree(folder / "try")

    def _try(self, file: str) -> Training:
        torch.manual_seed(1)
        training = Training(self._folder / "try")
        torch.manual_seed(2)
        self._before = ""
        # Fixed, so that what is drawn for a new training does not differ between trials.
        for source in (training.optimizer.noise_source, training.loader):
            source.load_state_dict({**source.state_dict(), "key": "ab" * 16})
        self._training, self._before = training, training.state()
        training.load(file)
        return training

    def one(self, file: str, kind: str, damage: Damage, chance: random.Random) -> Outcome:
        """Damage a file and try to continue."""
        trial = self._folder / "try"
        shutil.copytree(self._folder / "whole", trial)
        content, foreign = ((self._folder / name / file).read_bytes() for name in ("whole", "foreign"))
        changed = damage(content, foreign, chance)
        (trial / file).write_bytes(changed)
        self._before = ""
        try:
            outcome, message = self._judged(file), ""
        except GhostClipError as error:
            kept = not self._before or self._training.state() == self._before
            outcome, message = "refused" if kept else "refused, with something changed", str(error)
        except Exception as error:  # noqa: BLE001 - whatever else is raised is what is looked for
            outcome, message = f"raised {type(error).__name__}", str(error)
        finally:
            if self._before:
                self._training.engine.close()
            shutil.rmtree(trial)
        return Outcome(FILES[file], kind, outcome, message.replace(str(self._folder), "")[:120])

    def _judged(self, file: str) -> str:
        training = self._try(file)
        if training.engine.get_epsilon(_DELTA) < self._epsilon:
            return "account below what was released"
        return "harmless" if training.state(account=False) == self._loaded[file] else "another training"

    def many(self, number: int, *, seed: int) -> list[Outcome]:
        """Damage files in all ways in turn."""
        chance = random.Random(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [self.one(*KINDS[index % len(KINDS)], chance) for index in range(number)]


def _markdown(record: dict[str, Any]) -> str:
    outcomes = record["outcomes"]
    counts = Counter((one["file"], one["kind"], one["outcome"]) for one in outcomes)
    tried = {(one["file"], one["kind"]): None for one in outcomes}
    rows = []
    for file, kind in tried:
        refused, harmless = counts[file, kind, "refused"], counts[file, kind, "harmless"]
        total = sum(count for (of, what, _), count in counts.items() if (of, what) == (file, kind))
        rows.append([file, kind, total, refused, harmless, total - refused - harmless])
    return (
        f"`{record['command']}` on {machine_line(record)}\n\n"
        f"{len(outcomes)} corruptions of the files of a training that was saved after its last step. Refused: by an "
        "error of this package, with nothing changed. Harmless: ε not below what was released, and all that was loaded "
        "is what was saved. What no file can tell: that the end of a ledger was cut off where no checkpoint has seen "
        "it.\n\n" + table("file | damage | tried | refused | harmless | neither", rows, left=2)
    )


def main() -> int:
    """Damage files and write down what came of it."""
    options = parser("benchmarks.corruptions", __doc__)
    options.add_argument("--number", type=int, default=640, help="how many (default: %(default)s)")
    options.add_argument("--seed", type=int, default=1, help="of their places (default: %(default)s)")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        outcomes = Corruptions(Path(place)).many(given.number, seed=given.seed)
    record = head("benchmarks.corruptions", None) | {"outcomes": [asdict(outcome) for outcome in outcomes]}
    write(given.out, "corruptions", record, _markdown(record))
    bad = [outcome for outcome in outcomes if outcome.outcome not in ("refused", "harmless")]
    for outcome in bad:
        print(outcome, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
