"""Scripts written for Opacus run with the import changed: same steps, same account, same parameters by name."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from ghostclip.errors import SampleMixingError
from tests.compat import scripts

TYPICAL = {
    "mnist": (scripts.MNIST, 4),
    "mnist-per-layer": (scripts.MNIST, 4),
    "resnet": (scripts.RESNET, 4),
    "bert": (scripts.BERT, 4),
    "char-lstm": (scripts.CHAR_LSTM, 4),
    "dcgan": (scripts.DCGAN, 4),
}
# Opacus wants one bound a parameter for clipping="per_layer"; we take one for all too.
OURS_ONLY = {"mnist-per-layer"}


# Names are padded to the longest one there is; Opacus's example pads to the longest of the batch.
LONGEST = 8


def run(case: str, package: str, monkeypatch: pytest.MonkeyPatch, *, longest: int = LONGEST) -> dict[str, object]:
    """Run a script as a module of its own; what stands in braces is replaced, nothing else."""
    script = TYPICAL[case][0].replace("{package}", package).replace("{per_layer}", str(case == "mnist-per-layer"))
    script = script.replace("{longest}", str(longest))
    module = types.ModuleType("script")
    # Opacus copies models by pickling them, which looks their classes up by name.
    monkeypatch.setitem(sys.modules, "script", module)
    exec(compile(script, f"<{case} for {package}>", "exec"), vars(module))
    return vars(module)


@pytest.mark.filterwarnings("ignore:::opacus")
@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.filterwarnings("ignore:The best R")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.integration if case == "bert" else ()) for case in sorted(TYPICAL)]
)
def test_script_runs_with_the_import_changed(case, monkeypatch):
    if case == "bert":
        pytest.importorskip("transformers")
    ours = run(case, "ghostclip.compat.opacus", monkeypatch)
    assert ours["steps"] == TYPICAL[case][1]
    assert all(bool(torch.isfinite(value).all()) for value in ours["state"].values())
    if case in OURS_ONLY or importlib.util.find_spec("opacus") is None:
        return
    theirs = run(case, "opacus", monkeypatch)
    assert ours["steps"] == theirs["steps"]
    assert 0 < ours["epsilon"] <= 1.01 * theirs["epsilon"]
    kept = {key.removeprefix("_module.") for key in theirs["state"]}
    # Opacus's recurrent layers list some parameters twice, once under the names of its cells.
    assert set(ours["state"]) == {key for key in kept if ".l0." not in key}


def test_last_position_of_names_padded_to_the_batchs_longest_is_refused(monkeypatch):
    """A record's gradient follows its company there, which Opacus does not notice."""
    with pytest.raises(SampleMixingError, match="pad all records to one fixed length"):
        run("char-lstm", "ghostclip.compat.opacus", monkeypatch, longest=1)
