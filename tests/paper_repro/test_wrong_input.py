"""Wrong options and data that is not there: one line, and the exit status that shells expect."""

from __future__ import annotations

import pytest

from paper_repro import __main__ as program


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["G"], "invalid choice: 'G'"),
        (["A", "--stpes", "3"], "unrecognized arguments: --stpes"),
        (["A", "--steps", "0"], "argument --steps: 0 is not at least 1"),
        (["A", "--minutes", "-1"], "argument --minutes: -1.0 is negative"),
        (["A", "--case", "resnet"], "argument --case: unknown: resnet (there are: mnist-cnn, "),
        (["E", "--engine", "jax"], "argument --engine: unknown: jax (there are: nonprivate, "),
        (["A", "--tiny", "--full"], "not allowed with argument --tiny"),
        (["A", "--device", "abacus"], "argument --device: abacus: "),
        (["B", "--data", "."], "argument --data: linear has no data set"),
        (["E", "--data", "nowhere"], "argument --data: nowhere is not a folder"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("python -m paper_repro: error: ")
    assert said in last
