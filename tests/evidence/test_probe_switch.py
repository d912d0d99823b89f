"""The clipper's own proof can be switched off, and then it costs and refuses nothing."""

import queue

import pytest
import torch

import ghostclip
from ghostclip.errors import SampleMixingError
from tests.validation.mixers import CentresOnTheBatch, inputs


def _backwards(probe):
    """Return how often a gradient reached the layer's output in the first forward and backward."""
    model = torch.nn.Linear(5, 3)
    # No list: what hooks write in backwards that are not the user's is put back.
    seen = queue.SimpleQueue()
    model.register_forward_hook(lambda module, args, output: output.register_hook(lambda grad: seen.put(1)) and None)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping", probe=probe) as clipper:
        clipper.backward(model(inputs((4, 5))).square().mean(1))
        assert clipper.per_sample_norms.shape == (4,)
    return seen.qsize()


def test_without_it_there_is_one_backward():
    assert _backwards(probe=False) == 1
    assert _backwards(probe=True) > 1


def test_without_it_a_model_that_mixes_is_not_refused():
    with ghostclip.GhostClipper(CentresOnTheBatch(), max_grad_norm=1.0, probe=False) as clipper:
        clipper.backward(clipper.model(inputs((4, 5))).square().mean(1))
    with ghostclip.GhostClipper(CentresOnTheBatch(), max_grad_norm=1.0) as clipper:
        with pytest.raises(SampleMixingError):
            clipper.model(inputs((4, 5)))


def test_sums_are_the_same():
    model, x = torch.nn.Linear(5, 3).double(), inputs((4, 5)).double()
    sums = []
    for probe in (True, False):
        with ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=probe) as clipper:
            clipper.backward(model(x).square().mean(1))
        sums.append(model.weight.grad.clone())
        model.zero_grad(set_to_none=True)
    assert torch.equal(*sums)
