"""The table of mutations does not rot: each still has its place in the sources, and its tests are there."""

from __future__ import annotations

import pytest

from benchmarks.mutations import MUTATIONS, ROOT, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_sources(mutation):
    text = (ROOT / "ghostclip" / mutation.file).read_text(encoding="utf-8")
    compile(mutated(text, mutation), mutation.file, "exec")
    for name in mutation.tests.split():
        file, _, test = name.partition("::")
        assert (ROOT / "tests" / file).exists()
        assert not test or f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_text_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match="has its text 2 times"):
        mutated(2 * MUTATIONS[0].old, MUTATIONS[0])
