"""Rows that data selects: whose they are follows from the rows they were selected from, not from how many came."""

import copy

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.capture import inputs
from ghostclip.errors import BatchAxisError, SampleMixingError
from tests.reference import clip_and_sum, per_sample_gradients


def _mask(flat, out, rows, expert):
    return out.index_put((rows,), expert(flat[rows]))


def _in_place(flat, out, rows, expert):
    out[rows] = expert(flat[rows])
    return out


def _numbers(flat, out, rows, expert):
    number = rows.nonzero().squeeze(-1)
    return out.index_add(0, number, expert(flat.index_select(0, number)))


def _by_name(flat, out, rows, expert):
    number = rows.nonzero().squeeze(-1)
    return out.index_add(0, number, expert(torch.index_select(flat, dim=0, index=number)))


def _behind_an_axis(flat, out, rows, expert):
    number = rows.nonzero().squeeze(-1)
    return out.index_add(0, number, expert(flat[None, number].reshape(-1, flat.shape[-1])))


def _reshaped(x):
    return x.reshape(-1, x.shape[-1])


def _scaled(x):
    return (0.5 * x).flatten(0, 1)


def _turned(x):
    """Samples alternate, in memory of its own."""
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


class _Router(nn.Module):
    """Three experts on single positions, chosen by a gate; each with its share of the gate's probability."""

    def __init__(self, way, fold=_reshaped):
        super().__init__()
        self.gate, self.head, self.way, self.fold = nn.Linear(5, 3), nn.Linear(5, 2), way, fold
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(3)])

    def forward(self, x):
        flat = self.fold(x)
        share = self.gate(flat).softmax(-1)
        chosen = self._allowed(share.argmax(-1))
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            out = self.way(flat, out, chosen == number, expert)
        out = out * share.max(-1, keepdim=True).values
        back = out.view(x.shape[1], x.shape[0], -1).transpose(0, 1) if self.fold is _turned else out.view(x.shape)
        return self.head(x + back).mean(1)

    def _allowed(self, chosen):
        return chosen


class _Limited(_Router):
    """An expert has room for so many rows of the batch; the others stay as they are."""

    def _allowed(self, chosen):
        place = torch.stack([(chosen == number).cumsum(0) for number in range(3)], 1)
        return chosen.where(place.gather(1, chosen[:, None])[:, 0] <= 3, -1)


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def _assert_exact(way, fold, seed, shape, *, in_graph=False):
    torch.manual_seed(seed)
    first = nn.Linear(5, 5) if in_graph else nn.Identity()
    model, x = nn.Sequential(first, _Router(way, fold)).double(), torch.randn(*shape, dtype=torch.float64)
    wanted = clip_and_sum(per_sample_gradients(model, {"x": x}, _losses, axes={}), 0.5).clipped
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        clipper.backward(_losses(model, {"x": x}))
        for name, p in model.named_parameters():
            got = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(got, wanted[name], rtol=1e-9, atol=1e-12, msg=f"{seed}: {name}")


@pytest.mark.parametrize(("way", "starts"), [(_mask, 8), (_in_place, 3), (_numbers, 3), (_by_name, 3)])
def test_any_number_of_rows(way, starts):
    """In many of the starts some expert has a multiple of the batch's four samples."""
    for seed in range(starts):
        _assert_exact(way, _reshaped, seed, (4, 6, 5))


class _Adaptive(nn.Module):
    """Selects the rows of each cluster by ``nonzero().squeeze()``, an index without axes where there is one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 9, [2, 5], div_value=2.0)

    def forward(self, x, y):
        return -self.last(self.first(x), y).output


@pytest.mark.parametrize("labels", [(0, 3, 8, 4), (7, 1, 1, 1), (2, 2, 2, 2)])
def test_a_cluster_of_one_row(labels):
    model = _Adaptive().double()
    batch = {"x": torch.randn(4, 5, dtype=torch.float64), "y": torch.tensor(labels)}
    wanted = clip_and_sum(per_sample_gradients(model, batch, lambda m, b: m(**b), axes={}), 0.5).clipped
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        clipper.backward(model(**batch))
        for name, p in model.named_parameters():
            torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, wanted[name])


def test_rows_selected_behind_a_new_axis():
    for seed in range(5):
        _assert_exact(_behind_an_axis, _reshaped, seed, (4, 6, 5), in_graph=True)


@pytest.mark.parametrize(("shape", "fold"), [((2, 6, 5), _reshaped), ((4, 4, 5), _scaled), ((3, 1, 5), _scaled)])
def test_other_sizes_and_folds(shape, fold):
    for seed in range(4):
        _assert_exact(_mask, fold, seed, shape)


@pytest.mark.parametrize("way", [_mask, _numbers, _by_name, _behind_an_axis])
def test_rows_in_an_unknown_order_are_exact_or_refused(way):
    """In every step: what evidence showed of some selected rows says nothing about others."""
    done = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model = _Router(way, _turned).double()
        with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
            for _ in range(3):
                x = torch.randn(2, 6, 5, dtype=torch.float64)
                try:
                    clipper.backward(_losses(model, {"x": x}))
                except (BatchAxisError, SampleMixingError):
                    break
                squares = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
                norms = _norms(copy.deepcopy(model), x)
                torch.testing.assert_close(clipper.per_sample_norms, norms, rtol=1e-6, atol=0)
                assert squares.sqrt() <= 2 * 0.5 * (1 + 1e-9)
                clipper.reset()
                done += 1
    assert done


def _norms(model, x):
    model.zero_grad()
    return clip_and_sum(per_sample_gradients(model, {"x": x}, _losses, axes={})).norms_B


@pytest.mark.parametrize("in_graph", [False, True])
def test_experts_with_room_for_few_rows_are_refused(in_graph):
    """Earlier samples take it; nobody's gradient tells."""
    torch.manual_seed(1)
    model = _Limited(_mask)
    x = torch.randn(4, 6, 5)
    ghostclip.GhostClipper(model, max_grad_norm=0.5)
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        model(x.requires_grad_(in_graph))


