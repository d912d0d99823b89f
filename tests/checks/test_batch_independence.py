"""Samples that follow others without a gradient between them: by number, by counting, by another branch."""

import copy
import itertools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import SampleMixingError


def _by_number(model, x):
    return model.layer(x) / len(x)


def _by_counting(model, x):
    """Rows of a kind beyond the third are dropped, whichever sample they belong to."""
    kept = ((x[:, 1] > 0).cumsum(0) <= 3).to(x.dtype)
    return model.layer(x) * kept.unsqueeze(-1)


def _by_branch(model, x):
    """A mask only where some sample is padded."""
    h = model.layer(x)
    return h * 0.5 if bool((x == 0).any()) else h


def _by_each_own(model, x):
    return model.layer(x) * (x.mean(1, keepdim=True) > 0)


class _Model(nn.Module):
    def __init__(self, way, *, dropout=0.0):
        super().__init__()
        self.layer, self.way, self.dropout = nn.Linear(3, 4), way, nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.way(self, x))


def _batch():
    x = torch.randn(5, 3)
    x[0, 0] = 0.0
    x[:, 1] = torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0])
    return x


def _masked(h):
    order = torch.rand(h.shape).argsort(1)
    return h * (order < 2)


_SYSTEM = random.SystemRandom()
DRAWS = {
    "like another": lambda h: h + torch.randn_like(h),
    "in place": lambda h: h * h.new_empty((len(h), 1)).bernoulli_(0.7),
    # What it is drawn into may hold anything.
    "in place, by default": lambda h: h * h.new_full((len(h), 1), _SYSTEM.choice((-1.0, 1.0))).bernoulli_(),
    "by size": lambda h: h * torch.rand(len(h), 1),
    "one for all": lambda h: h * torch.rand([]) + torch.randn(1, h.shape[1]),
    "rows of positions": lambda h: (h.reshape(-1, 1) + torch.randn(h.numel(), 1)).view_as(h),
    "with probabilities": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "a distribution": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
    "an order": _masked,
    "Gumbel's": nn.functional.gumbel_softmax,
}


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_follows_the_number_of_samples_is_seen_beside_random_numbers(draw, size):
    """Every sample meets the same ones, so that it may stand in another place, or among fewer."""

    def forward(way):
        clipper = ghostclip.GhostClipper(model := _Model(way), max_grad_norm=0.1)
        model(torch.randn(size, 3))
        return str(clipper.unchecked)

    for own in (lambda model, x: DRAWS[draw](model.layer(x)), lambda model, x: model.layer(DRAWS[draw](x))):
        assert "left out" not in forward(own)
    for follows in (lambda h: h / len(h), lambda h: h + (torch.arange(len(h)) == 1).unsqueeze(1) * len(h)):
        with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
            forward(lambda model, x, follows=follows: follows(DRAWS[draw](model.layer(x))))


OVER_THE_BATCH = {
    "over their mean, as DropBlock has its masks": lambda h: h * (kept := torch.rand_like(h)) / kept.mean(),
    "over their deviation": lambda h: h + (noise := h.new_empty(h.shape).normal_()) / noise.std(),
    "their sum": lambda h: h * torch.rand(len(h), 1).sum(),
}


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("draw", OVER_THE_BATCH)
def test_statistics_of_random_numbers_over_the_batch_are_refused(draw, size):
    """Without a sample its numbers are missing, too: all other samples would be scaled in another way."""
    ghostclip.GhostClipper(model := _Model(lambda model, x: OVER_THE_BATCH[draw](model.layer(x))), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="met other random numbers"):
        model(torch.randn(size, 3))


def test_random_numbers_that_all_samples_have_in_common_may_be_as_many_as_these():
    ghostclip.GhostClipper(model := _Model(lambda m, x: m.layer(x) * torch.rand(5, 1).mean()), max_grad_norm=0.1)
    model(torch.randn(5, 3))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_any_place_that_any_sample_follows_is_seen(size):
    """One sample adds what stands at the place of another, whichever two they are: no pair is left to chance."""
    for sample, other in itertools.permutations(range(size), 2):

        def _by_place(model, x, sample=sample, other=other):
            h = model.layer(x)
            if len(x) <= max(sample, other):
                return h
            follows = torch.arange(len(x)).unsqueeze(1) == sample
            return h + torch.where(follows, x[other].detach().sum(), 0.0)

        model = _Model(_by_place)
        ghostclip.GhostClipper(model, max_grad_norm=0.1)
        with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
            model(torch.randn(size, 3))


