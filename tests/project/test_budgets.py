"""The size of the package and the way of a step are budgets: whoever raises one changes a number here, and says why."""

from __future__ import annotations

import ast
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from tests.project.source import tree_of

ROOT = Path(ghostclip.__file__).parent
# Lines of code (no docstring, comment or blank line) of each room; "." is what lies beside the rooms.
ROOMS = {
    ".": 4_980, "accounting": 1_620, "audit": 455, "capture": 5_545, "checks": 5_235, "clipping": 3_905,
    "compat": 735, "data": 1_445, "distributed": 1_790, "factors": 1_420, "finetune": 1_455, "graph": 2_140,
    "integrations": 1_495, "kernels": 2_205, "noise": 840, "optim": 1_190, "privacy": 1_810,
    "rules": 1_265, "validation": 1_725,
}  # fmt: skip
FILES, SMALL_FILES, SMALL = 167, 20, 60
# Of a steady step with the whole engine, for batches whose size was met before: calls of our functions, and files.
WAYS = {"linear": (778, 80), "mlp": (900, 80)}
# Rooms of what such a step does without.
ELSEWHERE = frozenset(
    {"audit", "commands.py", "compat", "finetune", "integrations", "mechanisms.py", "scaling.py", "validation"}
)


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    strings = set[int]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in node.body:
                if (
                    isinstance(part, ast.Expr)
                    and isinstance(part.value, ast.Constant)
                    and type(part.value.value) is str
                ):
                    strings.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in strings and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)


@cache
def _counted() -> dict[Path, int]:
    return {path.relative_to(ROOT): code_lines(path) for path in ROOT.rglob("*.py")}


def lines_of_rooms() -> Counter[str]:
    """Return the lines of code of each room."""
    rooms = Counter[str]()
    for path, lines in _counted().items():
        rooms[path.parts[0] if len(path.parts) > 1 else "."] += lines
    return rooms


def test_every_room_keeps_its_lines_and_budgets_stay_close():
    rooms = lines_of_rooms()
    assert rooms.keys() == ROOMS.keys()
    over = {room: (lines, ROOMS[room]) for room, lines in rooms.items() if lines > ROOMS[room]}
    assert not over, f"lines of code and budgets: {over}"
    loose = {room: (lines, ROOMS[room]) for room, lines in rooms.items() if lines < ROOMS[room] - 50}
    assert not loose, f"rooms that have become smaller keep that: lower their budgets: {loose}"


def test_there_are_no_more_files():
    files = _counted()
    assert len(files) <= FILES
    assert sum(lines < SMALL for lines in files.values()) <= SMALL_FILES


def test_a_class_name_means_one_thing():
    names = Counter(
        node.name for path in ROOT.rglob("*.py") for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == set()


class _Way:
    """Counts calls of the package's functions."""

    def __init__(self) -> None:
        self.calls, self.files = 0, set[Path]()

    def __call__(self, frame, event, argument):
        del argument
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/"):
            self.calls += 1
            self.files.add(Path(path).relative_to(ROOT))


def _way_of(name: str) -> tuple[int, list[str]]:
    """Return the calls of a steady step, the fewest of eight, and the files they are in."""
    torch.manual_seed(0)
    layers = {"linear": [nn.Linear(20, 2)], "mlp": [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)]}
    model, x = nn.Sequential(*layers[name]) if name == "mlp" else layers[name][0], torch.randn(40, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = ghostclip.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=20), noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
    module, optimizer, criterion, loader = private
    ways, sizes = [], set[int]()
    while len(ways) < 8:
        batches = iter(loader)
        for _ in range(len(loader)):
            way = _Way()
            sys.setprofile(way)
            inputs, targets = next(batches)
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()
            sys.setprofile(None)
            if len(inputs) in sizes and optimizer.releases > 20:
                ways.append(way)
            sizes.add(len(inputs))
    shortest = min(ways, key=lambda way: way.calls)
    return shortest.calls, [path.as_posix() for path in shortest.files]


@pytest.mark.parametrize("name", WAYS)
def test_the_way_of_a_step(name):
    # In a process of its own: each private model that is alive looks at the steps of every optimizer.
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        calls, files = pool.submit(_way_of, name).result()
    most, most_files = WAYS[name]
    assert most - 40 <= calls <= most
    assert len(files) <= most_files
    assert not {path.split("/")[0] for path in files} & ELSEWHERE
