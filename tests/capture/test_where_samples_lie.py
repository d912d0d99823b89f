"""The number of samples and their rows where sizes mislead.

Masks handed over first, folded outputs, models that return their own loss, losses that compare samples.
"""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import BatchAxisError, GhostClipError
from tests.reference import per_sample_gradients, whole_norm

F64 = torch.float64


class _Masked(nn.Module):
    """Takes what all samples share first."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, mask, x):
        h = self.enter(x)
        return self.head(self.attention(h, h, h, attn_mask=mask)[0])


def test_mask_before_the_data():
    """Six positions must not be taken for six samples."""
    model = _Masked().double()
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(BatchAxisError, match=r"6 samples that the model's first input holds"):
        model(torch.zeros(6, 6, dtype=F64), torch.randn(3, 6, 3, dtype=F64))


class _Language(nn.Module):
    """Returns logits of all tokens one after the other, or the loss itself."""

    def __init__(self, *, batch_first=True, mixes=False, own_loss=False):
        super().__init__()
        self.axis, self.mixes, self.own_loss = 0 if batch_first else 1, mixes, own_loss
        self.embedding, self.middle, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids):
        h = self.middle(self.embedding(ids)).tanh()
        if self.mixes:
            h = h - h.mean(self.axis, keepdim=True)
        logits = self.head(h).view(-1, 11)
        return nn.functional.cross_entropy(logits, ids.reshape(-1)) if self.own_loss else logits


def _loss(model, ids):
    out = model(ids)
    return out if out.dim() == 0 else nn.functional.cross_entropy(out, ids.reshape(-1))


def _one_by_one(model, batch):
    """Losses of a model that takes one sample at a time."""
    ids = batch["ids"]
    return torch.stack(
        [_loss(model, ids.select(model.axis, i).unsqueeze(model.axis)) for i in range(ids.shape[model.axis])]
    )


layouts = pytest.mark.parametrize("batch_first", [True, False])
positions = pytest.mark.parametrize("length", [5, 4])
returns = pytest.mark.parametrize("own_loss", [True, False])


@layouts
@positions
@returns
def test_folded_outputs(batch_first, length, own_loss, strategy):
    """Four samples; with four positions only the declared batch axis tells them apart."""
    model = _Language(batch_first=batch_first, own_loss=own_loss).double()
    ids = torch.randint(11, (4, length) if batch_first else (length, 4))
    reference = per_sample_gradients(model, {"ids": ids}, _one_by_one, axes={"ids": model.axis})
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=strategy, batch_first=batch_first)
    clipper.backward(_loss(model, ids))
    norms_B = torch.stack([whole_norm(gradient) for gradient in reference])
    torch.testing.assert_close(clipper.per_sample_norms, norms_B, rtol=1e-10, atol=0.0)


@layouts
@positions
@returns
def test_folded_outputs_of_a_model_that_mixes(batch_first, length, own_loss):
    model = _Language(batch_first=batch_first, mixes=True, own_loss=own_loss)
    ids = torch.randint(11, (4, length) if batch_first else (length, 4))
    ghostclip.GhostClipper(model, max_grad_norm=0.1, batch_first=batch_first)
    with pytest.raises(GhostClipError):
        model(ids)


def test_output_without_samples():
    ghostclip.GhostClipper(model := nn.Sequential(nn.Linear(3, 4), nn.Flatten(0)), max_grad_norm=0.1)
    model(torch.randn(3, 3))
    ghostclip.GhostClipper(model := _Averaged(), max_grad_norm=0.1)
    with pytest.raises(BatchAxisError, match="no axis for them"):
        model(torch.randn(3, 3))


class _States(nn.Module):
    """Returns an output, or only the last states, which have their layers first."""

    def __init__(self, *, only_states):
        super().__init__()
        self.lstm, self.only_states = nn.LSTM(3, 4, num_layers=2, batch_first=True), only_states

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        return h if self.only_states else (out, h)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("only_states", [True, False])
def test_states_with_their_layers_first(only_states, samples):
    """Also where there are as many layers as samples: their axis does not grow with the batch."""
    model = _States(only_states=only_states).double()
    x = torch.randn(samples, 5, 3, dtype=F64)
    reference = per_sample_gradients(model, {"x": x}, _of_states, axes={})
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(_of_states(model, {"x": x}))
    norms_B = torch.stack([whole_norm(gradient) for gradient in reference])
    torch.testing.assert_close(clipper.per_sample_norms, norms_B, rtol=1e-10, atol=0.0)


def _of_states(model, batch):
    out = model(batch["x"])
    return (out if model.only_states else out[1]).square().sum((0, 2))


class _TimeFirst(nn.Module):
    """Takes the batch first and returns time first, as connectionist losses want it."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0]).transpose(0, 1).log_softmax(-1)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_time_first_outputs(samples, strategy):
    model, x = _TimeFirst().double(), torch.randn(samples, 6, 3, dtype=F64)
    targets = torch.randint(1, 5, (samples, 2))

    def losses(model, batch):
        size = len(batch["x"])
        lengths = torch.full((size,), 6), torch.full((size,), 2)
        return nn.functional.ctc_loss(model(batch["x"]), batch["y"], *lengths, reduction="none")

    reference = per_sample_gradients(model, {"x": x, "y": targets}, losses, axes={})
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=strategy)
    clipper.backward(losses(model, {"x": x, "y": targets}))
    norms_B = torch.stack([whole_norm(gradient) for gradient in reference])
    torch.testing.assert_close(clipper.per_sample_norms, norms_B, rtol=1e-10, atol=0.0)


class _Averaged(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        return super().forward(x).mean(0)
