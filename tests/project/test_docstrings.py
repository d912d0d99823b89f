"""Documentation that is missing or stale fails here; its form is ruff's matter, stale entries pydoclint's.

Public means: no leading underscore in the function, in its classes, or in its module's path. A method that overrides
one documented in the package needs no second text: the contract is written where it is declared. Where one sentence
says it all, one sentence will do: "Return ..." describes a result, and a lone parameter is what the sentence is about.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.project.source import FunctionNode, functions, module_name, of_every, python_files, shown, tree_of

FILES = python_files("ghostclip")
# Their meaning is Python's or torch's, not ours to explain again.
GIVEN_ELSEWHERE = {"forward", "backward", "setup_context", "vmap", "jvp", "extra_repr", "state_dict", "load_state_dict"}
# Programs, whose functions nobody else calls: one sentence will do.
PROGRAMS = ("ghostclip.finetune.", "ghostclip.commands.", "ghostclip.scaling.")
SAYS_THE_RESULT = re.compile(r"(?:Return|Yield|Whether|Give|Compute|Count|Build|Make|Find|List)")
SECTION = r"^\s*{}:\s*$"


def _is_public(path: Path, owners: tuple[ast.ClassDef, ...], node: FunctionNode) -> bool:
    names = [*module_name(path).split("."), *(owner.name for owner in owners), node.name]
    return not any(name.startswith("_") for name in names)


def _base_names(owner: ast.ClassDef) -> set[str]:
    return {
        base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
        for base in map(_unsubscripted, owner.bases)
    }


def _unsubscripted(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def _methods_by_class() -> dict[str, tuple[set[str], set[str]]]:
    """Class name to (its methods, its bases), for every class of the package."""
    classes: dict[str, tuple[set[str], set[str]]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, FunctionNode)}
                classes[node.name] = (methods, _base_names(node))
    return classes


CLASSES = _methods_by_class()


def _declared_above(owner: ast.ClassDef, name: str) -> bool:
    waiting, seen = _base_names(owner), set()
    while waiting:
        base = waiting.pop()
        if base in seen or base not in CLASSES:
            continue
        seen.add(base)
        methods, above = CLASSES[base]
        if name in methods:
            return True
        waiting |= above
    return False


def _is_property(node: FunctionNode) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("property", ".setter", "overload")) for name in names)


def _parameters(node: FunctionNode) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [a.arg for a in every if a.arg not in ("self", "cls", "ctx") and not a.arg.startswith("_")]


def _returns_something(node: FunctionNode) -> bool:
    nothing = {None, "None", "NoReturn", "Self"}
    return (ast.unparse(node.returns) if node.returns else None) not in nothing


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FunctionNode.__args__, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _raised(node: FunctionNode) -> set[str]:
    """Names of the error classes that the function itself raises by name."""
    raised = set()
    for item in _own_nodes(node):
        if isinstance(item, ast.Raise) and item.exc is not None:
            target = item.exc.func if isinstance(item.exc, ast.Call) else item.exc
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            if name.endswith("Error"):
                raised.add(name)
    return raised


def _problems(node: FunctionNode) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    if not text:
        yield "no docstring"
        return

    def has(*titles: str) -> bool:
        return any(re.search(SECTION.format(title), text, flags=re.MULTILINE) for title in titles)

    parameters = _parameters(node)
    sentence = "\n" not in text
    if parameters and not has("Args") and not (sentence and len(parameters) == 1):
        yield f"no Args section for {', '.join(parameters)}"
    if _returns_something(node) and not has("Returns", "Yields") and not (sentence and SAYS_THE_RESULT.match(text)):
        yield "no Returns section"
    missing = [name for name in sorted(_raised(node)) if not re.search(rf"^\s*{name}:", text, flags=re.MULTILINE)]
    if missing:
        yield f"Raises does not name {', '.join(missing)}"


@of_every(FILES)
def test_public_functions_are_documented(path):
    problems = []
    for owners, node in functions(path):
        if not _is_public(path, owners, node) or _is_property(node) or node.name in GIVEN_ELSEWHERE:
            continue
        if owners and _declared_above(owners[-1], node.name):
            continue
        if module_name(path).startswith(PROGRAMS) and ast.get_docstring(node):
            continue
        problems += [f"{shown(path)}:{node.lineno} {node.name}: {problem}" for problem in _problems(node)]
    assert not problems, "\n".join(problems)


@of_every(python_files("ghostclip", "tests", "benchmarks", "paper_repro"))
def test_every_module_says_what_lives_there(path):
    assert ast.get_docstring(tree_of(path)), f"{shown(path)} has no docstring"
