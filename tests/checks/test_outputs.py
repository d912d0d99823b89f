"""Values that leave a model in another form than a row for each sample: folded, selected, in attributes, by hooks."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.checks.unchecked import BESIDE
from ghostclip.errors import BatchAxisError, SampleMixingError, UncoveredParameterError

T = 3


class _Model(nn.Module):
    """Two heads, of which the first one's values leave in some form."""

    def __init__(self, form, change):
        super().__init__()
        self.layer, self.head, self.form, self.change = nn.Linear(4, 3), nn.Linear(4, 3), form, change
        self.seen = []

    def forward(self, x):
        h = self.change(self.layer(x), x)
        row = self.head(x[:, 0])
        if self.form == "folded beside rows":
            return h.flatten(0, 1), row
        if self.form == "selected":
            return h[x[..., 0] > 0]
        if self.form == "selected beside rows":
            return {"rows": row, "selected": h[x[..., 0] > 0]}
        if self.form == "attribute":
            self.seen = h
        elif self.form == "list in an attribute":
            self.seen.append(h.mean(1))
        return row


_FORMS = ("folded beside rows", "selected", "selected beside rows", "attribute", "list in an attribute")
_OWN = {"nothing": lambda h, x: h, "own rows": lambda h, x: h - 0.5 * h.mean(1, keepdim=True).detach()}
_FOLLOWING = {
    "a number of samples": lambda h, x: h / len(x),
    "a detached mean": lambda h, x: h / (1 + x.mean()),
    "another sample": lambda h, x: h + x[0, 0, :3],
}


def _data(size):
    x = torch.randn(size, T, 4)
    x[:, 0, 0] = 1.0
    return x


def _clipped(form, change, size):
    model = _Model(form, change)
    return model, ghostclip.GhostClipper(model, max_grad_norm=0.1)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("change", _FOLLOWING)
@pytest.mark.parametrize("form", _FORMS)
def test_what_follows_other_samples_is_refused_in_any_form(form, change, size):
    model, _ = _clipped(form, _FOLLOWING[change], size)
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        model(_data(size))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("change", _OWN)
@pytest.mark.parametrize("form", _FORMS)
def test_own_rows_are_not_and_nothing_is_left_out(form, change, size):
    model, clipper = _clipped(form, _OWN[change], size)
    for _ in range(3):
        model(_data(size))
        assert not str(clipper.unchecked)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_in_another_order_beside_data_of_other_samples_are_refused(size):
    """Gradients call the rows behind a layer those of the last sample first; the data beside them are the first's."""

    class Model(nn.Linear):
        def forward(self, x):
            return (super().forward(x).flip(0) + x).reshape(-1, 4)

    ghostclip.GhostClipper(model := Model(4, 4), max_grad_norm=0.1)
    with pytest.raises((SampleMixingError, BatchAxisError)):
        model(torch.randn(size, 3, 4))


def _paired(model, x):
    """Two views in one pass, and a loss of the rows as if each sample's views lay one after the other."""
    views = model.layer(torch.cat([x, x + 1]))
    model.seen = views
    return views, model.head(x)


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("taken", ["returned", "attribute", "hook"])
def test_rows_of_two_views_are_not_taken_for_rows_of_one_after_the_other(taken, size):
    model, x, hooked = _Model("", _OWN["nothing"]), torch.randn(size, 4), []
    model.forward = lambda x: _paired(model, x)[slice(None) if taken == "returned" else 1]
    if taken != "attribute":
        model.layer.register_forward_hook(lambda module, args, output: hooked.append(output))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    output = model(x)
    views, row = {
        "returned": lambda: output,
        "attribute": lambda: (model.seen, output),
        "hook": lambda: (hooked[-1], output),
    }[taken]()
    if taken != "hook":
        del model.seen
    with pytest.raises((SampleMixingError, BatchAxisError)):
        clipper.backward(views.view(size, 2, -1).prod(1).sum(1) + row.sum(1))


_LOST = {
    "the largest of all": lambda h, x: h.flatten(0, 1)[x[..., 0].flatten().topk(len(x) + 1).indices],
    "pieces of some length": lambda h, x: torch.cat([row[: 1 + number % 2] for number, row in enumerate(h)]),
    "a list of samples": lambda h, x: list(h),
    "neither order": lambda h, x: h.movedim(0, 1).flatten(),
}


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("form", _LOST)
def test_rows_that_cannot_be_found_again_are_refused_or_said_to_be_unchecked(form, beside, size):
    class Model(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return (_LOST[form](h, x), h[:, 0]) if beside else _LOST[form](h, x)

    clipper = ghostclip.GhostClipper(model := Model(4, 3), max_grad_norm=0.1)
    try:
        model(_data(size))
    except (SampleMixingError, BatchAxisError):
        # Which are the largest of all follows the company, wherever they lie.
        assert not beside or form == "the largest of all", "rows beside them tell of the samples"
    else:
        assert "rows of an output cannot be told apart in another batch" in str(clipper.unchecked)


def test_numbers_in_an_order_of_their_own_are_compared_as_rows_are(caplog):
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x).movedim(0, 1).flatten()

    ghostclip.GhostClipper(model := Model(4, 3), max_grad_norm=0.1)
    model(_data(5))
    assert "the model raised" not in caplog.text


