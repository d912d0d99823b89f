"""On a GPU parallel additions meet in another order in every run: what is released must not depend on it.

Emulated: the operations that use atomics there add in a random order, and the library takes its GPU's way. What sorts
first there (``index_put_`` with ``accumulate=True``) adds in its own order here too.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ghostclip import GhostClipper
from ghostclip.kernels import runtime, sums


class AnyOrder(TorchDispatchMode):
    """Permutes what atomics add: of ``index_add`` and ``scatter_add``."""

    def __init__(self, seed):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self.met = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.index_add_, torch.ops.aten.index_add):
            out, dim, index, source, *rest = args
            order = torch.randperm(len(index), generator=self._generator)
            self.met += 1
            args = (out, dim, index[order], source.index_select(dim, order), *rest)
        elif func.overloadpacket in (torch.ops.aten.scatter_add_, torch.ops.aten.scatter_add):
            out, dim, index, source = args
            order = torch.randperm(index.shape[dim], generator=self._generator)
            self.met += 1
            args = (out, dim, index.index_select(dim, order), source.index_select(dim, order))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def parallel(monkeypatch):
    monkeypatch.setattr(sums, "is_parallel", lambda tensor: True)
    monkeypatch.setattr(runtime, "wait", lambda tensor: True)


class Tied(nn.Module):
    """Few words, often repeated, and a head of the same matrix."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 16)
        self.places = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids_BT):
        return self.head(torch.tanh(self.words(ids_BT) + self.places(torch.arange(40)) + self.words(ids_BT.flip(1))))


def _sums(seed, strategy):
    torch.manual_seed(0)
    model = Tied()
    clipper = GhostClipper(model, max_grad_norm=0.3, strategy=strategy)
    ids_BT = torch.randint(7, (5, 40), generator=torch.Generator().manual_seed(2))
    weight_B = 10.0 ** torch.arange(-2.0, 3)
    with AnyOrder(seed) as order:
        for _ in range(2):
            losses_BT = nn.functional.cross_entropy(model(ids_BT).movedim(2, 1), ids_BT.roll(1, 1), reduction="none")
            clipper.backward(losses_BT.mean(1) * weight_B)
    return [clipper.summed_gradient(p) for p in model.parameters()], order


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "hooks"])
def test_a_step_made_again_has_the_same_sums(parallel, strategy):
    first, order = _sums(0, strategy)
    for seed in range(1, 4):
        assert all(torch.equal(a, b) for a, b in zip(first, _sums(seed, strategy)[0], strict=True))
    # torch's own backward of an embedding is not ours, and its gradient not used.
    assert order.met == 0


def test_rows_are_added_as_index_add_adds(device):
    generator = torch.Generator().manual_seed(1)
    index_R, source = torch.randint(5, (200,), generator=generator), torch.randn(200, 3, generator=generator)
    wanted = torch.zeros(5, 3).index_add_(0, index_R, source)
    found = sums.add_rows_(torch.zeros(5, 3, device=device), index_R.to(device), source.to(device))
    torch.testing.assert_close(found.cpu(), wanted)
