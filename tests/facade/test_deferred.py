"""A loop as it is written for eager training, whose forward, loss and backward are computed as one graph."""

import itertools

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import GhostClipError, InvalidOptionError, LossReductionError, UncoveredParameterError
from ghostclip.graph import GraphOptions

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:noise_multiplier=0")


def _private(model, data, mode, *, criterion=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    found = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion or nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    if mode == "graph":
        # Compiling takes longer than this test may.
        found[0].deferral.step.options = GraphOptions(backend="aten")
    return found if len(found) == 4 else (*found[:2], criterion or nn.CrossEntropyLoss(), found[2])


def _classes():
    torch.manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(12, 5).double(), torch.randint(3, (12,)))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _trained(mode, loop, model=None, data=None):
    model = model or _model()
    private, optimizer, criterion, loader = _private(model, data or _classes(), mode)
    seen = []
    for batch in loader:
        optimizer.zero_grad()
        seen.append(loop(private, criterion, *batch))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), seen, private


def _plain(model, criterion, x, y):
    output = model(x)
    loss = criterion(output, y)
    loss.backward()
    return loss.item(), (output.argmax(1) == y).sum().item()


def _scaled(model, criterion, x, y):
    loss = criterion(model(x), y) / 2 * 2
    loss.backward()
    return loss.item()


def _part(model, criterion, x, y):
    loss = criterion(model(x)[:, torch.tensor([2, 0, 1])], y)
    loss.backward()
    return (loss * 2).item()


def _looks(model, criterion, x, y):
    output = model(x)
    right = (output.argmax(1) == y).sum().item()
    loss = criterion(output + 0, y)
    loss.backward()
    return right, loss.item()


def _item_first(model, criterion, x, y):
    loss = criterion(model(x), y)
    before = loss.item()
    loss.backward()
    return before, loss.item()


@pytest.mark.parametrize(
    ("loop", "as_graph"),
    [(_plain, True), (_scaled, True), (_part, True), (_looks, False), (_item_first, False)],
    ids=["plain", "scaled", "part by a tensor", "looks at outputs", "looks at the loss"],
)
def test_the_loop_stays_as_it_is_written(loop, as_graph):
    want, seen, _ = _trained("bookkeeping", loop)
    got, saw, private = _trained("graph", loop)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.tensor(saw), torch.tensor(seen))
    assert [step.runs for step in private.deferral.step.graphs] == ([3] if as_graph else [])


def _step(private, optimizer, criterion, batches):
    for x, y in batches:
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()


def _exchanged(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def _another_layer(model):
    model[0] = nn.Linear(5, 5).double()


def _tied(model):
    model[1].weight = model[0].weight


def _shared(model):
    model[1] = model[0]


@pytest.mark.parametrize("change", [_exchanged, _another_layer, _tied, _shared])
def test_a_parameter_that_the_optimizer_does_not_hold_is_refused_as_by_the_eager_engine(change):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    private, optimizer, criterion, loader = _private(model, _classes(), "graph")
    batches = iter(loader)
    _step(private, optimizer, criterion, itertools.islice(batches, 2))
    assert private.deferral.step.graphs[0].runs == 2
    change(model)
    with pytest.raises(UncoveredParameterError, match="not in the model any longer"):
        _step(private, optimizer, criterion, batches)


@pytest.mark.parametrize("around_loss", [True, False])
def test_autocast_is_that_of_the_calls_and_not_of_backward(around_loss):
    def loop(model, criterion, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x.float())
            loss = criterion(output, y) if around_loss else None
        (criterion(output.float(), y) if loss is None else loss).backward()
        return output.dtype == torch.bfloat16

    want, seen, _ = _trained("bookkeeping", loop, _model().float())
    got, saw, private = _trained("graph", loop, _model().float())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert saw == seen == [True] * 3
    assert private.deferral.step.graphs[0].runs == 3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model, x, y: x.zero_(), id="an input"),
        pytest.param(lambda model, x, y: y.zero_(), id="a label"),
        pytest.param(lambda model, x, y: model.eval(), id="the mode"),
    ],
)
def test_a_batch_or_a_mode_that_changes_before_backward_is_refused(change):
    private, _, criterion, loader = _private(_model(), _classes(), "graph")
    x, y = (tensor.clone() for tensor in next(iter(loader)))
    loss = criterion(private(x), y)
    change(private, x, y)
    with pytest.raises(GhostClipError, match="changed in place, or the model's training mode"):
        loss.backward()


@pytest.mark.parametrize("combine", [lambda loss, term: loss + term, lambda loss, term: term * loss])
def test_a_term_beside_the_loss_is_refused_with_the_place_for_it(combine):
    private, _, criterion, loader = _private(_model(), _classes(), "graph")
    x, y = next(iter(loader))
    output = private(x)
    with pytest.raises(LossReductionError, match=r"combined with a Tensor.* Compute further terms in the criterion"):
        combine(criterion(output, y), output.square().mean())


def test_a_second_backward_of_one_loss_is_refused():
    private, _, criterion, loader = _private(_model(), _classes(), "graph")
    x, y = next(iter(loader))
    loss = criterion(private(x), y)
    loss.backward()
    with pytest.raises(GhostClipError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("mode", ["auto", "graph"])
@pytest.mark.parametrize("has_run", [False, True])
def test_the_criterion_of_another_model_is_refused_and_computes_neither(mode, has_run):
    found = [_private(_model(), _classes(), mode) for _ in range(2)]
    (private, _, _, loader), (other, _, criterion, _) = found
    x, y = next(iter(loader))
    if has_run:
        criterion(other(x), y).backward()
        other.zero_grad()
        other.clipper.reset()
    with pytest.raises(LossReductionError, match="another"):
        criterion(private(x), y).backward()
    with pytest.raises(LossReductionError, match=r"another private model|two private models"):
        criterion(other(private(x)[:, [0, 1, 2, 0, 1]]), y).backward()
    assert not any(each[0].clipper.has_clipped_sum for each in found)


def test_evaluation_and_copies_compute_at_once():
    import copy

    private, *_ = _private(_model(), _classes(), "graph")
    x = torch.randn(3, 5).double()
    with torch.no_grad():
        assert type(private(x)) is torch.Tensor
    assert type(private.eval()(x)) is torch.Tensor
    assert type(copy.deepcopy(private)(x)) is torch.Tensor


def test_without_a_criterion_the_mode_is_refused():
    model = _model()
    with pytest.raises(InvalidOptionError, match="criterion="):
        ghostclip.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=torch.utils.data.DataLoader(_classes(), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="graph",
        )
