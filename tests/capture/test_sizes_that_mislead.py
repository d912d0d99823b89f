"""Batches whose size is that of another axis: copied parameters, selections along other axes, orders that come later.

How such an operation is read is shown by evidence once; a later batch whose size fits another reading, or whose rows
are in another order, must not change that.
"""

import random
from collections.abc import Callable
from copy import deepcopy
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from tests.cases.table import probe_loss
from tests.exactness.runs import Outcome, check_norms, check_sum, gradients
from tests.reference import clip_and_sum, per_sample_gradients

F64 = torch.float64
BOUND = 0.2


class _Latents(nn.Module):
    """Latent queries, normed and projected before they meet the data."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 6))
        self.norm, self.query, self.enter = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        queries = self.query(self.norm(self.latents[None].expand(len(x), -1, -1)))
        return (queries @ h.transpose(1, 2)).softmax(-1) @ h


class _LatentHeads(_Latents):
    """The same with two heads, folded into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self._heads(self.enter(x))
        queries = self._heads(self.query(self.norm(self.latents[None].expand(len(x), -1, -1))))
        return (torch.bmm(queries, h.transpose(1, 2)).softmax(-1) @ h).view(len(x), -1)

    @staticmethod
    def _heads(h: Tensor) -> Tensor:
        return h.view(len(h), -1, 2, 3).transpose(1, 2).reshape(2 * len(h), -1, 3)


class _Memory(nn.Module):
    """Keys and values that all samples share."""

    def __init__(self):
        super().__init__()
        self.memory, self.norm = nn.Parameter(torch.randn(4, 6)), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.norm(self.memory).repeat(len(x), 1, 1)
        return self.attention(x, shared, shared)[0]


class _SharedKernel(nn.Module):
    """One kernel for all channels."""

    def __init__(self):
        super().__init__()
        self.enter, self.kernel = nn.Conv1d(4, 3, 1), nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv1d(self.enter(x), self.kernel.expand(3, 1, 3), groups=3)


