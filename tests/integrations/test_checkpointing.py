"""Activation checkpointing of models with dropout, whose masks are drawn a second time in the backward."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def test_a_reentrant_checkpoint_releases_what_it_does_without():
    from tests.integrations.rows_transformers import _causal
    from tests.integrations.trainings import releases_of
    from tests.loops.models import gpt2

    def make():
        model = gpt2()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.1
        return model

    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    plain = releases_of(lambda world: _causal(world, make=make))
    again = releases_of(lambda world: _causal(world, make=make, **options))
    undropped = releases_of(_causal)
    assert len(plain) == len(again) == 3
    for one, other, without in zip(plain, again, undropped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert not all(torch.allclose(one[name], without[name]) for name in one)
