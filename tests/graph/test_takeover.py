"""From eager batches to graphs in mid-training: what is computed, recorded, resumed and refused."""

import functools
import logging
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip import _torch
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.graph import takeover
from ghostclip.optim import DPOptimizer
from tests.graph.at_once import at_once

pytestmark = pytest.mark.filterwarnings("ignore::ghostclip.errors.FixedSeedWarning", "ignore:noise_multiplier=0")

C, BATCH = 0.5, 12


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """Compile nothing: graphs run operation by operation, and a dict is the disk."""
    return at_once(monkeypatch.setattr)


@pytest.fixture(params=["beside", "here"])
def where(request, monkeypatch):
    """Where graphs are compiled: beside the training, or, as on a GPU, by it."""
    if request.param == "here":
        monkeypatch.setattr(takeover, "_Beside", None)
        monkeypatch.setattr(takeover, "on_gpu", lambda clipper: True)
    return request.param


def _records(number=120):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(number, 5), torch.randint(3, (number,)))


def _model(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def _training(*, ledger=None, dropout=0.0, seed=3, **options):
    engine, model = ghostclip.PrivacyEngine(ledger=ledger), _model(dropout)
    generator = torch.Generator().manual_seed(seed)
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=options.pop("criterion", nn.CrossEntropyLoss()),
        data_loader=DataLoader(_records(), batch_size=BATCH, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=C,
        noise_generator=torch.Generator().manual_seed(seed),
        **options,
    )
    return engine, private


def _train(private, steps, seen=None):
    """Take steps in the loop as users write it; returns how many graphs have computed."""
    model, optimizer, loader = private[0], private[1], private[-1]
    criterion = private[2] if len(private) == 4 else nn.CrossEntropyLoss()
    taken = 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            taken += 1
            if seen is not None:
                seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
            if taken == steps:
                return


@functools.cache
def _eager(dropout=0.0):
    """Return the parameters after each of 60 steps of a training in which graphs never take over."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(takeover, "_LEAST_LEFT", float("inf"))
        _, private = _training(dropout=dropout)
        seen = []
        torch.manual_seed(7)
        _train(private, 60, seen)
    assert private[1].compiled.known is None
    return seen


def _since(private):
    return private[1].compiled.known.since


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_training_is_that_of_the_eager_engine_before_and_after_graphs_take_over(dropout, where, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ghostclip.graph.takeover")
    own, eager = [], _eager(dropout)
    _, private = _training(dropout=dropout)
    torch.manual_seed(7)
    _train(private, 60, own)
    since = _since(private)
    assert 16 < since < 50
    assert all(map(torch.equal, eager[:since], own[:since]))
    if not dropout:
        # Padding draws masks of its own.
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-5)
    assert not torch.equal(own[-1], eager[-1])
    (line,) = caplog.messages
    assert f"graphs compute all releases from number {since + 1} on" in line
    step = private[0].deferral.step
    shown = str(private[0].clipper.coverage())
    assert f"graphs compute all releases from number {since + 1} on" in shown
    assert f"graphs: {step.graphs[0].size} samples in" in shown
    assert all(graph.verified for graph in step.graphs)
    assert not step.reasons


def test_what_is_released_moves_by_no_more_than_the_bound_when_a_sample_is_left_out():
    torch.manual_seed(2)
    model, released = _model(), []
    clipper = ghostclip.GhostClipper(model, max_grad_norm=C)
    inner = torch.optim.SGD(model.parameters(), 0.0)
    inner.register_step_pre_hook(
        lambda optimizer, *_: released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )
    optimizer = DPOptimizer(inner, noise_multiplier=0.0, expected_batch_size=1, clipper=clipper)
    step = ghostclip.GraphStep(
        clipper, lambda model, x, y: 40 * functional.cross_entropy(model(x), y, reduction="none")
    )
    x, y = _records(BATCH).tensors

    def sum_of(rows):
        step(x[rows], y[rows])
        optimizer.step()
        return released.pop().double()

    every, places = list(range(BATCH)), [0]
    while optimizer.compiled.known is None or optimizer.releases < optimizer.compiled.known.since + 30:
        whole = sum_of(every)
        left_out = places[-1]
        rest = sum_of([row for row in every if row != left_out])
        assert float((whole - rest).norm()) <= C * (1 + 1e-6)
        places.append((left_out + 1) % BATCH)
    assert len(places) > BATCH
    assert {graph.size for graph in step.graphs} == {12, 3}


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("after", [-4, 6], ids=["before", "after"])
def test_releases_that_a_crash_has_repeated_are_the_same_ones(after, tmp_path):
    # A checkpoint before graphs take over, or after, and a crash behind both.
    _, private = _training(dropout=0.2)
    seen = []
    torch.manual_seed(7)
    _train(private, 64, seen)
    since = _since(private)
    at = since + after
    engine, private = _training(dropout=0.2, ledger=tmp_path / "ledger")
    torch.manual_seed(7)
    # In two halves of one pass over the data, as positions are saved.
    _train(private, at)
    engine.save_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    assert (private[1].compiled.known is None) is (after < 0)
    _train(private, since + 14 - at)
    epsilon = engine.get_epsilon(1e-5)
    engine.close()
    again, found = _training(dropout=0.2, ledger=tmp_path / "ledger"), []
    again[0].load_checkpoint(path=tmp_path / "point", module=again[1][0], optimizer=again[1][1])
    _train(again[1], since + 20 - at, found)
    assert _since(again[1]) == since
    assert again[0].get_epsilon(1e-5) >= epsilon
    assert all(map(torch.equal, found[: since + 14 - at], seen[at : since + 14]))


def test_a_release_that_cannot_be_computed_as_it_was_is_refused(tmp_path, disk):
    engine, private = _training(ledger=tmp_path / "ledger")
    _train(private, 10)
    engine.save_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    _train(private, 40)
    assert _since(private) < 50
    engine.close()
    disk.clear()
    engine, private = _training(ledger=tmp_path / "ledger")
    engine.load_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    before = engine.get_epsilon(1e-5)
    with pytest.raises(ResumeError, match="made before the interruption with other values"):
        _train(private, 40)
    assert engine.get_epsilon(1e-5) == before


@pytest.mark.parametrize(("checkpoint", "seed", "dropout"), [(5, 3, 0.0), (1, 4, 0.0), (1, 6, 0.3)])
def test_graphs_that_are_asked_for_repeat_releases_as_well(checkpoint, seed, dropout, tmp_path):
    # Also where sizes grow, and where a size is held against the eager engine, only after the checkpoint.
    def training():
        return _training(ledger=tmp_path / "ledger", compile=True, seed=seed, dropout=dropout)

    engine, private = training()
    assert private[0].clipper.strategy == "graph"
    torch.manual_seed(7)
    _train(private, checkpoint)
    engine.save_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    before, seen, found = private[1].compiled.known, [], []
    _train(private, 12, seen)
    assert checkpoint == 5 or private[1].compiled.known != before
    engine.close()
    engine, private = training()
    engine.load_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    _train(private, 12, found)
    assert all(map(torch.equal, seen, found))


@pytest.mark.parametrize("asked", [False, True])
def test_a_graph_that_is_made_again_needs_no_other_comparison(asked, tmp_path):
    # The first batch that is padded would else be eager, in the first of two processes alone.
    def training():
        return _training(ledger=tmp_path / "ledger", dropout=0.3, **({"compile": True} if asked else {}))

    def train(private, steps, seen):
        private[0]._module.saved_under = "point"
        _train(private, steps, seen)

    engine, private = training()
    torch.manual_seed(7)
    _train(private, 50)
    engine.save_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    seen, found = [], []
    train(private, 12, seen)
    engine.close()
    engine, private = training()
    engine.load_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    train(private, 12, found)
    assert all(map(torch.equal, seen, found))
    assert not private[0].deferral.step.reasons


def test_graphs_do_not_take_over_releases_that_were_eager_before_a_crash(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(takeover._Beside, "result", lambda beside: None)
        engine, private = _training(ledger=tmp_path / "ledger")
        _train(private, 10)
        engine.save_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
        _train(private, 50)
        engine.close()
    engine, private = _training(ledger=tmp_path / "ledger")
    engine.load_checkpoint(path=tmp_path / "point", module=private[0], optimizer=private[1])
    _train(private, 70)
    assert _since(private) > 60


def _slower(monkeypatch):
    monkeypatch.setattr(takeover, "_QUICKER", 0.0)


def _little_left(monkeypatch):
    monkeypatch.setattr(takeover, "_LEAST_LEFT", 1e6)


def _long_to_compile(monkeypatch):
    monkeypatch.setattr(takeover, "_COMPILING", (1e6, 0.0))


def _long_to_trace(monkeypatch):
    monkeypatch.setattr(takeover, "_TRACING", 0.0)


def _no_disk(monkeypatch):
    monkeypatch.setattr(_torch, "compiler_cache", lambda: None)


def _fails(monkeypatch):
    def compiled(graph, inputs, options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(_torch, "compiled", compiled)


def _smaller_norms(monkeypatch):
    # The graphs of both sizes exist once a batch has been held against them.
    verify = ghostclip.GraphStep.verify

    def verified(self, tree, samples):
        for size in self.sizes:
            self._step_for(self._padded(tree, samples, size), size)
        for graph in self.graphs:
            own = graph._run
            graph._run = lambda *tensors, own=own: [
                value * (1 - 1e-4) if place == 2 else value for place, value in enumerate(own(*tensors))
            ]
        return verify(self, tree, samples)

    monkeypatch.setattr(ghostclip.GraphStep, "verify", verified)


def _too_large(monkeypatch):
    """The eager engine runs out of memory, once, while a graph is held against it."""
    compared, failed = ghostclip.GraphStep._compared, []

    def short(self, *arguments):
        result = compared(self, *arguments)
        if not failed:
            failed.append(result)
            raise torch.OutOfMemoryError("no room")
        return result

    monkeypatch.setattr(ghostclip.GraphStep, "_compared", short)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_too_large, "memory ran out"),
        (_slower, "times the eager engine's time"),
        (_little_left, "too little of the training is left"),
        (_long_to_compile, "compiling takes about"),
        (_long_to_trace, "tracing, "),
        (_no_disk, "keeps no compiled code on disk"),
        (_fails, "no compiler"),
        (_smaller_norms, "does not agree with the eager engine"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_batches_stay_eager(change, why, where, monkeypatch):
    if change is _long_to_trace and where == "here":
        pytest.skip("what is compiled here is traced with the batch that it is held against")
    change(monkeypatch)
    _, private = _training()
    own = []
    torch.manual_seed(7)
    _train(private, 60, own)
    assert private[1].compiled.known is None
    assert why in private[0].deferral.step.takeover.why if private[0].deferral else change is _no_disk
    if private[0].deferral:
        assert all(map(torch.equal, own, _eager()))


def test_a_loop_that_looks_at_outputs_is_computed_eagerly_and_right():
    _, private = _training()
    model, optimizer, criterion, loader = private
    own = []
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            assert output.argmax(1).shape == y.shape
            criterion(output, y).backward()
            optimizer.step()
            own.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    assert all(map(torch.equal, own, _eager()))
    assert private[1].compiled.known is None


@pytest.mark.parametrize("mode", ["bookkeeping", "ghost", "hooks", "fast"])
def test_compile_contradicts_other_strategies(mode):
    with pytest.raises(InvalidOptionError, match=f"compile=True with grad_sample_mode='{mode}'"):
        _training(compile=True, grad_sample_mode=mode)
    with pytest.raises(InvalidOptionError, match="compile=False with grad_sample_mode='graph'"):
        _training(compile=False, grad_sample_mode="graph")


@pytest.mark.thorough
@pytest.mark.usefixtures("compiler")
def test_a_forked_process_compiles_what_takes_over(monkeypatch):
    """No stand-in: the process, the compiler and the disk are the real ones."""
    monkeypatch.undo()
    monkeypatch.setattr(takeover, "_LEAST_LEFT", 0.0)
    monkeypatch.setattr(takeover, "_COMPILING", (0.0, 0.0))
    monkeypatch.setattr(takeover, "_TRACING", float("inf"))
    monkeypatch.setattr(takeover, "_QUICKER", float("inf"))
    # Other tests may leave little of a processor to a process of lower priority.
    monkeypatch.setattr(takeover, "_LOWER_PRIORITY", 0)
    _, private = _training()
    step, began = private[0].deferral.step, time.monotonic()
    step.takeover._left = lambda: 10**6
    while private[1].compiled.known is None and time.monotonic() - began < 1200:
        _train(private, 1)
        assert "stay" not in step.takeover.why
    assert private[1].compiled.known is not None, step.takeover.why
    _train(private, 5)
    assert step.graphs
    assert all(graph.verified and graph.graph is None for graph in step.graphs)
    assert not step.reasons
