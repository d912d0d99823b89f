"""torch's private names stand in `ghostclip._torch` alone, so that one file says what a new version may break.

Private is what torch calls so, and what it does not document:

- a module, a name in one, or an attribute that begins with one underscore (``torch._C``, ``tensor._version``,
  ``node._saved_dim``, ``module._parameters``), imported, written as an attribute, or as a string;
- ``torch.utils.weak`` and ``AccumulateGrad.variable``, which have no underscore and no documentation.

An attribute with an underscore that the package gives its own objects is its own, unless one of torch's objects has it
too and the object is not ``self``. Those of Python and of other libraries are listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.project.source import PACKAGE, imported_modules, of_every, python_files, shown, tree_of

MODULE = PACKAGE / "_torch.py"
FILES = [path for path in python_files("ghostclip") if path != MODULE]
UNDOCUMENTED_MODULES = ("torch.utils.weak",)
UNDOCUMENTED_ATTRIBUTES = {"variable"}
# Python's named tuples, frames and argument parsers; attributes of Lightning's, accelerate's and transformers' objects.
OTHERS = {
    "_fields", "_replace", "_asdict", "_getframe", "_ArgumentGroup", "_forward_module", "_model_mapping",
    "_prepare_inputs", "_remove_unused_columns", "_get_collator_with_removed_columns",
    "_dataloader", "_strategy", "_callbacks", "_data_source", "_results", "_data_connector", "_num_samples",
    "_check_value", "_actions", "_on_before_batch_transfer",
}  # fmt: skip


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _torchs_names() -> set[str]:
    """Private names that torch's objects have, as attributes or under another name than they are read by."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    node = torch.ones(1, requires_grad=True).sum().grad_fn
    modules = (nn.Linear(1, 1), nn.LSTM(1, 1), nn.BatchNorm1d(1))
    objects = (torch, torch._C, torch.Tensor, torch.overrides, torch.autograd.graph, nn.Module, *modules, optimizer)
    names = {name for item in (*objects, optimizer.step, node) for name in dir(item)}
    return {name for name in names if _is_private(name)} | {"_metadata"}


TORCHS = _torchs_names()


@cache
def _own_names() -> set[str]:
    """What the package defines: functions, classes, and attributes and names that it assigns."""
    own: set[str] = set()
    for node in (node for path in FILES for node in ast.walk(tree_of(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return own - TORCHS


def _own_of_self(path: Path) -> set[str]:
    """Attributes that a file assigns to ``self``, and methods that it defines."""
    own: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            own.add(node.name)
    return own


def _found(path: Path) -> Iterator[str]:
    """Private names of torch in a file, with their lines."""
    for line, dotted in imported_modules(path):
        undocumented = any(f"{dotted}.".startswith(f"{name}.") for name in UNDOCUMENTED_MODULES)
        if dotted.split(".")[0] == "torch" and (undocumented or any(map(_is_private, dotted.split(".")))):
            yield f"{line}: {dotted}"
    own = _own_of_self(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            is_own = node.attr in _own_names() or (node.attr in own and ast.unparse(node.value) == "self")
            private = _is_private(node.attr) and not is_own and node.attr not in OTHERS
            if private or node.attr in UNDOCUMENTED_ATTRIBUTES:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_torchs(node.value):
            yield f"{node.lineno}: {node.value!r}"


def _names_torchs(text: str) -> bool:
    """Whether a string is the name of something private of torch."""
    parts = text.split(".")
    if parts[0] == "torch":
        return all(map(str.isidentifier, parts)) and any(map(_is_private, parts))
    return text in TORCHS or text in UNDOCUMENTED_ATTRIBUTES or text.startswith(("_saved_", "_raw_saved_"))


@of_every(FILES)
def test_private_names_of_torch_stand_in_one_module(path):
    found = list(_found(path))
    assert not found, f"move these to ghostclip/_torch.py: {shown(path)}: " + "; ".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _foreach_div_",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.utils.weak import WeakTensorKeyDictionary",
        "from torch.utils import weak",
        "torch._foreach_mul_(x, 2)",
        "x._version",
        "node._saved_dim",
        "module._parameters['weight']",
        "getattr(node, '_saved_dim', 0)",
        "hasattr(torch.autograd.graph, '_engine_run_backward')",
        "sys.modules.get('torch._dynamo')",
        "super()._load_from_state_dict()",
        "node.variable",
        "getattr(node, 'variable', None)",
        "for name in ('_forward_hooks', '_backward_hooks'): vars(x)[name].clear()",
    ],
)
def test_each_way_to_name_something_private_is_found(line, tmp_path, monkeypatch):
    path = tmp_path / "example.py"
    path.write_text(f"import sys\nimport torch\n{line}\n")
    monkeypatch.setattr("tests.project.source.ROOT", tmp_path)
    assert list(_found(path))


def test_every_name_of_the_module_is_tested():
    tested = (Path(__file__).parents[1] / "test_torch.py").read_text(encoding="utf-8")
    for node in tree_of(MODULE).body:
        names = [node.name] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        for name in names:
            assert name.startswith("_") or f"_torch.{name}" in tested, f"{name} has no test in tests/test_torch.py"