@pytest.mark.parametrize("way", [_by_number, _by_counting, _by_branch])
def test_dependence_is_refused(way):
    for dtype in (torch.float32, torch.float64):
        model = _Model(way).to(dtype)
        ghostclip.GhostClipper(model, max_grad_norm=0.1)
        with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
            model(_batch().to(dtype))


class _Random(_Model):
    """Draws from torch's, Python's and NumPy's generators."""

    def forward(self, x):
        h = self.way(self, x)
        return self.dropout(h) * (0.5 + random.random()) + np.random.rand() + torch.rand(len(x), 1)


@pytest.mark.parametrize("kind", [_Model, _Random])
@pytest.mark.parametrize("way", [_by_counting, _by_branch])
def test_dependence_is_refused_under_dropout(way, kind):
    """The same random numbers are drawn for the batch and for its neighbour."""
    model = kind(way, dropout=0.5)
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="half of the samples were replaced"):
        model(_batch())


def _attention(h, dropout):
    return nn.functional.scaled_dot_product_attention(h, h, h, None, dropout)


def _packed(layer, h):
    packed = nn.utils.rnn.pack_padded_sequence(h, [3] * len(h), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=4)[0]


_RNN = {"num_layers": 2, "dropout": 0.5, "batch_first": True}
_DROPOUTS = {
    "dropout": (nn.Dropout(), None),
    "in place": (nn.Dropout(inplace=True), None),
    "alpha": (nn.AlphaDropout(), None),
    "feature alpha": (nn.FeatureAlphaDropout(), None),
    "1d": (nn.Dropout1d(), None),
    "2d": (nn.Dropout2d(), lambda layer, h: layer(h[..., None])[..., 0]),
    "3d": (nn.Dropout3d(), lambda layer, h: layer(h[..., None, None])[..., 0, 0]),
    "torch.dropout": (None, lambda layer, h: torch.dropout(h, 0.5, True)),
    "torch.dropout_": (None, lambda layer, h: torch.dropout_(h * 1, p=0.5, train=True)),
    "torch.feature_dropout": (None, lambda layer, h: torch.feature_dropout(h, 0.5, train=True)),
    "native": (None, lambda layer, h: torch.native_dropout(h, 0.5, True)[0]),
    "by place": (None, lambda layer, h: nn.functional.dropout(h, 0.5, True)),
    "attention by place": (None, lambda layer, h: _attention(h, 0.1)),
    "attention": (nn.MultiheadAttention(3, 1, 0.5, batch_first=True), lambda layer, h: layer(h, h, h)[0]),
    "lstm": (nn.LSTM(3, 3, **_RNN), lambda layer, h: layer(h)[0]),
    "gru": (nn.GRU(3, 3, **_RNN), lambda layer, h: layer(h)[0]),
    "rnn": (nn.RNN(3, 3, **_RNN), lambda layer, h: layer(h)[0]),
    "relu rnn": (nn.RNN(3, 3, nonlinearity="relu", **_RNN), lambda layer, h: layer(h)[0]),
    "packed lstm": (nn.LSTM(3, 3, **_RNN), _packed),
}


class _Dropping(nn.Module):
    """Sequences through some layer with dropout, divided by a number."""

    def __init__(self, kind, divisor):
        super().__init__()
        self.layer, self.call = _DROPOUTS[kind]
        self.layer, self.divisor, self.first = copy.deepcopy(self.layer), divisor, nn.Linear(3, 3)
        if kind == "relu rnn":
            # Weights whose units are all off would leave nothing to divide.
            for parameter in self.layer.parameters():
                nn.init.constant_(parameter, 0.5)

    def forward(self, x):
        h = self.first(x)
        h = self.layer(h) if self.call is None else self.call(self.layer, h)
        return h / self.divisor(x)


