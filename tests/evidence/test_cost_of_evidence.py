"""What a forward that is proved costs: how often the model runs, and what a probe draws and reads."""

import queue

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.capture.row_maps import RowMap
from ghostclip.errors import SampleMixingError
from ghostclip.evidence.probe import GradientSource, Start, cotangent, nonzero_rows

B = 6


# No list: what a forward reaches is put back after runs that are not the user's.
_SEEN: queue.SimpleQueue[int] = queue.SimpleQueue()


class _Counted(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 4), nn.Dropout(dropout)

    def forward(self, x):
        _SEEN.put(len(x))
        return self.dropout(self.layer(x))


def _seen() -> list[int]:
    return [_SEEN.get() for _ in range(_SEEN.qsize())]


@pytest.mark.parametrize(
    ("dropout", "extra"),
    # Three samples, the rehearsal, one of every two neighbours and the first half replaced, half of them by themselves;
    # with open gates four samples, one of every two neighbours replaced, and the other one; the forward itself.
    # With dropout also the batch without it.
    [(0.0, [3, B, B, B, B // 2, 4, 4, 4, B]), (0.5, [3, B, B, B, B, B // 2, 4, 4, 4, B])],
)
def test_how_often_the_model_runs(dropout, extra):
    model = _Counted(dropout)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        assert extra == _seen()
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        assert _seen() == [B]
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        _seen()
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
    # The drawn half replaced and the other one, and the second half alone.
    again = [B, B, B, *([B] if dropout else []), B // 2, B]
    assert again == _seen()


class _Heard(torch.autograd.Function):
    times = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        _Heard.times += 1
        return grad


class _Layers(nn.Module):
    """Hands on a layer's own output beside the model's."""

    def __init__(self, *, inner=None):
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(3, 4), nn.Linear(4, 5), inner

    def forward(self, x):
        h = _Heard.apply(self.first(x))
        if self.inner is not None:
            self.inner.append(h)
        return self.last(h)


def _refused(clipper, loss):
    with pytest.raises(SampleMixingError):
        clipper.backward(loss)


@pytest.mark.parametrize("scalar", [False, True])
def test_no_layer_runs_backward_for_the_proof_of_a_loss(scalar):
    model = _Layers()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        output = model(torch.randn(B, 3))
        _Heard.times = 0
        losses = nn.functional.cross_entropy(output, torch.arange(B) % 5, reduction="none")
        clipper.backward(losses.mean() if scalar else losses)
        # The step's own.
        assert _Heard.times == 1


@pytest.mark.parametrize("scalar", [False, True])
def test_a_loss_that_mixes_samples_of_the_outputs_or_of_a_layer_beside_them(scalar):
    def lossy(losses):
        return losses.mean() if scalar else losses

    for mixes_inside in (False, True):
        inner = []
        model = _Layers(inner=inner)
        with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
            output, other = model(torch.randn(B, 3)), inner[0]
            rolled = (other if mixes_inside else output).roll(1, 0)
            _refused(clipper, lossy(output.square().sum(1) * rolled.square().sum(1)))


def test_a_hook_that_mixes_samples_of_an_output():
    model = _Layers()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        output = model(torch.randn(B, 3))
        output.register_hook(lambda grad: grad + grad.roll(1, 0))
        _refused(clipper, output.square().sum(1))


def test_an_output_that_is_changed_in_place():
    model = _Layers()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        output = model(torch.randn(B, 3))
        output += output.detach().sum(0)
        output *= output.roll(1, 0)
        _refused(clipper, output.square().sum(1))


NAN, INF = float("nan"), float("inf")
ROWS = [
    ([0.0, 0.0], False), ([0.0, -0.0], False), ([0.0, 1e-45], True), ([-1.0, 0.0], True), ([NAN, 0.0], False),
    ([NAN, -2.0], True), ([INF, 0.0], True), ([NAN, INF], True), ([-INF, INF], True), ([NAN, NAN], False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_that_are_not_zero(dtype, wide):
    rows = [values for values, _ in ROWS if dtype is not torch.bfloat16 or 1e-45 not in values]
    wanted = [found for values, found in ROWS if values in rows]
    held = torch.tensor(rows).to(dtype)
    held = held.unsqueeze(1).expand(-1, 3, -1).mT if wide else held
    assert nonzero_rows(held).tolist() == wanted
    assert nonzero_rows(held[:0]).tolist() == []
    assert nonzero_rows(held[:, :0]).tolist() == [False] * len(rows)


@pytest.mark.parametrize(
    ("shape", "row_map"),
    [
        ((B,), RowMap("axis", 0)),
        ((B, 3, 4), RowMap("axis", 0)),
        ((3, B, 4), RowMap("axis", 1)),
        ((2 * B, 4), RowMap("major", 0)),
        ((2 * B, 4), RowMap("minor", 0)),
    ],
)
def test_a_probe_begins_in_rows_of_its_samples_alone_and_in_all_of_these(shape, row_map):
    place = GradientSource.of(torch.zeros(shape, dtype=torch.float64))
    grad = cotangent(Start(place, row_map), batch_size=B, weights={1: 1.0, 4: 1.0})
    assert grad.shape == shape
    rows_B = row_map.split(grad, len(shape), B).flatten(1)
    others = [sample for sample in range(B) if sample not in (1, 4)]
    assert not rows_B[others].any()
    assert bool((rows_B[[1, 4]] > 0).all())
    assert len(rows_B[[1, 4]].unique()) == 2 * rows_B.shape[1]
