"""Products of norms and sums are float32's own, whatever was chosen for the model's."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ghostclip import GhostClipper
from ghostclip.kernels import products

needs_switches = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="a torch from before 2.9 has other switches"
)


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


class TF32(TorchDispatchMode):
    """Rounds what products of float32 are given to 10 bits, as a GPU does that was not told otherwise."""

    rounded = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Round, and run."""
        name, backends = func.overloadpacket.__name__, torch.backends
        place = {"convolution": backends.cudnn.conv, "convolution_backward": backends.cudnn.conv}
        place |= dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "baddbmm_"), backends.cuda.matmul)
        if name in place and place[name].fp32_precision != "ieee":
            self.rounded += 1
            args = tuple(_ten_bits(item) if isinstance(item, torch.Tensor) else item for item in args)
        return func(*args, **(kwargs or {}))


def _ten_bits(x):
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) >> 13 << 13).view(torch.float32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let products be rounded as on a GPU, by the GPU's switches."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for switches in (products._switches, products._convolution_switches):
        switches.cache_clear()
    yield
    for switches in (products._switches, products._convolution_switches):
        switches.cache_clear()


class Twice(nn.Module):
    """One layer, two inputs: a cross term."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(40, 33)

    def forward(self, x):
        return torch.cat([self.layer(x), self.layer(x.flip(2) + 1)], 1)


class Convolved(nn.Module):
    """Windows, in two groups."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(40, 30, 3, groups=2, stride=2)

    def forward(self, x):
        return self.layer(x.mT)


MODELS = [lambda: nn.Linear(40, 33), Twice, Convolved]


def _clipped(model, strategy):
    """Return norms and sums of a model whose factors no precision changes."""
    torch.manual_seed(1)
    x = torch.randn(5, 17, 40)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    found = []
    for _ in range(2):
        output = model(x)
        weight = torch.linspace(-1, 2, output[0].numel()).sin().view(output.shape[1:])
        losses = (output * weight * torch.arange(1, 6).view(-1, *[1] * weight.dim())).flatten(1).sum(1)
        clipper.backward(losses)
        found += [clipper.per_sample_norms.clone(), *(p.grad.clone() for p in model.parameters())]
        clipper.reset()
        model.zero_grad()
    clipper.remove()
    return found


@needs_switches
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast", "hooks"])
@pytest.mark.parametrize("chosen", ["tf32", "medium", "autocast"])
def test_norms_and_sums_are_those_of_full_precision(model, strategy, chosen, on_a_gpu):
    """Bit for bit: TF32 of a GPU (emulated), bfloat16 of a CPU (where it has it), and autocast around the backward."""
    torch.manual_seed(0)
    made = model()
    wanted = _clipped(made, strategy)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = torch.get_float32_matmul_precision(), matmul.fp32_precision, conv.fp32_precision
    try:
        if chosen == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"
            conv.fp32_precision = "tf32"
            with TF32() as mode:
                got = _clipped(made, strategy)
            assert mode.rounded
        elif chosen == "medium":
            torch.set_float32_matmul_precision("medium")
            got = _clipped(made, strategy)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                got = _clipped_under_autocast(made, strategy)
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.fp32_precision, conv.fp32_precision = before[1:]
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def _clipped_under_autocast(model, strategy):
    """Return the same with autocast on from the backward on."""
    backward = GhostClipper.backward

    def cast(self, losses):
        with torch.autocast("cpu", torch.bfloat16):
            return backward(self, losses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GhostClipper, "backward", cast)
        return _clipped(model, strategy)
