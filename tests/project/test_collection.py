"""Tests are collected with nothing but torch, numpy, scipy, opt_einsum and pytest: what needs more is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    *("accelerate", "cryptography", "datasets", "dp_accounting", "huggingface_hub", "hypothesis", "jax", "lightning"),
    *("matplotlib", "opacus", "peft", "PIL", "pytest_benchmark", "safetensors", "sphinx", "timm", "tokenizers"),
    *("torchvision", "tqdm", "transformers", "triton", "trl", "xdist"),
)

# Without these transformers is not there either: it does not import.
OF_TRANSFORMERS = {"huggingface_hub", "safetensors", "tokenizers", "tqdm"}


def collected(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Collect in a process of its own, in which these packages are not found and no plugin is loaded by itself."""
    options = ("-p", "tests.without", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", *options, *arguments],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WITHOUT": missing, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_collected_without_any_optional_package():
    done = collected(",".join(OPTIONAL))
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONAL)
def test_collected_without_one(name):
    done = collected(f"{name},transformers" if name in OF_TRANSFORMERS else name)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    done = collected("", "--device", "cuda", "tests/test_tree.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "sees no CUDA device" in done.stderr


def test_tests_on_a_named_device_are_marked():
    done = collected("", "--device", "cpu", "-m", "gpu", "tests/test_torch.py", "tests/test_tree.py")
    assert done.returncode == 0
    assert done.stdout.split() == ["tests/test_torch.py:", "1"]


def test_a_package_is_really_not_found():
    done = collected("scipy", "tests/accounting/test_rdp_curve.py")
    assert done.returncode != 0
    assert "No module named 'scipy'" in done.stdout
