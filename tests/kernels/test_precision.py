"""Products of norms and sums are float32's own, whatever was chosen for the model's."""

import pytest
import torch

from ghostclip import GhostClipper
from ghostclip.kernels.precision import full_precision

needs_switches = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="a torch from before 2.9 has other switches"
)


def _precisions():
    backends = torch.backends
    return [place.fp32_precision for place in (backends.mkldnn.matmul, backends.mkldnn.conv)]


@pytest.fixture(params=["legacy", "newer"])
def chosen(request):
    """Choose less precision in either of torch's two generations of switches."""
    matmul = torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    if request.param == "legacy":
        torch.set_float32_matmul_precision("medium")
    else:
        matmul.fp32_precision = "bf16"
    yield
    torch.set_float32_matmul_precision(before)


@needs_switches
@pytest.mark.usefixtures("chosen")
def test_precision_is_full_inside_and_put_back():
    before = _precisions()
    with full_precision():
        assert _precisions() == ["ieee", "ieee"]
    assert _precisions() == before
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert _precisions() == before
    assert before[0] == "bf16"


@needs_switches
def test_nothing_is_switched_where_nobody_chose_less():
    before = _precisions()
    with full_precision():
        assert _precisions() == before
    assert "bf16" not in before
    assert "tf32" not in before


@needs_switches
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast", "hooks"])
def test_no_sample_passes_the_bound_where_the_model_runs_in_less_precision(strategy):
    """In bfloat16 norms would be too small by up to 2e-4; on CPUs without such units nothing is rounded."""
    torch.manual_seed(0)
    model = torch.nn.Linear(48, 48, bias=False)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    x, weight = torch.randn(8, 17, 48), torch.randn(8, 17, 48)
    for i in range(8):
        clipper.backward(100 * (model(x[i : i + 1]) * weight[i : i + 1]).sum((1, 2)))
        assert model.weight.grad.double().norm() <= 1 + 1e-5
        clipper.reset()
        model.weight.grad = None
