"""``torch.compile`` around, inside and over a model that a clipper watches; interrupts in the middle of its forward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import LossReductionError, UncoveredParameterError
from tests.reference import clip_and_sum, per_sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore")


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True), nn.LayerNorm(7))
        self.scale = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(7, 3)
        self.interrupted = False

    def forward(self, ids):
        h = self.layers(self.embedding(ids)) * self.scale
        if self.interrupted:
            raise KeyboardInterrupt
        return self.head(h.mean(1))


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def _around(model):
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    return clipper, torch.compile(model, backend="aot_eager")


def _before(model):
    compiled = torch.compile(model, backend="aot_eager")
    return ghostclip.GhostClipper(compiled, max_grad_norm=0.5), compiled


def _in_place(model):
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    model.compile(backend="aot_eager")
    return clipper, model


def _a_part(model):
    model.layers = torch.compile(model.layers, backend="aot_eager")
    return ghostclip.GhostClipper(model, max_grad_norm=0.5), model


def _whole_step(model):
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)

    def step(ids):
        return model(ids) * 1.0

    return clipper, torch.compile(step, backend="aot_eager")


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", [_around, _before, _in_place, _a_part, _whole_step])
def test_compiled_model_is_exact(way):
    model = _Model().double()
    batch = {"x": torch.randint(11, (4, 5))}
    wanted = clip_and_sum(per_sample_gradients(model, batch, _losses, axes={}), 0.5).clipped
    clipper, called = way(model)
    for _ in range(3):
        model.zero_grad()
        clipper.backward(called(batch["x"]).square().sum(1))
        for name, p in model.named_parameters():
            assert torch.allclose(p.grad, wanted[name.replace("_orig_mod.", "")], rtol=1e-10, atol=1e-14), name
    clipper.remove()
    assert torch.compiler.is_compiling() is False
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_loss_that_a_compiled_step_computes_is_refused_and_the_step_is_not_traced():
    model = nn.Linear(4, 3).double()
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.randint(3, (24,)))
    private, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )

    @torch.compile(backend="aot_eager")
    def step(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()

    # In checked ones it is not compiled.
    with pytest.raises(LossReductionError, match="compute it outside of what is compiled"):
        [step(*batch) for batch in loader]
    assert optimizer.releases < len(loader)


def test_compiler_goes_on_afterwards():
    """Evaluation without gradients, and training once the clipper is removed, run compiled."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    model = _Model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    compiled = torch.compile(model, backend=backend)
    ids = torch.randint(11, (4, 5))
    clipper.backward(compiled(ids).square().sum(1))
    assert not graphs
    clipper.remove()
    compiled(ids)
    assert graphs


def _traced(model, ids):
    return torch.jit.trace(model, ids)


def _exported(model, ids):
    return torch.export.export(model, (ids,)).module()


@pytest.mark.parametrize("way", [_traced, _exported])
@pytest.mark.parametrize("training", [False, True])
def test_a_private_model_can_be_exported_in_mid_training(way, training):
    model, ids = _Model(), torch.randint(11, (4, 5))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    for _ in range(2):
        clipper.backward(model(ids).square().sum(1))
        clipper.reset()
        program = way(model.train(training), ids)
        torch.testing.assert_close(program(ids), model(ids))
        model.train()
    # What is written down has the parameters themselves: gradients that go through it are nobody's.
    with pytest.raises(UncoveredParameterError, match="not clipped per sample"):
        (model(ids) + _traced(model, ids)(ids)).square().sum(1).mean().backward()


def test_interrupt_whose_traceback_is_kept():
    """A notebook keeps the traceback, and with it the frames of the call."""
    model, ids = _Model(), torch.randint(11, (4, 5))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    model.interrupted = True
    try:
        model(ids)
    except KeyboardInterrupt as error:
        kept = error
    model.interrupted = False
    clipper.backward(model(ids[:3]).square().sum(1))
    assert clipper.per_sample_norms.shape == (3,)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    del kept
    clipper.backward(model(ids[:2]).square().sum(1))
    assert clipper.per_sample_norms.shape == (2,)


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_a_backward_that_raised_leaves_the_compiler_and_the_parameters():
    model, armed = _Checkpointed(), []
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    model.first.register_full_backward_hook(lambda *_: armed[0]() if armed else None)
    clipper.backward(model(torch.randn(4, 7)).square().sum(1))
    losses = model(torch.randn(4, 7)).square().sum(1)
    armed.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses.mean().backward()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert all(type(p) is nn.Parameter for p in model.parameters())
    armed.clear()
    clipper.backward(model(torch.randn(4, 7)).square().sum(1))
    assert clipper.per_sample_norms.shape == (4,)


@pytest.mark.parametrize("waiting", [False, True], ids=["alone", "beside a forward of another model"])
def test_a_refused_second_backward_leaves_the_compiler_and_the_parameters(waiting):
    model, other, x = _Checkpointed(), _Checkpointed(), torch.randn(4, 7)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    beside = ghostclip.GhostClipper(other, max_grad_norm=0.5)
    others = other(x).square().sum(1) if waiting else None
    loss = model(x).square().sum(1).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(ghostclip.errors.GhostClipError):
        loss.backward()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    # What the loop keeps of the batch is followed until the next one.
    clipper._evidence.loop.rest()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    clipper.reset()
    clipper.backward(model(x).square().sum(1))
    assert clipper.per_sample_norms.shape == (4,)
    if others is not None:
        beside.backward(others)
        assert beside.per_sample_norms.shape == (4,)
