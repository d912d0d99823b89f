"""`ghostclip finetune --memory-budget`: kept, recorded, and the trained weights are those of any other budget."""

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

from tests.cli.conftest import TINY_GIVEN  # noqa: E402

MODEL = ["--layers", "3", "--hidden-size", "18", "--heads", "3", "--context-length", "23"]


def test_weights_are_those_of_any_budget(finetune, text_file, tmp_path, record_of):
    words = ["--data", text_file, *MODEL, *TINY_GIVEN, "--seed", "5", "--unsafe-noise-seed", "6"]
    found = {}
    for name, more in (("ordinary", ()), ("reduced", ("--memory-budget", "0.5"))):
        done = finetune(*words, *more, "--output", tmp_path / name)
        assert done.status == 0, done.err
        found[name] = safetensors.load_file(tmp_path / name / "model.safetensors")
    assert record_of(tmp_path / "reduced")["options"]["memory_budget"] == 0.5
    for name, value in found["ordinary"].items():
        torch.testing.assert_close(found["reduced"][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--memory-budget", "0"), "--memory-budget is 0"),
        (("--memory-budget", "0.5", "--strategy", "hooks"), "--memory-budget 0.5 with --strategy 'hooks'"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(finetune, text_file, tmp_path, more, said):
    done = finetune("--data", text_file, *MODEL, *TINY_GIVEN, *more, "--output", tmp_path / "out")
    assert done.status
    assert said in done.err
    assert not (tmp_path / "out" / "private").exists()