class _Ordered(nn.Linear):
    """Brings its batch into another order and back, with all arguments by their names."""

    def forward(self, x):
        order = x.sum(1).argsort()
        return super().forward(x.index_select(dim=0, index=order)).index_select(dim=0, index=order.argsort())


def test_rows_selected_by_names_of_arguments():
    torch.manual_seed(0)
    model, x = _Ordered(5, 2).double(), torch.randn(6, 5, dtype=torch.float64)
    wanted = clip_and_sum(per_sample_gradients(model, {"x": x}, _losses, axes={})).norms_B
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        clipper.backward(model(x).square().sum(1))
        torch.testing.assert_close(clipper.per_sample_norms, wanted)


class _Sorted(nn.Linear):
    """Returns its outputs in the order of what is in them."""

    def forward(self, x):
        order = x.sum(1).argsort()
        return super().forward(x[order]) / (len(x) if self.counts else 1)


@pytest.mark.parametrize("counts", [False, True])
def test_outputs_in_an_order_of_their_own_are_refused(counts):
    model = _Sorted(5, 2)
    model.counts = counts
    ghostclip.GhostClipper(model, max_grad_norm=0.5)
    torch.manual_seed(0)
    with pytest.raises((BatchAxisError, SampleMixingError), match=r"another order than the samples|outputs of other"):
        model(torch.randn(6, 5))


class _Adapted(nn.Module):
    """Layers that are not trained, with an adapter beside each; what the first one meets is in no graph."""

    def __init__(self, switched="never"):
        super().__init__()
        self.frozen = nn.ModuleList([nn.Linear(5, 5).requires_grad_(requires_grad=False) for _ in range(4)])
        self.adapters = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.last, self.switched = nn.Linear(5, 5), switched

    def forward(self, x):
        raw, h = self.frozen[0](x).tanh(), x
        for frozen, adapter in zip(self.frozen, self.adapters, strict=True):
            h = h + frozen(h).sin() + adapter(h.exp().tanh().cos())
        if self.switched == "more of it":
            return h + self.last(raw)
        if self.switched == "in another order":
            return h + self.last(raw.flip(0)).flip(0)
        return h + self.last(h)


@pytest.mark.parametrize("switched", ["never", "more of it", "in another order"])
def test_data_that_is_in_no_graph_is_looked_at_until_the_last_parameter_that_met_it(switched, monkeypatch):
    looks = []
    known = inputs._detaches
    monkeypatch.setattr(inputs, "_detaches", lambda *given: looks.append(1) or known(*given))
    torch.manual_seed(0)
    model, twin, counts = _Adapted().double(), _Adapted().double(), []
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for step in range(12):
            if step == 8:
                model.switched = switched
            x = torch.randn(4, 5, dtype=torch.float64)
            looks.clear()
            clipper.backward(_losses(model, {"x": x}))
            counts.append(len(looks))
            found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
            clipper.reset()
            model.zero_grad()
            twin.load_state_dict(model.state_dict())
            twin.switched = model.switched
            wanted = clip_and_sum(per_sample_gradients(twin, {"x": x}, _losses, axes={}), 0.5).clipped
            for name, sums in wanted.items():
                torch.testing.assert_close(found[name], sums, rtol=1e-9, atol=1e-12)
    assert counts[6] < 10


