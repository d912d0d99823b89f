"""How the package is built: `python -m benchmarks.structure [--tree FOLDER ...]` writes structure.md.

Sizes of rooms, imports between them, cycles of modules (imports for types alone included), and the files that a step
runs through, for this tree and for other checkouts that are named.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
_NAME = "ghostclip"
# Words of this project's own where the field has one, or of several meanings: names that hold them are counted.
_OWN_WORDS = ("loan", "lend", "session", "settled", "ways", "company", "mixing", "listed", "readings", "arrivals")
_OWN_WORDS += ("witness", "made_up", "doubtful", "beside", "standin", "spread", "silent", "roster", "ledger", "plan")

_STEPS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ghostclip
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
engine = ghostclip.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.0, max_grad_norm=1.0)
root = ghostclip.__path__[0]
files, found = set(), []
def seen(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(root):
        files.add(name[len(root) + 1:])
def step(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
steps = 0
while steps < 12:
    for x, y in loader:
        if len(x) < 2:
            optimizer.zero_grad(); optimizer.step(); continue
        files.clear()
        sys.setprofile(seen)
        step(x, y)
        sys.setprofile(None)
        found.append(sorted(files))
        steps += 1
print(json.dumps({"first": found[0], "steady": found[-1]}))
"""


@dataclass(frozen=True)
class Structure:
    """What one checkout is built of.

    Attributes:
        commit: Its commit, with a mark if files were changed.
        rooms: (files, lines) by room; "" holds the files at the top.
        imports: Rooms that each room imports from when it is loaded.
        cycles: Modules that import each other: when loaded, and where imports for types alone count too.
        steps: Files that the first step and a later one call into, by "first" and "steady".
        words: How many different names hold each of some words.
        import_seconds: Time of ``from ghostclip import PrivacyEngine`` less that of torch, the least of five.
    """

    commit: str
    rooms: Mapping[str, tuple[int, int]]
    imports: Mapping[str, Sequence[str]]
    cycles: Mapping[str, Sequence[Sequence[str]]]
    steps: Mapping[str, Sequence[str]]
    words: Mapping[str, int]
    import_seconds: float


def structure(root: Path) -> Structure:
    """Read a checkout and run a few steps in it.

    Args:
        root: Of the repository.

    Returns:
        What it is built of.
    """
    modules = {_module(path, root): path for path in sorted((root / _NAME).rglob("*.py"))}
    rooms: defaultdict[str, list[int]] = defaultdict(list)
    for name, path in modules.items():
        rooms[_room(name, modules)].append(len(path.read_text(encoding="utf-8").splitlines()))
    loaded = {name: set(_imports(name, modules, types=False)) - {name} for name in modules}
    typed = {name: set(_imports(name, modules, types=True)) - {name} for name in modules}
    between: defaultdict[str, set[str]] = defaultdict(set)
    for name, others in loaded.items():
        between[_room(name, modules)] |= {_room(other, modules) for other in others}
    return Structure(
        commit=_output(["git", "-C", str(root), "describe", "--always", "--dirty"]),
        rooms={room: (len(sizes), sum(sizes)) for room, sizes in sorted(rooms.items())},
        imports={room: sorted(others - {room, ""}) for room, others in sorted(between.items())},
        cycles={"loaded": _cycles(loaded), "types": _cycles(typed)},
        steps=json.loads(_output([sys.executable, "-W", "ignore", "-c", _STEPS], cwd=root)),
        words=_words(modules.values()),
        import_seconds=_import_seconds(root),
    )


