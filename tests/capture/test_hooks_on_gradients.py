"""Hooks that change gradients: a layer's parameters follow them as under autograd, or the hook is refused by name."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip.errors import SampleMixingError, UnsupportedModelError
from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients, trainable

_C = 2.0


def _hear(tensor, hook):
    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


class _Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self._change = change

    def forward(self, x):
        hidden = self._change(self, self.first(x))
        return self.last(self.second(torch.tanh(hidden)))


def _relu_in_place(model, hidden):
    _hear(hidden, lambda grad: grad * 2)
    return _hear(torch.relu_(hidden), lambda grad: grad * 3)


def _removed(model, hidden):
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: grad * 100).remove()
    return hidden


def _with_residual(model, hidden):
    """The gradient of the sum reaches both as one tensor, which one of the hooks changes in place."""
    other = model.first(torch.ones(len(hidden), 4, dtype=hidden.dtype))
    _hear(other, lambda grad: (grad.mul_(3), None)[1])
    return hidden + other


def _checkpointed(reentrant):
    def change(model, hidden):
        def run(given):
            return _hear(model.second(given), lambda grad: grad * 2)

        return checkpoint(run, hidden, use_reentrant=reentrant)

    return change


_ON_TENSORS = {
    "another gradient": lambda model, hidden: _hear(hidden, lambda grad: grad * 2),
    "clamped": lambda model, hidden: _hear(hidden, lambda grad: grad.clamp(-0.1, 0.1)),
    "in place": lambda model, hidden: _hear(hidden, lambda grad: (grad.mul_(2), None)[1]),
    "two": lambda model, hidden: _hear(_hear(hidden, lambda grad: grad * 2), torch.sin),
    "a view": lambda model, hidden: _hear(hidden.view(-1, 5), lambda grad: grad * 2),
    "changed in place between": _relu_in_place,
    "removed": _removed,
    "residual": _with_residual,
    "checkpointed": _checkpointed(reentrant=False),
    "checkpointed, reentrant": _checkpointed(reentrant=True),
}
_ON_MODULES = {
    "full": lambda module: module.register_full_backward_hook(
        lambda _, given, out: None if given[0] is None else (given[0] * 2,)
    ),
    "full, before": lambda module: module.register_full_backward_pre_hook(lambda _, out: [g * 2 for g in out]),
    "forward": lambda module: module.register_forward_hook(lambda _, given, out: _hear(out, lambda grad: grad * 2)),
}


def _clipped(model, x, strategy):
    clipper = engine(strategy)(model, _C)
    for _ in range(2):
        clipper.reset()
        clipper.backward(model(x).square().sum(1))
    return {name: p.grad for name, p in trainable(model).items()}


def _expected(model, x):
    def losses(model, batch):
        return model(batch["x"]).square().sum(1)

    return clip_and_sum(per_sample_gradients(model, {"x": x}, losses, axes={}), _C).clipped


@pytest.mark.parametrize("way", _ON_TENSORS)
def test_hook_on_an_activation_changes_the_gradients_of_its_layer(way, strategy):
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = _expected(_Net(_ON_TENSORS[way]).double(), x)
    torch.testing.assert_close(_clipped(_Net(_ON_TENSORS[way]).double(), x, strategy), expected)


@pytest.mark.parametrize("name", ["first", "second", "last", ""])
@pytest.mark.parametrize("way", _ON_MODULES)
def test_hook_on_a_module_changes_the_gradients_that_it_says(way, name, strategy):
    def make():
        model = _Net(lambda model, hidden: hidden).double()
        _ON_MODULES[way](model.get_submodule(name))
        return model

    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(_clipped(make(), x, strategy), _expected(make(), x))


def test_hook_that_mixes_samples_is_refused(strategy):
    model = _Net(lambda model, hidden: _hear(hidden, lambda grad: grad - grad.mean(0)))
    engine(strategy)(model, _C)
    with pytest.raises(SampleMixingError, match="first"):
        model(torch.randn(6, 4))


def _before_node(model, hidden):
    if hidden.requires_grad:
        hidden.grad_fn.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
    return hidden


def _after_node(model, hidden):
    if hidden.requires_grad:
        hidden.grad_fn.register_hook(lambda given, out: tuple(None if g is None else 2 * g for g in given))
    return hidden


@pytest.mark.parametrize("change", [_before_node, _after_node])
@pytest.mark.parametrize("scalar", [True, False])
def test_hook_on_the_node_of_a_layer_is_refused(change, scalar, strategy):
    model = _Net(change)
    clipper = engine(strategy)(model, _C)
    losses = model(torch.randn(6, 4)).square().sum(1)
    with pytest.raises(UnsupportedModelError, match=r"first \(Linear\): a hook stands on the node.*register_hook"):
        clipper.backward(losses.mean() if scalar else losses)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_module_hook_of_the_first_kind_is_refused(strategy):
    model = _Net(lambda model, hidden: hidden)
    model.second.register_backward_hook(lambda _, given, out: None)
    clipper = engine(strategy)(model, _C)
    losses = model(torch.randn(6, 4)).square().sum(1)
    with pytest.raises(UnsupportedModelError, match="register_full_backward_hook"):
        clipper.backward(losses)


@pytest.mark.parametrize("derived", [True, False])
def test_hook_that_a_forward_sets_on_a_parameter_is_refused(derived):
    def change(model, hidden):
        weight = model.second.weight * 2 if derived else model.second.weight
        return _hear(weight, lambda grad: grad * 2)[:1] + hidden

    model = _Net(change)
    engine("bookkeeping")(model, _C)
    with pytest.raises(UnsupportedModelError, match=r"second.weight' \(register_hook\)"):
        model(torch.randn(6, 4))
