"""Frozen weights in few bits, as libraries hold them: beside adapters, sums are those of one sample at a time."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients, trainable

_C = 0.5
_ATEN = torch.ops.aten


class _Eighth(Tensor):
    """A matrix of whole numbers and one scale, which knows how to be multiplied with and nothing else."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor):
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, *bias = args
            with torch._C.DisableTorchFunctionSubclass():
                return functional.linear(x, weight.codes * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (_ATEN.detach.default, _ATEN.clone.default, _ATEN.alias.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(f"{func} of {cls.__name__}")


class _Wrapped(nn.Module):
    """A linear layer whose weight is a tensor made of others."""

    def __init__(self):
        super().__init__()
        codes = torch.randint(-8, 8, (6, 4), dtype=torch.int8)
        self.weight = nn.Parameter(_Eighth(codes, torch.tensor(0.1, dtype=torch.float64)), requires_grad=False)

    def forward(self, x):
        return functional.linear(x, self.weight)


class _State:
    scale = None


class _HandedOver(nn.Module):
    """A linear layer whose weight has its scale beside it until the first forward, which hands it to the layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-8, 8, (6, 4), dtype=torch.int8), requires_grad=False)
        self.weight.scale = 0.1
        self.state = _State()

    def forward(self, x):
        if self.weight.scale is not None:
            self.state.scale, self.weight.scale = self.weight.scale, None
        if self.state.scale is None:
            self.state.scale = 1.0
        return functional.linear(x, self.weight.to(x.dtype) * self.state.scale)


class _Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.down, self.up = base(), nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        for layer in (self.down, self.up):
            layer.double()

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


@pytest.mark.parametrize("base", [_Wrapped, _HandedOver])
def test_a_quantised_base_is_left_as_it_is(strategy, base, caplog):
    batch = {"x": torch.randn(5, 4, dtype=torch.float64)}
    expected = clip_and_sum(per_sample_gradients(_Adapted(base), batch, _losses, axes={}), _C).clipped
    model = _Adapted(base)
    clipper = engine(strategy)(model, _C)
    for _ in range(2):
        clipper.reset()
        clipper.backward(_losses(model, batch))
        torch.testing.assert_close({name: p.grad for name, p in trainable(model).items()}, expected)
    assert "not checked" not in caplog.text
