"""The examples in docstrings run as they stand; what users touch first has one.

Names that an example does not make are those of a small training: model, optimizer, loader, criterion, x, y, folder.
"""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from tests.project.source import module_name, python_files

# What a user meets in the first hour, beside every public name.
FIRST = {
    "ghostclip.engine": "PrivacyEngine.make_private make_private_with_epsilon get_epsilon summary save_checkpoint",
    "ghostclip.clipper": "GhostClipper GhostClipper.backward GhostClipper.coverage",
    "ghostclip.validation.fixers": "ModuleValidator.fix ModuleValidator.validate",
    "ghostclip.clipping.policies": "flat automatic normalised psac per_layer per_group",
    "ghostclip.data.loader": "DPDataLoader",
    "ghostclip.data.physical_batches": "BatchMemoryManager",
}
# Documented where a whole page is needed: the README and the docs.
ELSEWHERE = {"DPOptimizer", "inspect_model", "register_rule", "__version__"}


def _found() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = {}
    for path in python_files("ghostclip"):
        name = module_name(path)
        if ">>>" in path.read_text(encoding="utf-8") and ".integrations." not in name:
            module = importlib.import_module(name)
            tests.update({test.name: test for test in finder.find(module, name) if test.examples})
    return tests


EXAMPLES = _found()


def _names(folder) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    return {
        "torch": torch,
        "nn": nn,
        "ghostclip": ghostclip,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=8),
        "criterion": nn.CrossEntropyLoss(),
        "x": data.tensors[0][:8],
        "y": data.tensors[1][:8],
        "inputs": data.tensors[0][:8],
        "targets": data.tensors[1][:8],
        "folder": folder,
        "train_data": data,
        "canaries": [data[0]] * 400,
        "losses_of_canaries": torch.zeros(400),
    }


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_runs_as_it_stands(name, tmp_path):
    test = EXAMPLES[name]
    test.globs = {**test.globs, **_names(tmp_path)}
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    said = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", sorted(set(ghostclip.__all__) - ELSEWHERE))
def test_public_name_has_an_example(name):
    thing = getattr(ghostclip, name)
    names = [method for method in dir(thing) if not method.startswith("_")] if inspect.isclass(thing) else []
    methods = [getattr(thing, method) for method in names]
    assert any(">>>" in (inspect.getdoc(item) or "") for item in [thing, *methods]), name


@pytest.mark.parametrize(
    "name",
    [
        f"{module}.{entry if entry[0].isupper() or module != 'ghostclip.engine' else f'PrivacyEngine.{entry}'}"
        for module, entries in FIRST.items()
        for entry in entries.split()
    ],
)
def test_what_is_touched_first_has_an_example(name):
    assert name in EXAMPLES
