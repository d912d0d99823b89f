"""Documentation that is missing fails here; its form is ruff's matter, stale entries pydoclint's.

The public API, which is what docs/inside/api.md lists and what `ghostclip.__all__` names, has Args, Returns and Raises.
Elsewhere one sentence will do, or none where the name says it. Also in the API one sentence will do where it says it
all: "Return ..." describes a result, and a lone parameter is what the sentence is about.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator

import ghostclip
from tests.project.source import ROOT, FunctionNode, functions, module_name, of_every, python_files, shown, tree_of

FILES = python_files("ghostclip")
# Their meaning is Python's or torch's, not ours to explain again.
GIVEN_ELSEWHERE = {"forward", "backward", "setup_context", "vmap", "jvp", "extra_repr", "state_dict", "load_state_dict"}
LISTED = re.compile(r"^\.\. auto(module|class|function):: (\S+)", flags=re.MULTILINE)
SAYS_THE_RESULT = re.compile(r"(?:Return|Yield|Whether|Give|Compute|Count|Build|Make|Find|List)")
SECTION = r"^\s*{}:\s*$"
# Modules that import another library: their entries are read and not loaded.
OF_HOSTS = {"ghostclip.integrations.transformers", "ghostclip.integrations.trl"}


def _entries() -> Iterator[object]:
    """The objects that the page of the API lists, its modules' public objects, and those of `ghostclip.__all__`."""
    for kind, name in _listed():
        if name.rpartition(".")[0] in OF_HOSTS:
            continue
        if kind == "module":
            module = importlib.import_module(name)
            yield from (value for key, value in vars(module).items() if _is_defined_in(module, key, value))
        else:
            path, _, attribute = name.rpartition(".")
            yield getattr(importlib.import_module(path), attribute)
    yield from (getattr(ghostclip, name) for name in ghostclip.__all__)


def _listed() -> list[tuple[str, str]]:
    """What the page of the API lists, as (kind, dotted name)."""
    return LISTED.findall((ROOT / "docs/inside/api.md").read_text(encoding="utf-8"))


def _is_defined_in(module: object, key: str, value: object) -> bool:
    return not key.startswith("_") and getattr(value, "__module__", "") == module.__name__


def _api() -> set[tuple[str, str]]:
    """(module, qualified name) of every function and class of the public API, with the package's base classes."""
    split = [name.rpartition(".") for _, name in _listed()]
    found = {(module, name) for module, _, name in split if module in OF_HOSTS}
    for entry in map(inspect.unwrap, _entries()):
        classes = inspect.getmro(entry) if inspect.isclass(entry) else [entry]
        found |= {(item.__module__, item.__qualname__) for item in classes if _is_ours(item)}
    return found


def _is_ours(item: object) -> bool:
    return (inspect.isclass(item) or inspect.isfunction(item)) and item.__module__.startswith("ghostclip")


API = _api()


def _is_in_api(module: str, owners: tuple[ast.ClassDef, ...], node: FunctionNode) -> bool:
    owner = ".".join(owner.name for owner in owners)
    return not node.name.startswith("_") and (module, owner or node.name) in API


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
        if not _is_in_api(module_name(path), owners, node) or _is_property(node) or node.name in GIVEN_ELSEWHERE:
            continue
        if _is_documented_above(module_name(path), owners, node):
            continue
        problems += [f"{shown(path)}:{node.lineno} {node.name}: {problem}" for problem in _problems(node)]
    assert not problems, "\n".join(problems)


def _is_documented_above(module: str, owners: tuple[ast.ClassDef, ...], node: FunctionNode) -> bool:
    """Whether a class that the owner derives from declares the method, and with it the contract."""
    if not owners or module in OF_HOSTS:
        return False
    owner = getattr(importlib.import_module(module), owners[0].name)
    for inner in owners[1:]:
        owner = getattr(owner, inner.name)
    return any(node.name in vars(above) for above in owner.__mro__[1:] if above is not object)


def test_every_entry_of_the_api_is_checked():
    checked = {
        (module_name(path), ".".join([*(owner.name for owner in owners), node.name]))
        for path in FILES
        for owners, node in functions(path)
        if _is_in_api(module_name(path), owners, node)
    }
    assert {
        ("ghostclip.engine", "PrivacyEngine.make_private"),
        ("ghostclip.rules.registry", "register_rule"),
    } <= checked
    classes = {name for _, name in API}
    assert {"PrivacyEngine", "GhostClipper", "DPOptimizer", "Budget", "Factor", "PrivacyCallback"} <= classes
    assert ("ghostclip.integrations.transformers", "DPTrainer.train") in checked


@of_every([path for path in FILES if any(module == module_name(path) for module, _ in API)])
def test_public_classes_are_documented(path):
    bare = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and (module_name(path), node.name) in API and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


# ruff asks it of every other module; those that are private, by their names, it passes over.
@of_every(FILES)
def test_every_module_says_what_lives_there(path):
    assert ast.get_docstring(tree_of(path)), f"{shown(path)} has no docstring"
