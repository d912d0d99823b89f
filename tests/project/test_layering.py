"""Imports go strictly downward, so that each layer can be read, tested and replaced without those above it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.source import PACKAGE, imported_modules, module_name, of_every, python_files, shown, tree_of

# Lowest first. A module imports from earlier entries, or from its own; a name is a package, a part of one or a file.
LAYERS = (
    "errors",
    "_types",
    "_torch",
    "_tree",
    "_validate",
    "_memory",
    "_files",
    "accounting",
    "kernels",
    "losses",
    "factors",
    "rules",
    "capture",
    "checks",
    "clipping",
    "clipper",
    "graph",
    "validation.fixers",
    "language",
    "facade",
    "noise",
    "distributed",
    "optim",
    "data",
    "mechanisms",
    "privacy",
    "options",
    "assembly",
    "engine",
    "validation",
    "audit",
    "integrations",
    "scaling",
    "compat",
    "terminal",
    "finetune",
    "commands",
    "cli",
    "__main__",
)
# The files of two rooms, lowest first: the path of a forward is long, and each file of it knows of those below alone.
ORDERED = {
    "capture": [
        "sample_axis",
        "hooks",
        "tracked",
        "nodes",
        "call_sites",
        "inputs",
        "substitution",
        "derive",
        "forward",
        "blocks",
        "ranks",
        "backward_entry",
        "row_maps",
        "param_use",
        "opaque_modules",
        "plans",
        "decide",
        "context",
    ],
    "checks": [
        "module_state",
        "dependence",
        "linear_paths",
        "batches",
        "unchecked",
        "independence",
        "loop_record",
        "state",
        "probe",
        "loss_graph",
        "custom_backwards",
        "padding",
        "prover",
        "losses",
    ],
}
# Programs that use the library as a stranger would, through `import ghostclip`.
USES_THE_PUBLIC_NAMES = {"compat", "integrations", "finetune", "commands", "cli", "__main__"}
# Named in pieces, so that this file is not itself a match.
MODULE_HOOKS = ("register_" + "forward_hook", "register_" + "forward_pre_hook", "register_" + "full_backward_hook")

FILES = python_files("ghostclip")


def test_the_picture_of_the_rooms_has_every_room_in_this_order():
    tree = ast.parse((PACKAGE.parent / "docs" / "pictures.py").read_text(encoding="utf-8"))
    (floors,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS"
    ]
    drawn = [room for _, _, floor in floors for room in floor]
    assert drawn == [layer for layer in LAYERS if (PACKAGE / layer).is_dir()]


def _layer(dotted: str) -> str:
    """The entry of LAYERS that a module of the package belongs to; '' for the package's own `__init__`."""
    parts = dotted.split(".")[1:]
    found = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in found if name in LAYERS), parts[0] if parts else "")


def _is_layer(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _internal_imports(path: Path) -> list[tuple[int, str]]:
    """(line, layer) of each import of ghostclip itself; '' where a public name is taken from the package."""
    found = []
    for line, dotted in imported_modules(path):
        if dotted == "ghostclip" or dotted.startswith("ghostclip."):
            layer = _layer(dotted)
            found.append((line, layer if _is_layer(layer) else ""))
    return found


def _external_roots(path: Path) -> set[str]:
    return {dotted.split(".")[0] for _, dotted in imported_modules(path)}


def test_every_module_has_a_layer():
    unknown = {_layer(module_name(path)) for path in FILES} - set(LAYERS) - {""}
    assert not unknown, f"say in LAYERS where these belong: {sorted(unknown)}"


@of_every([path for path in FILES if _layer(module_name(path))])
def test_imports_go_downward(path):
    own = _layer(module_name(path))
    for line, layer in _internal_imports(path):
        if not layer:
            assert own in USES_THE_PUBLIC_NAMES, f"{shown(path)}:{line} imports the package it is a part of"
            continue
        assert LAYERS.index(layer) <= LAYERS.index(own), f"{shown(path)}:{line}: {own} must not import {layer}"


def _imported_of_its_room(path: Path) -> set[str]:
    """Names of the files of a file's own room that it imports, for types alone included."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = node.module.split(".")
            if inside[:2] == ["ghostclip", path.parent.name]:
                found |= {inside[2]} if len(inside) > 2 else {name.name for name in node.names}
    return found


@of_every([path for path in FILES if path.parent.name in ORDERED])
def test_files_of_a_room_import_downward(path):
    if path.stem == "__init__":
        return
    order = ORDERED[path.parent.name]
    above = {name for name in _imported_of_its_room(path) if order.index(name) >= order.index(path.stem)}
    assert not above, f"{path.stem} must not import {sorted(above)}"


def test_one_file_knows_all_of_capture():
    """Operations take the forward's passive data; nothing but the context itself knows of who runs them."""
    knowing = {
        path.stem for path in FILES if path.parent.name == "capture" and "context" in _imported_of_its_room(path)
    }
    assert not knowing


def test_accounting_needs_no_torch():
    reached, waiting = set(), [path for path in FILES if _layer(module_name(path)) == "accounting"]
    while waiting:
        path = waiting.pop()
        reached.add(path)
        assert "torch" not in _external_roots(path), f"{shown(path)} imports torch and accounting imports it"
        layers = {layer for _, layer in _internal_imports(path)}
        waiting += [other for other in FILES if _layer(module_name(other)) in layers - {""} and other not in reached]


@of_every(FILES)
def test_only_kernels_import_triton(path):
    assert "triton" not in _external_roots(path) or _layer(module_name(path)) == "kernels"


@of_every(FILES)
def test_only_capture_and_checks_hook_modules(path):
    if _layer(module_name(path)) in {"capture", "checks"}:
        return
    text = path.read_text(encoding="utf-8")
    assert not [name for name in MODULE_HOOKS if name in text], f"{shown(path)} registers module hooks"


@of_every(FILES)
def test_integrations_are_imported_when_used(path):
    """A library that is an extra is imported inside a function, never at the top of a module.

    `integrations` may: its modules exist to derive from that library's classes, and are loaded by name only.
    """
    if _layer(module_name(path)) == "integrations":
        return
    extras = {"transformers", "lightning", "accelerate", "matplotlib", "tqdm", "safetensors", "opacus", "peft"}
    top = {dotted.split(".")[0] for line, dotted in imported_modules(path) if line in _top_level_lines(path)}
    assert not top & extras, f"{shown(path)} imports {sorted(top & extras)} when it is loaded"


def _top_level_lines(path: Path) -> set[int]:
    """Lines of the statements that run when the module is loaded: those that are not indented."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, start=1) if line and not line[0].isspace()}


def _known_when_read(path: Path) -> set[str]:
    """Modules that a file imports outside functions, for types alone included."""
    modules = {module_name(other) for other in FILES}
    found: set[str] = set()
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in inside}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return (found & modules) - {module_name(path)}


def test_no_modules_import_each_other_also_not_for_types():
    """Inside a room, too, a file knows only of those below it."""
    graph = {module_name(path): _known_when_read(path) for path in FILES}
    while True:
        # What knows of nobody that is left is below all others.
        lowest = {name for name, others in graph.items() if not others & graph.keys()}
        if not lowest:
            break
        graph = {name: others for name, others in graph.items() if name not in lowest}
    assert not graph
