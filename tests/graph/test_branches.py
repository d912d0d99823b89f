"""Branches on data (``if mask.any()``): one graph for batches that go one way, the eager engine for the others."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from tests.graph.at_once import at_once
from tests.graph.steps import batch, eager_sums, step_of, sums

pytestmark = pytest.mark.filterwarnings("ignore::ghostclip.errors.FixedSeedWarning")


class Marked(nn.Module):
    """Leaves out what is marked, and looks first whether anything is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(5, 7), nn.Linear(7, 3), []

    def forward(self, x):
        h, marked = torch.tanh(self.first(x)), x[:, :1] > 1
        found = marked.any()
        if found:
            h = h.masked_fill(marked, 0.0)
        if (~found).item():
            h = h + 0.0
        return self.second(h)


def _batch(seed, *, marked):
    x, y = batch(seed=seed)
    x[:, 0] = 0.0
    x[1, 0] = 2.0 if marked else 0.0
    return x, y


def test_a_graph_computes_batches_that_go_its_way_and_the_eager_engine_the_others():
    torch.manual_seed(1)
    model = Marked().double()
    step = step_of(model)
    ways = [True, True, False, True, False, True]
    for number, marked in enumerate(ways):
        tensors = _batch(number, marked=marked)
        want, _ = eager_sums(model, *tensors)
        step.clipper.reset()
        step(*tensors)
        torch.testing.assert_close(sums(model), want, rtol=1e-12, atol=1e-14)
    (graph,) = step.graphs
    assert graph.verified
    assert graph.branches == (True, False)
    assert step.reasons == {"data decides otherwise than in the batch that was traced": ways.count(False)}


def test_a_graph_is_no_witness_in_a_batch_that_goes_another_way():
    step = step_of(Marked().double())
    step.take_sizes((6,), branches=(True, False))
    step(*_batch(0, marked=False))
    assert not step.graphs[0].verified
    step(*_batch(1, marked=True))
    assert step.graphs[0].verified


def _training(ledger):
    torch.manual_seed(1)
    model, generator = Marked(), torch.Generator().manual_seed(3)
    engine = ghostclip.PrivacyEngine(ledger=ledger)
    torch.manual_seed(0)
    records = TensorDataset(torch.randn(80, 5), torch.randint(3, (80,)))
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records, batch_size=5, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(3),
        compile=True,
    )


def _train(private, steps, seen):
    """Take steps; write down the parameters after each of them, and whether anything was marked."""
    _, model, optimizer, criterion, loader = private
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            seen.append((torch.cat([p.detach().flatten() for p in model.parameters()]), bool((x[:, 0] > 1).any())))
            if len(seen) == steps:
                return


def test_a_resumed_training_goes_the_way_of_before(tmp_path, monkeypatch):
    at_once(monkeypatch.setattr)
    # The first batch behind the checkpoint goes one way, then the other.
    ways = set()
    for at in (2, 4):
        private, seen, found = _training(tmp_path / f"{at}.ledger"), [], []
        _train(private, at, [])
        private[0].save_checkpoint(path=tmp_path / "point", module=private[1], optimizer=private[2])
        _train(private, 6, seen)
        private[0].close()
        again = _training(tmp_path / f"{at}.ledger")
        again[0].load_checkpoint(path=tmp_path / "point", module=again[1], optimizer=again[2])
        _train(again, 6, found)
        again[0].close()
        assert all(torch.equal(one, other) for (one, _), (other, _) in zip(seen, found, strict=True))
        ways.add(seen[0][1])
    assert ways == {False, True}
