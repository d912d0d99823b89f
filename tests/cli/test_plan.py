"""``ghostclip plan``: a page and its numbers, one line for wrong input."""

from __future__ import annotations

import json
import re

import pytest

from ghostclip.cli import main
from ghostclip.errors import InvalidOptionError
from ghostclip.finetune import FinetuneOptions
from ghostclip.finetune.models import Ranks
from ghostclip.scaling import Mesh

pytest.importorskip("transformers")


@pytest.mark.parametrize("text", ["cp=2", "replicate=2,pp=2"])
def test_finetune_refuses_axes_that_are_planned_only(text):
    with pytest.raises(InvalidOptionError, match="are divided by a model's own code"):
        Ranks(count=Mesh.parse(text).devices).mesh(FinetuneOptions(mesh=text))


SMALL = ["plan", "gpt2", "--context-length", "16", "--mesh", "replicate=2,dp=4"]


def test_a_page_of_memory_wire_and_flops(capfd):
    assert main([*SMALL, "--device-memory", "24"]) == 0
    page = capfd.readouterr().out
    assert re.match(r"fits on devices of 24.0 GB; samples at once on each: \d+ with book-keeping, \d+ with two", page)
    assert max(map(len, page.partition("\n\n")[2].partition("\n\n")[0].splitlines())) <= 100
    for words in (
        "gpt2 (GPT2LMHeadModel): 124,439,808 parameters",
        "mesh replicate=2,dp=4: 8 devices",
        "memory of a device of 24.0 GB",
        "non-private  book-keeping  two backwards",
        "dp: all-gather of weights",
        "replicate: all-reduce of sums",
        "FLOPs of a device",
        "transformer.h.*.mlp.c_fc.weight",
        "largest physical batch",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("gigabytes", "said"), [("1", "does not fit on devices of 1.0 GB: needs dp >= "), ("0.05", "whatever dp is")]
)
def test_what_does_not_fit_is_answered_first(capfd, gigabytes, said):
    assert main(["plan", "gpt2", "--context-length", "16", "--mesh", "dp=2", "--device-memory", gigabytes]) == 0
    answer = capfd.readouterr().out.partition("\n\n")[0]
    assert said in answer
    assert max(map(len, answer.splitlines())) <= 100


def test_json_has_the_numbers_of_the_page(capfd, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*SMALL, "--batch-size", "3", "--checkpointing", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["batch_size"] == 3
    assert found["ways"] == ["non-private", "two backwards"]
    assert found["total_bytes"][0] == sum(row["values"][0] for row in found["fixed"]) + 3 * sum(
        row["values"][0] for row in found["a_sample"]
    )
    assert main([*SMALL, "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out.partition("\n{")[2].join(("{", "")))["ways"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "lama"], "lama: no local folder"),
        (["plan", "gpt2", "--mesh", "tp=2"], "gpt2 has no plan of tensor parallelism"),
        (["plan", "gpt2", "--mesh", "dp"], "'dp' should name one axis with its size"),
        (["plan", "gpt2", "--context-length", "4096"], "gpt2 holds at most 1024 positions, not 4096"),
        (["plan", "gpt2", "--context-length", "0"], "--context-length is 0: must be at least 1"),
        (["plan", "gpt2", "--batch-size", "0"], "--batch-size is 0: must be at least 1"),
        (["plan", "gpt2", "--trainable", "nothing_like_it"], "matches none of the 148 parameters"),
        (["plan", "gpt2", "--device-memory", "much"], "'much' is no memory in GB"),
    ],
)
def test_wrong_input_is_one_line(capfd, words, said):
    try:
        status = main(words)
    except SystemExit as stopped:
        status = stopped.code
    error = capfd.readouterr().err
    assert status == 2
    lines = [line for line in error.splitlines() if line.startswith("ghostclip plan: error: ")]
    assert len(lines) == 1
    assert said in lines[0].replace("GPT2LMHeadModel", "gpt2")