def _words(paths: Collection[Path]) -> dict[str, int]:
    """Count the different names of files, functions, classes, arguments and attributes that hold each word."""
    names = {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("name", "attr", "arg", "id"):
                value = getattr(node, field, None)
                names |= {value} if isinstance(value, str) else set()
    split = [set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")) for name in names]
    return {word: sum(set(word.split("_")) <= parts for parts in split) for word in _OWN_WORDS}


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(name: str, modules: Mapping[str, Path]) -> str:
    parts = name.split(".")
    in_folder = len(parts) > 1 and modules[".".join(parts[:2])].name == "__init__.py"
    return parts[1] if in_folder else ""


def _imports(name: str, modules: Mapping[str, Path], *, types: bool) -> Iterator[str]:
    """Yield the modules that one imports when it is loaded; with ``types`` also those it names for types alone."""
    waiting: list[ast.AST] = [ast.parse(modules[name].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (found if found in modules else node.module for found in inside if node.module in modules)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that can all reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reach[start] = seen
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


def _output(command: Sequence[str], cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def _import_seconds(root: Path) -> float:
    timed = "s = time.process_time(); from ghostclip import PrivacyEngine; print(time.process_time() - s)"
    command = [sys.executable, "-c", f"import time, torch; {timed}"]
    return min(float(_output(command, cwd=root)) for _ in range(5))


def markdown(found: Sequence[Structure]) -> str:
    """Write structures side by side.

    Args:
        found: One at least, the oldest first.

    Returns:
        A page.
    """
    heads = " | ".join(f"{one.commit}" for one in found)
    rule = "|".join(["---", *["--:"] * len(found)])
    about = machine.describe(torch.device("cpu"))
    made = f"`python -m benchmarks.structure`, {about['cpu']}, {about['cores']} cores, Python {about['python']}"
    lines = ["# Structure of the package", "", f"{made}, torch {torch.__version__}.", "", "## Whole", ""]
    lines += [f"| | {heads} |", f"|{rule}|"]
    rows = {
        "files": [sum(files for files, _ in one.rooms.values()) for one in found],
        "lines": [sum(size for _, size in one.rooms.values()) for one in found],
        "files that a first step calls into": [len(one.steps["first"]) for one in found],
        "files that a later step calls into": [len(one.steps["steady"]) for one in found],
        "modules in cycles of imports": [sum(map(len, one.cycles["loaded"])) for one in found],
        "the same, imports for types alone included": [sum(map(len, one.cycles["types"])) for one in found],
        "import of PrivacyEngine after torch, CPU seconds": [f"{one.import_seconds:.2f}" for one in found],
    }
    lines += [f"| {name} | {' | '.join(map(str, values))} |" for name, values in rows.items()]
    lines += ["", "## Rooms: files, lines", "", f"| | {heads} |", f"|{rule}|"]
    names = sorted({room for one in found for room in one.rooms})
    for room in names:
        sizes = (f"{one.rooms[room][0]}, {one.rooms[room][1]}" if room in one.rooms else "" for one in found)
        lines.append(f"| {room or '(top)'} | {' | '.join(sizes)} |")
    lines += ["", "## Names that hold a word of the project's own", "", f"| | {heads} |", f"|{rule}|"]
    lines += [f"| {word} | {' | '.join(str(one.words[word]) for one in found)} |" for word in _OWN_WORDS]
    for one in found:
        lines += ["", f"## {one.commit}: imports between rooms, when loaded", ""]
        lines += [f"- {room or '(top)'} → {', '.join(others)}" for room, others in one.imports.items() if others]
        lines += ["", f"## {one.commit}: cycles, imports for types alone included", ""]
        lines += [f"- {', '.join(name.removeprefix(_NAME + '.') for name in group)}" for group in one.cycles["types"]]
        lines += [] if one.cycles["types"] else ["none"]
        steady = Counter(name.split("/")[0] for name in one.steps["steady"])
        lines += ["", f"## {one.commit}: files of a later step", ""]
        lines += [", ".join(f"{room} {count}" for room, count in sorted(steady.items()))]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write structure.md and structure.json.

    Args:
        arguments: As on the command line.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, older ones first")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files")
    given = parser.parse_args(arguments)
    found = [structure(root.resolve()) for root in [*given.tree, ROOT]]
    (given.out / "structure.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    (given.out / "structure.md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
