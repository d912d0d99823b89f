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
from ghostclip.compat.opacus.grad_sample import GradSampleModuleFastGradientClipping, prepare_module
from ghostclip.compat.opacus.optimizers import AdaClipDPOptimizer, DPPerLayerOptimizer
from ghostclip.compat.opacus.utils.adaptive_clipping import DPTensorFastGradientAdaptiveClipping
from tests.compat.pairs import small_model
from tests.project.test_layering import LAYERS

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


def test_what_is_not_in_the_table_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'ghostclip\.compat\.opacus\.optimizers\.nothing'"):
        importlib.import_module(f"{ROOT}.optimizers.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {ROOT}.optimizers import nothing")


def test_stub_has_the_names_of_the_package():
    stub = ast.parse(Path(opacus.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    assert named == set(opacus.__all__)


def test_homes_lie_below():
    homes = {part.partition(":")[0] for row in surface.MODULES.values() for part in row.lstrip("^").split("; ")}
    below = LAYERS[: LAYERS.index("compat")]
    for home in homes:
        assert home.startswith(".") or any(home == layer or home.startswith(f"{layer}.") for layer in below), home


def test_instances_are_pickled():
    rnn = pickle.loads(pickle.dumps(layers.DPLSTM(3, 2)))
    assert type(rnn) is layers.DPLSTM
    assert pickle.loads(pickle.dumps(CollateFnWithEmpty(torch.stack))).wrapped_collator_fn is torch.stack
    # As the version before wrote the class.
    assert pickle.loads(b"cghostclip.compat.opacus.layers.dp_rnn\nDPLSTM\n.") is layers.DPLSTM


@pytest.mark.parametrize(
    ("thing", "options"),
    [
        (DPPerLayerOptimizer, ["noise_multiplier", "expected_batch_size", "generator"]),
        (AdaClipDPOptimizer, ["target_unclipped_quantile", "unclipped_num_std", "secure_mode"]),
        (GradSampleModuleFastGradientClipping, ["batch_first", "loss_reduction", "strict", "use_ghost_clipping"]),
        (prepare_module, ["wrap_model", "max_grad_norm", "force_functorch"]),
        (DPTensorFastGradientAdaptiveClipping, ["loss_reduction", "min_clipbound", "initial_noise_multiplier"]),
    ],
)
def test_options_that_are_handed_on_are_in_the_signature(thing, options):
    parameters = inspect.signature(thing).parameters
    assert set(options) <= set(parameters)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_misspelt_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_ghost_cliping'"):
        GradSampleModuleFastGradientClipping(small_model(), use_ghost_cliping=False)
