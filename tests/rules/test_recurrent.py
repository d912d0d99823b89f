"""Recurrent layers written out: torch's own values and gradients, at torch's cost."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ghostclip
from benchmarks.flops import counter
from ghostclip.errors import UncoveredParameterError
from ghostclip.rules.recurrent import WRITTEN_OUT, recurrent_product

KINDS = {
    "lstm": lambda **options: nn.LSTM(4, 5, **options),
    "gru": lambda **options: nn.GRU(4, 5, **options),
    "rnn_tanh": lambda **options: nn.RNN(4, 5, **options),
    "rnn_relu": lambda **options: nn.RNN(4, 5, nonlinearity="relu", **options),
}
LENGTHS = torch.tensor([6, 4, 4, 1])


class _Calls(torch.overrides.TorchFunctionMode):
    """Runs recurrent functions as they are written out, with detached weights, or torch's own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own, self.seen = own, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in WRITTEN_OUT:
            return func(*args, **(kwargs or {}))
        self.seen += 1
        return (WRITTEN_OUT[name] if self.own else func)(*args, **(kwargs or {}))


def _leaves(tree: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if leaf is not None]


def _values_and_gradients(module: nn.Module, inputs: tuple, call: object, *, own: bool) -> list[Tensor]:
    """Return the outputs, and gradients of a wavy sum of them with respect to all inputs."""
    inputs = torch.utils._pytree.tree_map(lambda t: t.detach().requires_grad_(), inputs)
    torch.manual_seed(7)
    with _Calls(own=own) as calls:
        outputs = [leaf for leaf in _leaves(call(module, inputs)) if leaf.is_floating_point()]
    assert calls.seen == 1
    total = sum((output * torch.sin(torch.arange(output.numel()).view(output.shape))).sum() for output in outputs)
    grads = torch.autograd.grad(total, _leaves(inputs))
    return [*outputs, *grads]


def _padded(module: nn.Module, inputs: tuple) -> object:
    return module(*inputs)


def _packed(module: nn.Module, inputs: tuple) -> object:
    x, *state = inputs
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True)
    return module(packed, *state)


def _inputs(name: str, *, sides: int, width: int = 5, given: bool = True) -> tuple:
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    states = (torch.randn(2 * sides, 4, width), torch.randn(2 * sides, 4, 5))
    states = tuple(state.double() for state in states)
    return (x, states if name == "lstm" else states[0]) if given else (x,)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("call", [_padded, _packed], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "dropout": 0.4}, {"bias": False, "proj_size": 3}], ids=str
)
@pytest.mark.parametrize("name", KINDS)
def test_written_out_layers_have_torchs_values_and_gradients(name, options, call):
    if "proj_size" in options and name != "lstm":
        options = {"bias": False, "dropout": 0.4}
    torch.manual_seed(0)
    module = KINDS[name](num_layers=2, batch_first=True, **options).double().requires_grad_(False)
    inputs = _inputs(name, sides=2 if module.bidirectional else 1, width=options.get("proj_size", 5))
    own, torchs = (_values_and_gradients(module, inputs, call, own=flag) for flag in (True, False))
    for mine, theirs in zip(own, torchs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda cell: cell.__name__)
def test_written_out_cells_have_torchs_values_and_gradients(cell):
    torch.manual_seed(0)
    module = cell(4, 5).double().requires_grad_(False)
    states = (torch.randn(3, 5).double(), torch.randn(3, 5).double())
    inputs = (torch.randn(3, 4).double(), states if cell is nn.LSTMCell else states[0])
    own, torchs = (_values_and_gradients(module, inputs, _padded, own=flag) for flag in (True, False))
    for mine, theirs in zip(own, torchs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


class _Last(nn.Module):
    """A recurrent layer with a head on its last output."""

    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 2)

    def forward(self, x_BTI: Tensor) -> Tensor:
        return self.head(self.rnn(x_BTI)[0][:, -1])


def _flops(model: nn.Module, x: Tensor, clipper: ghostclip.GhostClipper | None) -> int:
    def step() -> None:
        losses = model(x).square().sum(1)
        losses.sum().backward() if clipper is None else clipper.backward(losses)

    step()
    with counter() as counted:
        step()
    return counted.get_total_flops()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_clipping_costs_little_more_than_training(kind):
    # torch counts the fused kernels of float32 as nothing, those of float64 product by product.
    x = torch.randn(8, 64, 60).double().requires_grad_()
    model = _Last(kind(60, 60, batch_first=True), 60).double()
    plain = _flops(model, x, None)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping") as clipper:
        assert _flops(model, x, clipper) <= 1.05 * plain
        assert "one gradient per sample" not in str(clipper.coverage())


class _Lengths(nn.Module):
    """A packed LSTM that is told the lengths of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x_BTI: Tensor, lengths_B: Tensor) -> Tensor:
        packed = pack_padded_sequence(x_BTI, lengths_B, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x_BTI.shape[1])
        return self.head(out).sum(1)


def test_empty_batch_of_packed_sequences():
    model = _Lengths()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for size in (0, 3, 0):
            model.zero_grad()
            losses = model(torch.randn(size, 6, 4), torch.tensor([5, 6, 2])[:size]).square().sum(1)
            assert losses.shape == (size,)
            clipper.backward(losses)
            moved = any(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters())
            assert moved is (size > 0)


def test_weights_that_nobody_watches_are_refused():
    weight = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(UncoveredParameterError, match="assigned to samples"):
        recurrent_product(torch.randn(3, 4), weight, None, torch.randn(3, 4))
