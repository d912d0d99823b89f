"""Function modes of the user's own, active around a private forward."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ghostclip
from tests.reference import clip_and_sum, per_sample_gradients


class _Doubling(TorchFunctionMode):
    """Twice the input of every linear layer, as modes that cast or quantize change it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            args = (2 * args[0], *args[1:])
        return func(*args, **(kwargs or {}))


class _Doubled(nn.Linear):
    def forward(self, x_BF):
        return super().forward(2 * x_BF)


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def test_what_a_mode_changes_is_captured():
    layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    batch = {"x": torch.randn(3, 5, dtype=torch.float64)}
    model = nn.Sequential(*layers).double()
    same = nn.Sequential(_Doubled(5, 4), nn.Tanh(), _Doubled(4, 3)).double()
    same.load_state_dict(model.state_dict())
    wanted = clip_and_sum(per_sample_gradients(same, batch, _losses, axes={}), 0.5).clipped
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    # Forwards 2 and 3 are neither decided on nor proved.
    for _ in range(4):
        model.zero_grad()
        with _Doubling():
            clipper.backward(_losses(model, batch))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name])