def test_a_model_that_is_asked_about_again_is_looked_at_to_the_end():
    tracker, x = inputs.RowTracker(), torch.randn(4, 5)

    def missed(queries):
        tracker.begin(4, 0, [x], watched=False)
        for _ in range(queries):
            tracker.samples_of(x + 1)
        tracker.end()
        return tracker.missed

    assert [missed(1), missed(1)] == [False, False]
    tracker.renew()
    assert not missed(2)
    assert [missed(2), missed(3)] == [False, True]


PICKS = {
    "mask": lambda flat, rows, number: flat[rows],
    "numbers": lambda flat, rows, number: flat[number],
    "in a list": lambda flat, rows, number: flat[number.tolist()],
    "in an array": lambda flat, rows, number: flat[number.numpy()],
    "in a tuple": lambda flat, rows, number: flat[number, ...],
    "beside columns": lambda flat, rows, number: flat[number[:, None], torch.arange(5)],
    "behind an axis": lambda flat, rows, number: flat[None, number].flatten(0, 1),
    "index_select": lambda flat, rows, number: flat.index_select(0, number),
    "gather": lambda flat, rows, number: flat.gather(0, number[:, None].expand(-1, 5)),
    "take_along_dim": lambda flat, rows, number: torch.take_along_dim(flat, number[:, None].expand(-1, 5), 0),
    "masked_select": lambda flat, rows, number: flat.masked_select(rows[:, None]).view(-1, 5),
}


class _Positions(nn.Linear):
    """A layer on the positions that are positive, of inputs folded in memory of their own."""

    def __init__(self, way):
        super().__init__(5, 3)
        self.way = way

    def forward(self, x):
        flat = (x * 2).flatten(0, 1).clone()
        rows = flat[:, 0] > 0
        number = rows.nonzero().squeeze(-1)
        picked = super().forward(PICKS[self.way](flat, rows, number)).sin()
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, number // x.shape[1], picked)


@pytest.mark.parametrize("way", PICKS)
def test_selected_positions_are_not_taken_for_as_many_of_each_sample(way):
    """In the first step they are."""
    torch.manual_seed(0)
    model, x = _Positions(way).double(), torch.randn(2, 3, 5, dtype=torch.float64)
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for signs in ([[-1, 1, 1], [1, 1, -1]], [[1, -1, -1], [1, 1, 1]]):
            x[:, :, 0] = x[:, :, 0].abs() * torch.tensor(signs)
            try:
                clipper.backward(_losses(model, {"x": x}))
            except (BatchAxisError, SampleMixingError):
                return
            torch.testing.assert_close(clipper.per_sample_norms, _norms(copy.deepcopy(model), x), rtol=1e-6, atol=0)
            clipper.reset()
            model.zero_grad()


# Of a layer, inputs and an order: rows in that order meet the layer.
REORDERED = {
    "index": lambda layer, x, order: layer(x[order]),
    "product": lambda layer, x, order: layer(nn.functional.one_hot(order, len(x)).to(x) @ x),
    "einsum": lambda layer, x, order: layer(torch.einsum("ij,jk->ik", nn.functional.one_hot(order, len(x)).to(x), x)),
    "stack": lambda layer, x, order: layer(torch.stack([x[row] for row in order.tolist()])),
    "written": lambda layer, x, order: layer(_written(x, order)),
    "written by a list": lambda layer, x, order: layer(_written(x, order.tolist())),
    "index_copy": lambda layer, x, order: layer(torch.zeros_like(x).index_copy(0, order, x)),
    "index_put": lambda layer, x, order: layer(torch.zeros_like(x).index_put((order,), x)),
    "index_add in place": lambda layer, x, order: layer(torch.zeros_like(x).index_add_(0, order, x)),
    "scatter": lambda layer, x, order: layer(torch.zeros_like(x).scatter(0, order[:, None].expand_as(x), x)),
}


def _written(x, index):
    rows = torch.zeros_like(x)
    rows[index] = x
    return rows


class _Later(nn.Module):
    """Brings samples together from some step on, in no graph and by no function that was not called before."""

    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way, self.order = nn.Linear(5, 3), nn.Linear(5, 3), way, None

    def forward(self, x):
        order = torch.arange(len(x)) if self.order is None or len(x) != len(self.order) else self.order
        return self.first(x).cos() + self.way(self.second, x, order).sin()


@pytest.mark.parametrize("way", REORDERED.values(), ids=REORDERED)
def test_rows_outside_of_the_graph_that_move_in_a_later_step_are_refused(way):
    torch.manual_seed(0)
    model = _Later(way)
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for _ in range(9):
            clipper.backward(_losses(model, {"x": torch.randn(4, 5)}))
            clipper.reset()
            model.zero_grad()
        model.order = torch.tensor([1, 0, 3, 2])
        with pytest.raises((BatchAxisError, SampleMixingError)):
            clipper.backward(_losses(model, {"x": torch.randn(4, 5)}))
