"""`ghostclip help`: the entries of the errors page, which lies in the package."""

import pytest

from ghostclip.cli import main


def test_an_error_is_explained(capsys):
    assert main(["help", "BatchAxisError"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("BatchAxisError: The rows of a tensor cannot be assigned to samples with certainty.")
    assert "batch_first=False" in said
    assert "SampleMixingError" not in said


@pytest.mark.parametrize(
    ("given", "meant"), [("BatchAxisEror", "did you mean 'BatchAxisError'?"), ("inspect", "--help")]
)
def test_what_is_no_error_is_refused_with_what_was_meant(capsys, given, meant):
    assert main(["help", given]) == 2
    assert meant in capsys.readouterr().err


def test_links_are_places_in_a_checkout(capsys):
    assert main(["help"]) == 0
    assert "custom layers (docs/use/custom-layers.md)" in capsys.readouterr().out