class _PositionsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).transpose(0, 1).flatten(0, 1), self.head(x[:, 0])

    def losses(self, x):
        folded, row = self(x)
        return folded.unflatten(0, (-1, len(x))).prod(0).sum(1) + row.sum(1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_as_many_positions_as_samples_before_them(size):
    """Sizes do not tell samples from positions, another number of samples does."""
    model = _PositionsFirst().double()
    alone, x = copy.deepcopy(model), torch.randn(size, size, 4).double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(model.losses(x))
    for sample, norm in enumerate(clipper.per_sample_norms):
        grads = torch.autograd.grad(alone.losses(x[sample : sample + 1]).sum(), list(alone.parameters()))
        torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm())


def test_what_a_loss_takes_from_a_hook_is_said_to_be_unchecked():
    model, x, taken = _Model("", _OWN["nothing"]), _data(5), {}
    model.layer.register_forward_hook(lambda module, args, output: taken.update(h=output))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(model(x).sum(1) + taken["h"].square().sum((1, 2)))
    assert BESIDE in str(clipper.unchecked)
    assert not ghostclip.GhostClipper(nn.Linear(3, 2), max_grad_norm=1.0).unchecked.reason(BESIDE)


def test_a_loss_of_another_form_in_a_later_step_takes_nothing_from_inside():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    for step in range(6):
        losses = model(x).sum(1)
        clipper.backward(losses.exp().log().sin() if step > 3 else losses)
    assert not clipper.unchecked.reason(BESIDE)


_SEVERAL = {
    "two views": lambda m, x: m(x + 0.1 * torch.randn_like(x)).sum(1).exp() + m(x).square().sum(1),
    "a layer by itself": lambda m, x: m(x).sum(1) + m.layer(x).square().sum((1, 2)),
    "a layer by itself before": lambda m, x: m.layer(x).square().sum((1, 2)) + m(x).sum(1),
    "a layer and an attribute": lambda m, x: m(x).sum(1) + m.layer(x).square().sum((1, 2)) + m.seen.sum((1, 2)).sin(),
}


@pytest.mark.parametrize("form", ["", "attribute"])
@pytest.mark.parametrize("losses", _SEVERAL)
def test_a_loss_of_several_forwards_is_exact_and_takes_nothing_from_inside(losses, form):
    """Whichever of them is looked at; what one left in an attribute is not what another leaves."""
    model, x = _Model(form, _OWN["nothing"]).double(), _data(5).double()
    alone, losses = copy.deepcopy(model), _SEVERAL[losses]
    if form != "attribute" and losses is _SEVERAL["a layer and an attribute"]:
        form, model.form, alone.form = "attribute", "attribute", "attribute"
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    for step in range(9):
        torch.manual_seed(step)
        clipper.backward(losses(model, x))
    assert not clipper.unchecked.reason(BESIDE)
    for sample, norm in enumerate(clipper.per_sample_norms if losses is not _SEVERAL["two views"] else ()):
        grads = torch.autograd.grad(losses(alone, x[sample : sample + 1]).sum(), list(alone.parameters()))
        torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in grads]).norm())


# What a stage of a pipeline returns beside rows of samples; a last one would take them for itself.
_HANDED_ON = {
    "a number": lambda h, x: h.detach().mean(),
    "a vector": lambda h, x: h.detach().mean(0),
    "a row": lambda h, x: x.mean(0, keepdim=True),
    "products of samples": lambda h, x: x.T @ x,
    "a count": lambda h, x: (x > 0).sum(),
    "a choice": lambda h, x: h[:, 0].argsort(0).argsort(0),
    "a mask": lambda h, x: x[:, 0] > x[:, 0].mean(),
    "the number of samples": lambda h, x: torch.tensor(float(len(x))),
    "folded rows": lambda h, x: (x - x.mean(0)).repeat_interleave(2, 0),
}


class _Stage(nn.Module):
    def __init__(self, beside):
        super().__init__()
        self.layer, self.beside = nn.Linear(4, 3), beside
        self.register_buffer("table", torch.randn(7))

    def forward(self, x):
        h = self.layer(x).tanh()
        return h, self.beside(h, x)


def _handed_on(beside, size) -> None:
    clipper = ghostclip.GhostClipper(stage := _Stage(beside), max_grad_norm=0.1)
    with clipper, clipper.holding(loss_elsewhere=True):
        stage(torch.randn(size, 4))
    assert not str(clipper.unchecked)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("beside", _HANDED_ON)
def test_whatever_a_stage_hands_on_follows_no_other_sample(beside, size):
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        _handed_on(_HANDED_ON[beside], size)


@pytest.mark.parametrize("beside", [Tensor.mean, lambda h: h.mean(0), lambda h: h.T @ h])
def test_a_gradient_of_all_samples_together_is_taken_for_nothing_that_a_stage_hands_on(beside):
    with pytest.raises(UncoveredParameterError, match="without an axis for the samples, which leads to parameters"):
        _handed_on(lambda h, x: beside(h), 5)


@pytest.mark.parametrize(
    "beside",
    [
        lambda h, x: x[:, 0] > 0,
        lambda h, x: h.argmax(1),
        lambda h, x: torch.arange(7),
        lambda h, x: x.repeat_interleave(2, 0),
        lambda h, x: h.square(),
    ],
)
def test_a_stage_hands_on_what_each_sample_has_or_all_share(beside):
    _handed_on(beside, 5)
