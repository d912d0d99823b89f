"""The modules of Opacus's names, which are made from a table: imported, listed, pickled and run as those with files."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch

from ghostclip.compat import opacus
from ghostclip.compat.opacus import layers, surface
from ghostclip.compat.opacus.data_loader import CollateFnWithEmpty

ROOT = "ghostclip.compat.opacus"
PACKAGES = {name.rpartition(".")[0] for name in surface.MODULES} - {""}


@pytest.mark.parametrize("name", sorted({*surface.MODULES, *PACKAGES}))
def test_module_is_imported_and_lists_its_names(name):
    module = importlib.import_module(f"{ROOT}.{name}")
    assert module.__name__ == f"{ROOT}.{name}"
    assert module.__doc__.startswith(f"Opacus's `{name}`")
    found: dict[str, object] = {}
    exec(f"from {ROOT}.{name} import *", found)
    assert set(module.__all__) <= set(found)
    assert {*module.__all__, *surface.submodules(name)} <= set(dir(module))
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing)
            assert pickle.loads(pickle.dumps(thing)) is thing
    for inner in surface.submodules(name):
        assert getattr(module, inner) is sys.modules[f"{ROOT}.{name}.{inner}"]


def test_stub_has_the_names_of_the_package():
    stub = ast.parse(Path(opacus.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    assert named == set(opacus.__all__)


def test_instances_are_pickled():
    rnn = pickle.loads(pickle.dumps(layers.DPLSTM(3, 2)))
    assert type(rnn) is layers.DPLSTM
    assert pickle.loads(pickle.dumps(CollateFnWithEmpty(torch.stack))).wrapped_collator_fn is torch.stack
    # As the version before wrote the class.
    assert pickle.loads(b"cghostclip.compat.opacus.layers.dp_rnn\nDPLSTM\n.") is layers.DPLSTM
