"""Parameters that exist only while their module runs: substituted after they were gathered, given back before they go.

Sharded modules work so: a hook before the forward gathers a module's parameters, one after it frees them.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip.capture.context import CaptureContext
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.clipping.passes import BookKeeping
from tests.reference import per_sample_gradients, whole_norm

B = 5


class _Gathered:
    """Frees a module's parameters but while it runs; notes what it found in their place."""

    def __init__(self, module):
        self.full = {name: p.detach().clone() for name, p in module.named_parameters(recurse=False)}
        self.before, self.after = [], []
        self.empty = {name: nn.Parameter(torch.empty(0, dtype=p.dtype)) for name, p in self.full.items()}
        self._put(module, self.empty)
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self.free, always_call=True)

    def gather(self, module, args):
        self.before += [type(p) for p in module._parameters.values()]
        self._put(module, {name: nn.Parameter(value) for name, value in self.full.items()})

    def free(self, module, args, output):
        self.after += [type(p) for p in module._parameters.values()]
        self._put(module, self.empty)

    def _put(self, module, values):
        for name, value in values.items():
            module._parameters[name] = value


class _Block(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.inner, self.scale, self.checkpointed = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), checkpointed

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False).tanh() * self.scale
        return x + self.inner(x).tanh() * self.scale


def _model(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), _Block(**options), _Block(**options), nn.Linear(4, 2)).double()


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def _norms(model, units, x):
    capture = CaptureContext(
        model, batch_first=True, on_backward=lambda use: None, on_loss=lambda *loss: 1.0, units=units
    )
    try:
        found = BookKeeping({})
        loss = _losses(model, {"x": x}).sum()
        with capture.listening(found):
            capture.run_backward([loss], [None])
        with torch.no_grad():
            return found.norms().norm_GB(len(x))[0]
    finally:
        capture.close()


def _expected(x, **options):
    gradients = per_sample_gradients(_model(**options), {"x": x}, _losses, axes={})
    return torch.stack([whole_norm(gradient) for gradient in gradients])


@pytest.mark.parametrize(
    ("which", "checkpointed"), [("leaves", True), ("blocks and leaves", False), ("model too", True)]
)
def test_norms_are_those_of_the_whole_parameters(which, checkpointed):
    model = _model(checkpointed=checkpointed)
    x = torch.randn(B, 3, dtype=torch.float64)
    units = [model[1].inner, model[2].inner]
    units += [model[1], model[2]] if which != "leaves" else []
    units += [model, model[0], model[3]] if which == "model too" else []
    gathered = [_Gathered(unit) for unit in units]
    norms_B = _norms(model, units, x)
    assert torch.allclose(norms_B.double(), _expected(x, checkpointed=checkpointed), rtol=1e-12)
    for one in gathered:
        assert TrackedTensor not in one.before + one.after, "hooks that gather and free meet the parameters themselves"