@pytest.mark.parametrize("recurrent", [False, True])
def test_division_by_the_number_of_samples_is_refused_under_dropout(recurrent):
    x = torch.randn(5, 4, 3)
    for kind in (kind for kind, (layer, _) in _DROPOUTS.items() if isinstance(layer, nn.RNNBase) == recurrent):
        ghostclip.GhostClipper(model := _Dropping(kind, len), max_grad_norm=0.1)
        with pytest.raises(SampleMixingError, match="half of the samples were left out"):
            model(x)
        with ghostclip.GhostClipper(model := _Dropping(kind, lambda x: 5), max_grad_norm=0.1) as clipper:
            one, two = model(x), model(x)
            assert "batch independence" not in str(clipper.unchecked), kind
            assert not torch.equal(one, two), "dropout is on outside the check"


class _FromPlaceToPlace(nn.Module):
    """Adds the mean over all samples at one position, and takes it away at another."""

    def __init__(self, one, other):
        super().__init__()
        self.places, self.first, self.second = (one, other), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        signs = torch.zeros(x.shape[1], 1, dtype=hidden.dtype)
        signs[self.places[0]], signs[self.places[1]] = 1.0, -1.0
        return self.second(hidden.tanh()) + 0.01 * signs * (hidden - hidden.detach()).mean((0, 1))


@pytest.mark.parametrize("other", [0, 1, 4, 9, 21, 36])
def test_what_goes_from_place_to_place_is_seen_in_16_bits(other):
    """Numbers of 16 bits come again along an axis of 48; with the same ones at both places nothing would be left."""
    model = _FromPlaceToPlace(5, other)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 48, 4))


class _Raising(_Model):
    def forward(self, x):
        assert torch.is_grad_enabled()
        return super().forward(x)


