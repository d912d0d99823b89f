"""Gradients of every sample at once from an operation without a rule: right, or not used at all."""

import pytest
import torch

from ghostclip.capture.general import Arrived, Rerun, gradients
from ghostclip.capture.row_maps import RowMap

B, K = 4, 3


def _found(run, row_map, *, change=False):
    """Run a function of (x, p) in a graph of its own and ask for its per-sample gradients."""
    torch.manual_seed(0)
    x = torch.randn(B * K, 5, dtype=torch.float64)
    p = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rerun = Rerun(lambda plain, inputs: [run(*plain, *inputs)], [p])
    rerun.remember([x])
    output = run(x, p)
    if change:
        x.mul_(2.0)
    grad = torch.randn_like(output)
    arrived = [Arrived(0, output, grad, row_map)]
    return gradients(rerun, arrived, batch_size=B), (x, p, grad)


def _logsum(x, p):
    """Bring rows and the parameter together in a way that has no rule."""
    return (x * p).logsumexp(-1)


@pytest.mark.parametrize("kind", ["major", "minor"])
def test_folded_rows(kind):
    row_map = RowMap(kind)
    found, (x, p, grad) = _found(_logsum, row_map)
    for sample in range(B):
        mine = row_map.samples_of(B * K, B) == sample
        (wanted,) = torch.autograd.grad(_logsum(x[mine], p), p, grad[mine])
        torch.testing.assert_close(found[0][sample], wanted)


def test_operation_that_mixes_samples_is_left_alone():
    assert _found(lambda x, p: _logsum(x - x.mean(0), p), RowMap("major"))[0] is None


def test_rows_read_in_the_wrong_order_are_not_noticed_here_but_samples_do_not_lose_any():
    """Which rows are whose is for the evidence to say; whatever it says, the samples' gradients add up to the whole."""
    found, (x, p, grad) = _found(_logsum, RowMap("minor"))
    torch.testing.assert_close(found[0].sum(0), torch.autograd.grad(_logsum(x, p), p, grad)[0])


def _only_of_batches(x, p):
    """Give the same values for any rows, and no gradient for few of them."""
    return _logsum(x, p if x.shape[0] > K else p.detach())


def test_gradients_that_do_not_add_up_are_not_used():
    assert _found(_only_of_batches, RowMap("major"))[0] is None


def test_data_changed_since_the_forward_is_not_run_on_again():
    assert _found(_logsum, RowMap("major"), change=True)[0] is None


def test_random_operation_is_left_alone():
    assert _found(lambda x, p: torch.nn.functional.dropout(x * p, 0.5), RowMap("major"))[0] is None


def test_rows_that_were_routed_are_left_alone():
    assert _found(_logsum, RowMap("gathered", 0, torch.arange(B * K) % B))[0] is None