class _SharedHeads(nn.Module):
    """One matrix for both heads, and one bias for each position."""

    def __init__(self):
        super().__init__()
        self.enter, self.matrix = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 3))
        self.offset = nn.Parameter(torch.randn(4, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).unflatten(2, (2, 3))
        h = torch.einsum("bthd,hde->bthe", h, self.matrix[None].repeat(2, 1, 1)).flatten(2)
        return (h.transpose(0, 1) + self.offset).transpose(0, 1)


# Every size is an axis of some model above: four positions, three latents or channels, two heads, six of both together.
@pytest.mark.parametrize("sizes", [(3, 4, 2, 1, 6), (5, 6, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("kind", [_Latents, _LatentHeads, _Memory, _SharedKernel, _SharedHeads])
def test_batch_of_the_size_of_the_copies(kind, sizes, strategy):
    torch.manual_seed(3)
    _check(kind().double(), [torch.randn(size, 4, 6, dtype=F64) for size in sizes], strategy)


class _Two(nn.Module):
    """Two layers and a scale."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))


class _PositionsFirst(_Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).transpose(0, 1)
        return torch.cat([self.leave(part) * self.scale for part in h.split(4)]).transpose(0, 1)


class _PositionsPicked(_Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.transpose(0, 1)[:6])
        return (h[torch.tensor([0, 2, 3, 5])] * self.scale).transpose(0, 1)


class _Levels(_Two):
    def forward(self, x: Tensor) -> Tensor:
        levels = torch.stack([self.enter(x), x, x.sin(), x.cos()])
        return self.leave(levels[1:]).mean(0) + (levels[:2] * self.scale).sum(0)


class _Sorted(_Two):
    """Sorts the samples by what is in them; one way to say it each."""

    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        order = h.sum(1).argsort()
        return (self.leave(self.pick(h, order)) * self.scale)[order.argsort()]


_PICKS = {
    "gather": lambda h, order: h.gather(0, order[:, None].expand(-1, 4)),
    "take_along_dim": lambda h, order: h.take_along_dim(order[:, None], 0),
    "stack": lambda h, order: torch.stack([h[int(place)] for place in order]),
    "cat": lambda h, order: torch.cat([h[place : place + 1] for place in order.tolist()]),
}


def _check(model: nn.Module, batches: list[Tensor], strategy: str) -> None:
    copy = deepcopy(model)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=BOUND, strategy=strategy)
    for x in batches:
        reference = clip_and_sum(per_sample_gradients(copy, {"x": x}, _losses, axes={}), BOUND)
        model.zero_grad(set_to_none=True)
        clipper.backward(_losses(model, {"x": x}))
        outcome = Outcome(gradients(model), clipper.per_sample_norms, clipper.clip_coefficients, clipper.batch_size)
        check_norms(outcome, reference, F64)
        check_sum(outcome, reference, F64)


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return probe_loss(model(batch["x"]))


@pytest.mark.parametrize("sizes", [(3, 2, 4, 8, 6, 1), (2, 3, 4), (4, 8, 2), (5, 6, 3)], ids=str)
@pytest.mark.parametrize("kind", [_PositionsFirst, _PositionsPicked, _Levels])
def test_selected_along_another_axis(kind, sizes, strategy):
    torch.manual_seed(4)
    _check(kind().double(), [torch.randn(size, 8, 4, dtype=F64) for size in sizes], strategy)


class _PartsTurned(_Two):
    """Each sample has parts (sentences, frames, channels), which are folded into the batch behind their positions."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.leave(self.enter(x).flatten(0, 1).transpose(0, 1).flatten(0, 1)) * self.scale
        return h.view(x.shape[2], len(x), -1, 4).sum((0, 2))


class _PartsAttended(_Two):
    """The same, as torch's attention turns them by itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).flatten(0, 1)
        return self.leave(self.attention(h, h, h)[0]).view(len(x), -1, 4).sum(1)


# Samples, parts and positions: later batches have other numbers of parts, one at last, and as many rows all together.
@pytest.mark.parametrize(
    "shapes",
    [((5, 2, 4), (5, 4, 2), (5, 2, 4), (3, 3, 5), (4, 1, 4), (1, 3, 2), (3, 4, 2)), ((3, 3, 2), (2, 3, 6), (6, 2, 3))],
    ids=["many", "few"],
)
@pytest.mark.parametrize("kind", [_PartsTurned, _PartsAttended])
def test_other_numbers_of_parts_of_each_sample(kind, shapes, strategy):
    torch.manual_seed(6)
    _check(kind().double(), [torch.randn(*shape, 4, dtype=F64) for shape in shapes], strategy)


class _Layout(nn.Module):
    """Layers between random folds, turns and flips of samples, parts and positions, undone at the end."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.axes, self.flips, self.ways = [["B"], ["S"], ["T"]], list[str](), list[Callable[..., Tensor]]()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList()
        for _ in range(rng.randint(4, 9)):
            rng.choice([self._turn, self._fold, self._fold, self._part, self._layer, self._layer, self._flip])(rng)
        self._layer(rng)

    def _turn(self, rng: random.Random) -> None:
        order = rng.sample(range(len(self.axes)), len(self.axes))
        self.axes = [self.axes[place] for place in order]
        self.ways.append(lambda _, h, __: h.permute(*order, -1))

    def _fold(self, rng: random.Random) -> None:
        if len(self.axes) > 1:
            first = rng.randrange(len(self.axes) - 1)
            self.axes[first : first + 2] = [self.axes[first] + self.axes[first + 1]]
            self.ways.append(lambda _, h, __: h.flatten(first, first + 1))

    def _part(self, rng: random.Random) -> None:
        axis = rng.randrange(len(self.axes))
        names = self.axes[axis]
        cut = rng.randrange(len(names))
        if cut:
            self.axes[axis : axis + 1] = [names[:cut], names[cut:]]
            self.ways.append(lambda _, h, sizes: h.unflatten(axis, (-1, prod(sizes[name] for name in names[cut:]))))

    def _flip(self, rng: random.Random) -> None:
        axis = rng.randrange(len(self.axes))
        if len(self.axes[axis]) == 1:
            self.flips += self.axes[axis]
            self.ways.append(lambda _, h, __: h.flip(axis))

    def _layer(self, rng: random.Random) -> None:
        kinds = [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), _Scale]
        if len(self.axes) == 2 and "B" in self.axes[0]:
            kinds.append(lambda: nn.MultiheadAttention(4, 2, batch_first=True))
        number = len(self.layers)
        self.layers.append(rng.choice(kinds)())
        # A copy of the model has layers of its own.
        self.ways.append(lambda model, h, _: model.run(model.layers[number], h))

    @staticmethod
    def run(layer: nn.Module, h: Tensor) -> Tensor:
        return layer(h, h, h)[0] if isinstance(layer, nn.MultiheadAttention) else layer(h).tanh()

    def forward(self, x: Tensor) -> Tensor:
        sizes = dict(zip("BST", x.shape, strict=False))
        h = self.enter(x)
        for way in self.ways:
            h = way(self, h, sizes)
        names = [name for axis in self.axes for name in axis]
        h = h.reshape(*[sizes[name] for name in names], 4)
        for name in self.flips:
            h = h.flip(names.index(name))
        weights = torch.linspace(0.5, 1.5, sizes["S"] * sizes["T"], dtype=h.dtype).view(sizes["S"], sizes["T"], 1)
        return self.leave((h.permute(*map(names.index, "BST"), 3) * weights).mean((1, 2)))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed):
    """The first batch may have as many parts or positions as samples, or one of them; later ones have other numbers."""
    rng, strategy = random.Random(seed), ("bookkeeping", "ghost")[seed % 2]
    torch.manual_seed(seed)
    fewest = rng.choice([1, 1, 2])
    shapes = [(rng.randint(2, 6), rng.randint(fewest, 5), rng.randint(fewest, 5))]
    shapes += [(rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 5)) for _ in range(4)]
    _check(_Layout(rng).double(), [torch.randn(*shape, 3, dtype=F64) for shape in shapes], strategy)


@pytest.mark.parametrize("pick", list(_PICKS))
def test_order_that_the_first_batch_had_already(pick, strategy):
    torch.manual_seed(5)
    model = _Sorted(_PICKS[pick]).double()
    first, later = torch.randn(2, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    first, later = (
        x[model.enter(x).sum(1).argsort(descending=turned)] for x, turned in ((first, False), (later, True))
    )
    _check(model, [first, later, later.flip(0)], strategy)