@pytest.mark.parametrize(("way", "dropout"), [(_by_number, 0.0), (_by_counting, 0.5), (_by_branch, 0.0)])
def test_dependence_is_refused_where_the_model_raises_without_gradients(way, dropout):
    ghostclip.GhostClipper(model := _Raising(way, dropout=dropout), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        model(_batch())


class _Experts(nn.Module):
    """Two experts, the sign of a record's first entry tells whose; each serves its first ``room(B)`` records."""

    def __init__(self, room, dropout=0.0):
        super().__init__()
        self.experts, self.room = nn.ModuleList([nn.Linear(3, 4) for _ in range(2)]), room
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0][: self.room(len(x))]
            out = out.index_add(0, rows, self.dropout(expert(x[rows])))
        return out


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("signs", ["++----", "+-", "++-", "-++-+-+-+"])
def test_experts_that_serve_half_of_the_batch_are_refused(signs, dropout):
    x = torch.randn(len(signs), 3)
    x[:, 0] = torch.tensor([1.0 if sign == "+" else -1.0 for sign in signs])
    ghostclip.GhostClipper(model := _Experts(lambda size: max(1, size // 2), dropout), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="half of the samples were replaced"):
        model(x)
    with ghostclip.GhostClipper(_Experts(lambda size: size, dropout), max_grad_norm=0.1) as clipper:
        clipper.backward(clipper.model(x).square().sum(1))
        assert "batch independence" not in str(clipper.unchecked)


@pytest.mark.parametrize("way", [_by_number, _by_counting, _by_branch])
@pytest.mark.parametrize("inside", [True, False])
def test_dependence_is_refused_in_16_bits(way, inside):
    """Under autocast, and where the model itself is in 16 bits and returns more."""
    model = _Model(way) if inside else nn.Sequential(_Model(way).bfloat16(), _Cast())
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    x = _batch() if inside else _batch().bfloat16()
    with pytest.raises(SampleMixingError), torch.autocast("cpu", torch.bfloat16, enabled=inside):
        model(x)


class _Cast(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("size", [2, 5, 33])
def test_own_rows_in_16_bits_are_not(size):
    deep = [layer for _ in range(6) for layer in (nn.Linear(40, 40), nn.LayerNorm(40), nn.GELU())]
    model = nn.Sequential(*deep, nn.Dropout(0.3))
    for dropout in (False, True):
        model[-1].train(dropout)
        with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper, torch.autocast("cpu", torch.bfloat16):
            clipper.backward(model(torch.randn(size, 40)).float().square().sum(1))
            assert "batch independence" not in str(clipper.unchecked)


class _Routed(nn.Module):
    """Experts with dropout inside: how many rows an expert has, and which numbers they meet, follows from data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)) for _ in range(3)])

    def forward(self, x):
        chosen, out = x.argmax(1), x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_routed_rows_meet_other_numbers():
    for seed in range(4):
        torch.manual_seed(seed)
        model = _Routed()
        with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
            clipper.backward(model(torch.randn(7, 3)).square().sum(1))


def _trained(model, *, probe):
    """Return the weights after some steps of plain descent on clipped sums."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = copy.deepcopy(model)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=probe) as clipper:
        for _ in range(5):
            clipper.backward(model(_batch()).square().sum(1))
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
            clipper.reset()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("kind", "autocast"), [(_Model, True), (_Random, False), (_Raising, False)])
def test_training_is_the_same_with_and_without(kind, autocast):
    model = kind(_by_each_own, dropout=0.5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first, second = _trained(model, probe=True), _trained(model, probe=False)
    assert all(map(torch.equal, first, second))


def _partners(shift, stride):
    """Samples follow, detached, the one that is so far behind them or before them within blocks of so many."""

    def way(model, x):
        h = model.layer(x)
        found = [(i // stride * stride + (i + shift) % stride) % len(h) for i in range(len(h))]
        return h + 2 * h[torch.tensor(found)].detach()

    return way


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("size", [2, 4, 9])
def test_neighbours_that_follow_each_other_are_refused_at_once(size, dropout):
    ghostclip.GhostClipper(model := _Model(_partners(1, 2), dropout=dropout), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="half of the samples were replaced"):
        model(torch.randn(size, 3))


@pytest.mark.parametrize(("shift", "stride", "size"), [(2, 4, 16), (4, 8, 32), (1, 4, 16), (3, 8, 16)])
def test_samples_that_follow_others_anywhere_are_refused_within_some_proofs(shift, stride, size):
    ghostclip.GhostClipper(model := _Model(_partners(shift, stride)), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="half of the samples were"):
        [model(torch.randn(size, 3)) for _ in range(16)]


class _Placed(nn.Module):
    """Adds what a table holds for each place along the first axis, which is the samples'."""

    def __init__(self, table):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(40, 1, 4)) if table == "parameter" else nn.Buffer(torch.randn(40, 1, 4))

    def forward(self, x):
        h = self.first(x)
        return self.second(torch.tanh(h + self.table[: h.size(0)]))


@pytest.mark.parametrize(("table", "size"), [("parameter", 2), ("buffer", 3), ("buffer", 8)])
def test_what_follows_the_place_of_a_sample_is_refused(size, table):
    ghostclip.GhostClipper(model := _Placed(table), max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match=r"half of the samples were left out.*a sample's place"):
        model(torch.randn(size, 5, 3))


def _multiplied(h, values):
    return h * torch.as_tensor(np.array(values))[:, None].to(h.dtype)


# What a model may do with one value for each sample that comes as no tensor, and how such values may come.
_BESIDE = {
    "numbers": (lambda n: [float(k) for k in range(1, n + 1)], _multiplied),
    "a tuple": (lambda n: tuple(range(1, n + 1)), _multiplied),
    "pairs": (
        lambda n: [1.0 + k for k in range(n)],
        lambda h, v: torch.stack([a * b for a, b in zip(h, v, strict=False)]),
    ),
    "tensors": (lambda n: [torch.full((1,), 1.0 + k) for k in range(n)], lambda h, v: h * torch.stack(v)),
    "in a dict": (lambda n: {"scale": list(range(1, n + 1))}, lambda h, v: _multiplied(h, v["scale"])),
    "an array": (lambda n: np.arange(1.0, n + 1), _multiplied),
    "arrays": (lambda n: [np.full(1, 1.0 + k) for k in range(n)], lambda h, v: h * torch.from_numpy(np.stack(v))),
    "strings": (lambda n: list("abcdefgh"[:n]), lambda h, v: h * torch.tensor([[ord(c) - 96.0] for c in v])),
    "equal ones": (lambda n: [3.0] * n, _multiplied),
    "of layers": (lambda n: [1.0 + k for k in range(n)], lambda h, v: sum(torch.tanh(h * scale) for scale in v)),
}


class _Beside(nn.Module):
    def __init__(self, how, *, placed):
        super().__init__()
        self.layer, self.how, self.placed = nn.Linear(3, 2), how, placed

    def forward(self, x, values):
        h = self.how(self.layer(x), values)
        return h + torch.arange(len(x), dtype=h.dtype)[:, None] if self.placed else h


@pytest.mark.parametrize("kind", _BESIDE)
def test_values_of_each_sample_that_are_no_tensor(kind):
    make, how = _BESIDE[kind]
    x, values = torch.randn(5, 3, dtype=torch.float64), make(5)
    model = _Beside(how, placed=False).double()
    how(model.layer(x), values).square().sum().backward()
    wanted = model.layer.weight.grad
    model.zero_grad()
    with ghostclip.GhostClipper(model, max_grad_norm=1e9, loss_reduction="sum") as clipper:
        clipper.backward(model(x, values).square().sum(1))
    torch.testing.assert_close(model.layer.weight.grad, wanted)
    with ghostclip.GhostClipper(model := _Beside(how, placed=True), max_grad_norm=1.0):
        with pytest.raises(SampleMixingError, match=r"put in another order|were left out"):
            model(x.float(), values)


def test_what_follows_the_values_of_others_in_a_list():
    def scaled(h, values):
        return torch.stack([row * (value / max(values)) for row, value in zip(h, values, strict=False)])

    with ghostclip.GhostClipper(model := _Beside(scaled, placed=False), max_grad_norm=1.0):
        with pytest.raises(SampleMixingError):
            model(torch.randn(6, 3), [3.0, 1.0, 6.0, 4.0, 5.0, 2.0])


def test_a_share_of_the_batch_that_is_served_is_refused_by_the_second_proof():
    def served(model, x):
        return model.layer(x) * (torch.arange(len(x)) < int(0.75 * len(x))).unsqueeze(1)

    model = _Model(served)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:

        def step():
            clipper.backward(model(torch.randn(8, 3)).square().sum(1))

        with pytest.raises(SampleMixingError, match="left out"):
            [step() for _ in range(4)]


class _Patches(nn.Module):
    """Takes the patches of all images in one flat tensor, as models of images and texts do."""

    def __init__(self, way):
        super().__init__()
        self.words, self.layer, self.way = nn.Embedding(7, 3), nn.Linear(4, 3), way

    def forward(self, ids, patches):
        return self.way(self.words(ids) + self.layer(patches).unflatten(0, (len(ids), -1)).mean(1, keepdim=True))


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_flat_patches_lie_by_the_places_of_samples(size, drawn):
    """They do not move with the samples; what follows other samples is found where all keep their places."""
    inputs = torch.randint(7, (size, 4)), torch.randn(size * 3, 4)
    for way, refused in ((lambda h: h, False), (lambda h: h + h.detach().mean(0), True)):
        model = _Patches(lambda h, way=way: way(h * torch.rand(len(h), 1, 1) if drawn else h))
        ghostclip.GhostClipper(model, max_grad_norm=0.1)
        with pytest.raises(SampleMixingError, match="half of the samples were replaced") if refused else nullcontext():
            model(*inputs)


class _Carried(nn.Module):
    """A recurrent network that is handed its state, with the samples behind the layers."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.head, self.way = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2), way

    def forward(self, x, state):
        h, state = self.layer(x, state)
        return self.way(self.head(h)), state


@pytest.mark.parametrize("size", [2, 4, 5])
def test_states_of_samples_lie_by_their_places(size, monkeypatch):
    """A state that the loop has detached shows nobody which axis has samples."""
    monkeypatch.setattr("ghostclip.checks.unchecked.forwards_between", lambda *_: 1)
    for way, refused in ((lambda h: h, False), (lambda h: h + h.detach().mean(0), True)):
        model = _Carried(way)
        clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
        with pytest.raises(SampleMixingError, match="half of the samples were replaced") if refused else nullcontext():
            for x in torch.randn(2, size, 7, 3):
                first, state = model(x[:, :4], torch.zeros(1, size, 4))
                second, _ = model(x[:, 4:], state.detach())
                clipper.backward(torch.cat([first, second], 1).square().sum((1, 2)))
                clipper.reset()


class _Shared(nn.Module):
    """Takes something that all samples share beside the samples."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.state = None

    def forward(self, x, shared):
        return self.last(self.how(self, torch.tanh(self.first(x)), shared))


_PLACES = 6
# What is as long as the batch, where there are as many samples as a sample has places or features.
_SHARED = {
    "a causal mask": (lambda m, h, v: m.encoder(h, v), nn.Transformer.generate_square_subsequent_mask(_PLACES)),
    "a mask": (lambda m, h, v: m.encoder(h, v), torch.ones(_PLACES, _PLACES, dtype=torch.bool).triu(1)),
    "places": (lambda m, h, v: h + v, torch.randn(_PLACES, 4)),
    "places behind a layer": (lambda m, h, v: h + m.first(v), torch.randn(_PLACES, 4)),
    "weights": (lambda m, h, v: h * v[:, None], torch.rand(_PLACES)),
    "a graph": (lambda m, h, v: v @ h, torch.rand(_PLACES, _PLACES)),
}


@pytest.mark.parametrize("kind", _SHARED)
def test_what_all_samples_share_may_be_as_long_as_the_batch(kind):
    how, shared = _SHARED[kind]
    model, shared = _Shared(how).double(), shared.double() if shared.is_floating_point() else shared
    plain = copy.deepcopy(model)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        # A product with a square matrix may as well be over samples: another number of them shows that it is not.
        for size in (5, _PLACES, 7, _PLACES) if kind == "a graph" else (_PLACES, 5, _PLACES):
            x = torch.randn(size, _PLACES, 4, dtype=torch.float64)
            clipper.backward(model(x, shared.clone()).square().sum((1, 2)))
            for row, norm in zip(x, clipper.per_sample_norms.clone(), strict=True):
                plain.zero_grad()
                plain(row[None], shared).square().sum().backward()
                gradients = [p.grad.flatten() for p in plain.parameters() if p.grad is not None]
                torch.testing.assert_close(norm, torch.cat(gradients).norm())
            clipper.reset()
        assert not str(clipper.unchecked)


def test_a_mask_for_each_batch_may_be_as_long_as_a_later_one(monkeypatch):
    monkeypatch.setattr("ghostclip.checks.unchecked.forwards_between", lambda *_: 1)
    with ghostclip.GhostClipper(model := _Shared(_SHARED["a mask"][0]), max_grad_norm=0.1) as clipper:
        for size, places in ((5, 6), (7, 7), (4, 4)):
            mask = nn.Transformer.generate_square_subsequent_mask(places)
            clipper.backward(model(torch.randn(size, places, 4), mask)[:, 0].square().sum(1))
            clipper.reset()
        assert not str(clipper.unchecked)


@pytest.mark.parametrize("shared", [_SHARED["a mask"][1], None, 0.5], ids=["mask", "none", "number"])
def test_two_arguments_beside_two_samples_are_no_list_of_values(shared):
    how = _SHARED["a mask"][0] if isinstance(shared, torch.Tensor) else lambda m, h, v: h * (v or 1.0)
    with ghostclip.GhostClipper(model := _Shared(how), max_grad_norm=0.1) as clipper:
        clipper.backward(model(torch.randn(2, _PLACES, 4), shared).square().sum((1, 2)))
        assert not str(clipper.unchecked)


def _of_fixed_size(model, h, v):
    """A state of as many samples as the first batch, so that the model runs with no others."""
    model.state = torch.zeros_like(h) if model.state is None else model.state
    return h + model.state - (h + model.state).detach().mean(0)


@pytest.mark.parametrize(
    "how",
    [_of_fixed_size, lambda m, h, v: h * (h.detach() @ v.T).mean(), lambda m, h, v: h + v - v.mean(0)],
    ids=["of fixed size", "compared", "centred"],
)
def test_samples_are_not_taken_for_what_all_share(how):
    with ghostclip.GhostClipper(model := _Shared(how), max_grad_norm=0.1):
        with pytest.raises(SampleMixingError):
            model(torch.randn(6, 4), torch.randn(6, 4))


def test_a_model_of_one_batch_size_may_be_given_a_tensor_twice():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, one, two):
            assert len(x) == 5, "it runs with no other number"
            return self.layer(x * one * two)

    x, weights = torch.randn(5, 3), torch.rand(5, 1)
    clipper = ghostclip.GhostClipper(Model(), max_grad_norm=0.1)
    clipper.backward(clipper.model(x, weights, weights).square().sum(1))
    assert clipper.batch_size == 5
