"""Layers under Opacus's names compute what torch's compute, with torch's parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ghostclip
from ghostclip.compat.opacus import layers
from ghostclip.errors import UnsupportedModelError

opacus = pytest.importorskip("opacus")
opacus_rnn = pytest.importorskip("opacus.layers.dp_rnn")

RECURRENT = {"DPLSTM": nn.LSTM, "DPGRU": nn.GRU, "DPRNN": nn.RNN}
OPTIONS = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.5, "batch_first": True},
]
ATTENTION = [
    {},
    {"batch_first": True},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 4, "vdim": 5, "bias": False},
]


def _same(first: object, second: object) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, (tuple, PackedSequence)):
        for one, two in zip(first, second, strict=True):
            _same(one, two)
    else:
        assert first == second


def _swap_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Load ours into theirs and back, strictly."""
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_torchs(name, options):
    ours, theirs = getattr(layers, name)(4, 5, **options), RECURRENT[name](4, 5, **options)
    _swap_weights(ours, theirs)
    x = torch.randn(3, 6, 4)
    for given in (x, pack_padded_sequence(x, torch.tensor([2, 6, 1]), batch_first=True, enforce_sorted=False)):
        torch.manual_seed(3)
        expected = theirs(given)
        torch.manual_seed(3)
        _same(ours(given), expected)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_projection():
    ours, theirs = layers.DPLSTM(4, 5, proj_size=3), nn.LSTM(4, 5, proj_size=3)
    _swap_weights(ours, theirs)
    x = torch.randn(6, 3, 4)
    _same(ours(x), theirs(x))
    with pytest.raises(UnsupportedModelError, match="DPRNN: proj_size=3"):
        layers.DPRNN(4, 5, proj_size=3)


def _attend(module: nn.Module, options: dict, **asked: object) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(5)
    shape = (2, 5) if options.get("batch_first") else (5, 2)
    query = torch.randn(*shape, 6)
    key = torch.randn(*shape, options.get("kdim", 6))
    value = torch.randn(*shape, options.get("vdim", 6))
    return module(query, key, value, **asked)


_CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
_PADDING = torch.arange(5) >= torch.tensor([[3], [5]])


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"attn_mask": _CAUSAL, "need_weights": False, "is_causal": True},
        {"attn_mask": torch.zeros(5, 5).masked_fill(_CAUSAL, -1e9), "average_attn_weights": False},
        {"attn_mask": _CAUSAL.expand(6, 5, 5), "key_padding_mask": _PADDING},
    ],
    ids=["plain", "causal", "float mask", "masks of heads"],
)
@pytest.mark.parametrize("options", ATTENTION, ids=str)
def test_attention_is_torchs(options, asked):
    ours = layers.DPMultiheadAttention(6, 3, **options)
    theirs = nn.MultiheadAttention(6, 3, **options)
    _swap_weights(ours, theirs)
    _same(_attend(ours, options, **asked), _attend(theirs, options, **asked))


def test_weights_of_opacus_attention_load():
    theirs = opacus.layers.DPMultiheadAttention(6, 3, add_bias_kv=True)
    ours = layers.DPMultiheadAttention(6, 3, add_bias_kv=True)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(_attend(ours, {}), _attend(theirs, {}))


class _Renamed(layers.RenameParamsMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.set_rename_map({"scale": "gain", "inner.weight": "weight_ih", "inner.bias": "bias_ih"})
        self.inner = layers.RNNLinear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def test_renamed_parameters_are_clipped_once():
    torch.manual_seed(0)
    model, x = _Renamed(), torch.randn(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(model(x).square().sum(1))
        norms_B = clipper.per_sample_norms
    for sample in range(3):
        grads = torch.autograd.grad(model(x[sample : sample + 1]).square().sum(), list(model.parameters()))
        want = torch.stack([grad.norm() for grad in grads]).norm()
        torch.testing.assert_close(norms_B[sample], want, rtol=1e-5, atol=0.0)
