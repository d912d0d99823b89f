"""A scalar loss is proved, not believed: what is accepted is exact and bounded, what breaks the bound is refused.

Every accepted loss is compared with one sample at a time in float64.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch.nn import functional

import ghostclip
from ghostclip.errors import (
    BatchAxisError,
    LossReductionError,
    SampleMixingError,
    UncoveredParameterError,
    UnsupportedModelError,
)
from tests.reference import clip_and_sum, per_sample_gradients, take, whole_norm

B, T, V, F = 5, 3, 4, 6
DOUBLE = torch.float64
REFUSED = (LossReductionError, SampleMixingError)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(F, 7), nn.Tanh(), nn.Linear(7, V)).double()


def _rows():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, F, generator=generator, dtype=DOUBLE)
    return {"x": x, "y": torch.tensor([0, 1, 2, 3, 1]), "z": torch.rand(B, V, generator=generator, dtype=DOUBLE)}


def _tokens():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(B, T, F, generator=generator, dtype=DOUBLE)
    y = torch.randint(V, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=DOUBLE)
    for sample, count in enumerate((1, 3, 1, 2, 1)):
        mask[sample, count:] = 0
    return {"x": x, "y": y, "mask": mask, "short": y.masked_fill(mask == 0, -100)}


def _ce(o, b, **options):
    return functional.cross_entropy(o, b["y"], **options)


def _each(o, b):
    return functional.cross_entropy(o.mT if o.dim() > 2 else o, b["y"], reduction="none")


def _first_two(o):
    mask = o.new_zeros(o.shape[:2])
    mask[:, :2] = 1
    return mask


def _cut(o, b, **options):
    return functional.cross_entropy(o.mT, b["short"], **options)


def _own_rows(o, b):
    return [each[mask > 0] for each, mask in zip(_each(o, b), b["mask"], strict=True)]


def _flat(o, b, **options):
    return functional.cross_entropy(o.flatten(0, 1), b["y"].flatten(), **options)


def _of_class(o, b):
    return -o.log_softmax(1)[torch.arange(len(o)), b["y"]]


def _of_both(lp, b):
    return 0.1 * (lp.exp() * lp).sum(1).mean() - (2 * lp.t())[b["y"], torch.arange(len(lp))].view(-1, 1).mean()


# name: (data, loss of the model's outputs and the batch)
ACCEPTED = {
    "cross_entropy": (_rows, _ce),
    "label_smoothing": (_rows, lambda o, b: _ce(o, b, label_smoothing=0.1)),
    "soft_targets": (_rows, lambda o, b: functional.cross_entropy(o, b["z"])),
    "tokens": (_tokens, lambda o, b: _ce(o.mT, b)),
    "tokens_flattened": (_tokens, _flat),
    "tokens_time_first": (_tokens, lambda o, b: functional.cross_entropy(o.transpose(0, 1).mT, b["y"].T)),
    "nll": (_rows, lambda o, b: functional.nll_loss(o.log_softmax(1), b["y"])),
    "picked_and_squares": (_rows, lambda o, b: _of_class(o, b).mean() + 0.1 * o.square().sum(1).mean()),
    "picked_of_what_another_term_takes": (_rows, lambda o, b: _of_both(o.log_softmax(1), b)),
    "half": (_rows, lambda o, b: 0.5 * _ce(o, b)),
    "accumulation": (_rows, lambda o, b: _ce(o, b) / 8),
    "plus_one": (_rows, lambda o, b: _ce(o, b) + 1),
    "two_terms": (_rows, lambda o, b: _ce(o, b) + 0.1 * o.square().mean()),
    "term_with_factor_0": (_rows, lambda o, b: _ce(o, b) + 0.0 * o.sum()),
    "spread_term": (_rows, lambda o, b: (_each(o, b) + 0.1 * o.square().mean()).mean()),
    "mse": (_rows, lambda o, b: functional.mse_loss(o, b["z"])),
    "mse_of_two_outputs": (_rows, lambda o, b: functional.mse_loss(o[:, :2], o[:, 2:])),
    "sum": (_rows, lambda o, b: _ce(o, b, reduction="sum")),
    "mse_sum_over_size": (_rows, lambda o, b: functional.mse_loss(o, b["z"], reduction="sum") / len(o)),
    "l1": (_rows, lambda o, b: functional.l1_loss(o, b["z"])),
    "huber": (_rows, lambda o, b: functional.huber_loss(o, b["z"])),
    "bce": (_rows, lambda o, b: functional.binary_cross_entropy_with_logits(o, b["z"])),
    "kl_batchmean": (_rows, lambda o, b: functional.kl_div(o.log_softmax(1), b["z"], reduction="batchmean")),
    "gaussian_nll": (_rows, lambda o, b: functional.gaussian_nll_loss(o, b["z"], b["z"] + 1)),
    "cosine": (_rows, lambda o, b: functional.cosine_embedding_loss(o, b["z"], b["y"].new_ones(len(o)))),
    "multi_margin": (_rows, lambda o, b: functional.multi_margin_loss(o, b["y"])),
    "multilabel": (_rows, lambda o, b: functional.multilabel_soft_margin_loss(o, b["z"])),
    "pairs_of_one_sample": (_rows, lambda o, b: (o[:, :, None] - o[:, None]).abs().mean()),
    "linear": (_rows, lambda o, b: o.mean()),
    "own_maximum": (_rows, lambda o, b: o.max(1).values.mean()),
    "own_mean": (_tokens, lambda o, b: ((_each(o, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()),
    "own_mean_by_shares": (
        _tokens,
        lambda o, b: (_each(o, b) * b["mask"] / b["mask"].sum(1, keepdim=True)).sum(1).mean(),
    ),
    "own_weight": (_tokens, lambda o, b: (_each(o, b).mean(1) * (1 - b["mask"][:, 2])).mean()),
    "own_choice": (_tokens, lambda o, b: torch.where(b["mask"][:, 1] > 0, _each(o, b).mean(1), o.mean((1, 2))).mean()),
    "own_sum": (_tokens, lambda o, b: (_each(o, b) * b["mask"]).sum() / len(o)),
    "own_sum_ignoring": (_tokens, lambda o, b: _cut(o, b, reduction="sum") / len(o)),
    "last_position": (_tokens, lambda o, b: functional.cross_entropy(o[:, -1], b["y"][:, -1])),
    "sum_over_values": (_tokens, lambda o, b: _flat(o, b, reduction="sum") / b["y"].numel()),
    "sum_over_values_tensor": (_tokens, lambda o, b: _flat(o, b, reduction="sum") / torch.tensor(b["y"].numel())),
    "full_mask": (_tokens, lambda o, b: _each(o, b).sum() / torch.ones_like(b["mask"]).sum()),
    "masks_of_as_many": (_tokens, lambda o, b: (_each(o, b) * _first_two(o)).sum() / _first_two(o).sum()),
    "own_weight_of_picked": (
        _tokens,
        lambda o, b: (o[torch.arange(len(o)), 1, b["y"][:, 1]] * b["mask"][:, 1] - o.logsumexp((1, 2))).mean(),
    ),
    "reordered": (_rows, lambda o, b: _each(o, b)[torch.arange(len(o)).flip(0)].mean()),
    "loop": (_rows, lambda o, b: sum(functional.cross_entropy(o[i], b["y"][i]) for i in range(len(o))) / len(o)),
    "positions_one_by_one": (
        _tokens,
        lambda o, b: sum(functional.cross_entropy(o[:, t], b["y"][:, t]) for t in range(o.shape[1])) / o.shape[1],
    ),
    "weighted_sums": (_rows, lambda o, b: _ce(o, b, reduction="sum") - 0.5 * (1 + o - o.exp()).sum()),
    "sum_over_size_times_tenth": (_rows, lambda o, b: 0.1 * functional.mse_loss(o, b["z"], reduction="sum") / len(o)),
    "stacked_loop": (_tokens, lambda o, b: torch.stack([_ce(o[i], {"y": b["y"][i]}) for i in range(len(o))]).mean()),
    "stacked_rows": (_tokens, lambda o, b: torch.stack([row.mean() for row in _own_rows(o, b)]).mean()),
    "added_means_of_rows": (_tokens, lambda o, b: sum(row.mean() for row in _own_rows(o, b)) / len(o)),
    "stacked_sums_of_rows": (_tokens, lambda o, b: torch.stack([row.sum() for row in _own_rows(o, b)]).mean()),
    "joined_rows": (_tokens, lambda o, b: torch.cat(_own_rows(o, b)).sum() / len(o)),
    "rows_in_a_loop": (_tokens, lambda o, b: sum(row.sum() for row in _own_rows(o, b)) / len(o)),
    "token_losses": (_tokens, lambda o, b: ghostclip.losses.token_losses(o, b["short"], shift=False).mean()),
}


def _attached(strategy, bound, reduction="mean"):
    model = _model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=bound, strategy=strategy, loss_reduction=reduction)
    return model, clipper


def _back(model, clipper, loss, batch):
    """Run the backward that a strategy has: a plain one, or the clipper's for those of two passes."""
    model.zero_grad(set_to_none=True)
    scalar = loss(model(batch["x"]), batch)
    clipper.backward(scalar) if clipper.strategy in ("ghost", "fast") else scalar.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _moves(model, clipper, loss, batch):
    """Yield how far leaving out a sample moves the clipped sum, over C, for two of them."""
    whole = _back(model, clipper, loss, batch)
    for sample in (1, 3):
        rest = _back(model, clipper, loss, take(batch, [index for index in range(B) if index != sample], {}))
        yield whole_norm({name: whole[name] - rest[name] for name in whole}).item() / clipper.max_grad_norm


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_loss_is_exact(name, strategy):
    """Also of one record alone, after many: a Poisson batch may hold one, whose own weights are then those of all."""
    data, loss = ACCEPTED[name]
    batch = data()
    per_sample = per_sample_gradients(_model(), batch, lambda m, b: loss(m(b["x"]), b).unsqueeze(0), axes={})
    wanted = clip_and_sum(per_sample)
    model, clipper = _attached(strategy, wanted.max_grad_norm)
    torch.testing.assert_close(_back(model, clipper, loss, batch), wanted.clipped, rtol=1e-9, atol=1e-12)
    assert all(move <= 1 + 1e-6 for move in _moves(model, clipper, loss, batch))
    for sample in (0, 3):
        got = _back(model, clipper, loss, take(batch, [sample], {}))
        alone = clip_and_sum([per_sample[sample]], clipper.max_grad_norm)
        torch.testing.assert_close(got, alone.clipped, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_losses_are_exact_in_batches_as_large_as_something_else(name):
    """As many samples as positions, classes, or one over a factor: what sizes suggest there has several readings."""
    data, loss = ACCEPTED[name]
    batch = data()
    per_sample = per_sample_gradients(_model(), batch, lambda m, b: loss(m(b["x"]), b).unsqueeze(0), axes={})
    model, clipper = _attached("auto", clip_and_sum(per_sample).max_grad_norm)
    for size in (9, T, V, 2, 10, 40, 5 * V):
        chosen = [number % B for number in range(size)]
        wanted = clip_and_sum([per_sample[sample] for sample in chosen], clipper.max_grad_norm)
        got = _back(model, clipper, loss, take(batch, chosen, {}))
        for key, value in wanted.clipped.items():
            torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12, msg=f"{size} samples")


def _pairwise(o):
    return (o.sum(1)[:, None] - o.sum(1)).abs()


def _similar(o):
    z = functional.normalize(o)
    return z @ z.T


def _contrast(o, b):
    return functional.cross_entropy(_similar(o) * 5, torch.arange(len(o)))


def _ranking(o, b):
    scores = _similar(o)
    return functional.relu(0.5 - scores.diagonal()[:, None] + scores).mean()


def _differences(o):
    return o[:, 0][:, None] - o[:, 0][None, :]


def _picked(o, b):
    return _each(o, b)[b["mask"] > 0]


def _loose(o, b, **options):
    keep = b["mask"] > 0
    return functional.cross_entropy(o[keep], b["y"][keep], **options)


# name: (data, loss, what the error says)
REFUSALS = {
    "ignore_index": (_tokens, _cut, "lengths"),
    "class_weights": (
        _rows,
        lambda o, b: _ce(o, b, weight=torch.tensor([0.1, 1, 4, 20], dtype=DOUBLE)),
        "sum of the class weights .* reduction='none', with the same weight",
    ),
    "ignored_classes": (
        _rows,
        lambda o, b: _ce(o, b, ignore_index=int(b["y"].flatten()[0])),
        "how many samples ignore_index leaves",
    ),
    "ignore_index_smoothed": (_tokens, lambda o, b: _cut(o, b, label_smoothing=0.1), "lengths"),
    "items_as_number": (
        _tokens,
        lambda o, b: _cut(o, b, reduction="sum") / int((b["short"] != -100).sum()),
        "divided by 8, which is neither the batch size 5",
    ),
    "items_as_tensor": (
        _tokens,
        lambda o, b: _cut(o, b, reduction="sum") / (b["short"] != -100).sum(),
        "tensor without axes",
    ),
    "mask_sum": (_tokens, lambda o, b: (_each(o, b) * b["mask"]).sum() / b["mask"].sum(), "tensor without axes"),
    "mask_item": (_tokens, lambda o, b: (_each(o, b) * b["mask"]).sum() / b["mask"].sum().item(), "divided by 8"),
    "times_reciprocal": (
        _tokens,
        lambda o, b: (_each(o, b) * b["mask"]).sum() * (1 / b["mask"].sum().item()),
        "multiplied by 0.125",
    ),
    "mask_in_the_sum": (_tokens, lambda o, b: (_each(o, b) * b["mask"] / b["mask"].sum()).sum(), "tensor without"),
    "mask_of_another_sum": (_tokens, lambda o, b: (_each(o, b) * _first_two(o)).sum() / b["mask"].sum(), "axes"),
    "picked_mean": (_tokens, lambda o, b: _picked(o, b).mean(), "mean over 8 values"),
    "picked_weighted": (_tokens, lambda o, b: (_picked(o, b) * torch.linspace(1, 2, 8)).mean(), "mean over 8 values"),
    "picked_sum": (_tokens, lambda o, b: _picked(o, b).sum() / (b["mask"] > 0).sum().item(), "divided by 8"),
    "picked_before": (_tokens, _loose, "mean over 8 values"),
    "picked_before_sum": (_tokens, lambda o, b: _loose(o, b, reduction="sum") / int(b["mask"].sum()), "divided by 8"),
    "contrastive": (_rows, _contrast, "loss of one sample depends on other samples"),
    "ranking": (_rows, _ranking, "They meet in 'mm'"),
    "all_targets": (
        _rows,
        lambda o, b: functional.mse_loss(*torch.broadcast_tensors(o[:, :1], b["z"][:, 0])),
        r"\(5, 1\) becomes \(5, 5\)",
    ),
    "all_targets_subtracted": (_rows, lambda o, b: (o[:, :1] - b["z"][:, 0]).square().mean(), "squeeze"),
    "all_targets_a_row": (_rows, lambda o, b: (o[:, :1] - b["z"][:, 0]).square().mean(1).mean(), "squeeze"),
    "other_targets": (_rows, lambda o, b: (o @ b["z"].T).softmax(1).diagonal().log().mean(), "becomes"),
    # What sends no gradient in this batch may in the next.
    "idle_hinge": (_rows, lambda o, b: functional.relu(_differences(o) - 1e3).mean(), "They meet in 'sub'"),
    "idle_pairs": (_rows, lambda o, b: functional.softplus(_differences(o) * 0 * b["y"]).mean(), "pairs each"),
    "neighbours": (
        _rows,
        lambda o, b: functional.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0), margin=9.0),
        "loss of one sample depends",
    ),
    "views_put_together": (
        lambda: {key: value.repeat_interleave(6, 0)[:6] for key, value in _rows().items()},
        lambda o, b: functional.triplet_margin_loss(*o.chunk(3), margin=9.0),
        "of 2 rows were made of its outputs.* call it once for each",
    ),
    "pairs": (_rows, lambda o, b: _pairwise(o).sum() / len(o), "loss of one sample depends"),
    "pairs_in_a_loop": (
        _rows,
        lambda o, b: sum((o[i] - o[j]).abs().sum() for i in range(len(o)) for j in range(i)) / len(o),
        "'abs'",
    ),
    "maximum": (_rows, lambda o, b: _each(o, b).max(), "'max'"),
    "topk": (_rows, lambda o, b: _each(o, b).topk(2).values.mean(), "'topk'"),
    "median": (_rows, lambda o, b: _each(o, b).median(), "'median'"),
    "rmse": (_rows, lambda o, b: functional.mse_loss(o, b["z"]).sqrt(), "'sqrt'"),
    "logsumexp": (_rows, lambda o, b: _each(o, b).logsumexp(0), "'logsumexp'"),
    "norm": (_rows, lambda o, b: o.norm(), "norm"),
    "deviation": (_rows, lambda o, b: o.std(), "'std'"),
    "centred": (_rows, lambda o, b: 9 * (o - o.mean(0)).square().mean(), "loss of one sample depends"),
    "softmax_over_samples": (
        _rows,
        lambda o, b: (_each(o, b).softmax(0) * _each(o, b)).sum() / len(o),
        "loss of one sample depends",
    ),
    "product": (_rows, lambda o, b: _ce(o, b) * o.square().mean(), "'mul'"),
    "mean_and_sum": (_rows, lambda o, b: _ce(o, b) + _ce(o, b, reduction="sum"), "averaged .* another is summed"),
    "part": (_rows, lambda o, b: _ce(o[:2], {"y": b["y"][:2]}), "part of it was left out"),
    "dropped": (_rows, lambda o, b: _each(o, b)[1:].mean(), "part of it was left out"),
    "stacked_of_some": (
        _tokens,
        lambda o, b: torch.stack([_ce(o[i], {"y": b["y"][i]}) for i in range(len(o)) if b["mask"][i, 1] > 0]).mean(),
        "mean over 2 values",
    ),
    "stacked_rows_of_some": (
        _tokens,
        lambda o, b: torch.stack([row.sum() for row in _own_rows(o, b) if len(row) > 1]).mean(),
        "mean over 2 values",
    ),
    "stacked_one_twice": (
        _rows,
        lambda o, b: torch.stack([_ce(o[i], {"y": b["y"][i]}) for i in [0, *range(len(o))]]).mean(),
        "mean over 6 values",
    ),
    "joined_mean": (_tokens, lambda o, b: torch.cat(_own_rows(o, b)).mean(), "mean over 8 values"),
    # Provable by nobody who sees the graph only.
    "scaled_by_tensor": (_rows, lambda o, b: _ce(o, b) * torch.tensor(65536.0), "GradScaler"),
    "sum_over_constant": (_rows, lambda o, b: _ce(o, b, reduction="sum") / 37, "divided by 37"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_loss(name, strategy):
    data, loss, says = REFUSALS[name]
    model, clipper = _attached(strategy, 1.0)
    with pytest.raises(REFUSED, match=says):
        _back(model, clipper, loss, data())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("donates", [True, False])
def test_a_compiled_loss_is_refused_where_its_backward_runs_once_alone(donates):
    batch = _rows()
    torch.compiler.reset()
    each = torch.compile(lambda o, y: functional.cross_entropy(o, y, reduction="none"), backend="aot_eager")
    per_sample = per_sample_gradients(_model(), batch, lambda m, b: _each(m(b["x"]), b), axes={})
    wanted = clip_and_sum(per_sample)
    model, clipper = _attached("auto", wanted.max_grad_norm)
    refused = pytest.raises(UnsupportedModelError, match="donated_buffer = False") if donates else nullcontext()
    with config.patch(donated_buffer=donates), refused:
        # By a plain step, whose graph does not stay.
        each(_model()(batch["x"]), batch["y"]).sum().backward()
        # In checked ones it is not compiled.
        for _ in range(4):
            model.zero_grad()
            clipper.backward(each(model(batch["x"]), batch["y"]))
    if not donates:
        sums = {name: p.grad for name, p in model.named_parameters()}
        torch.testing.assert_close(sums, wanted.clipped, rtol=1e-9, atol=1e-12)


def _thresholds(o, b):
    """Four thresholds for each output: as many as four samples."""
    return (o[:, :1] - torch.arange(4.0, dtype=o.dtype)).sigmoid().mean()


def test_an_axis_that_was_of_another_length_holds_no_samples():
    model, clipper = _attached("bookkeeping", 1.0)
    for size in (5, 4, 3):
        batch = take(_rows(), list(range(size)), {})
        assert all(grad.isfinite().all() for grad in _back(model, clipper, _thresholds, batch).values())


def test_an_axis_that_was_always_as_long_as_the_batch_may_hold_samples():
    model, clipper = _attached("bookkeeping", 1.0)
    with pytest.raises(REFUSED, match="begin with a batch of another size"):
        _back(model, clipper, _thresholds, take(_rows(), list(range(4)), {}))


# What a loss takes along an axis of its outputs, where it happens to be as many as there are samples.
TAKEN = {
    "a_slice": lambda o: o[:, 1:],
    "pieces": lambda o: o.split(3, 1)[0],
    "diagonals": lambda o: o.diag_embed().diagonal(1, 1, 2),
    "windows": lambda o: o.unfold(1, 2, 1)[..., 0],
    "padding": lambda o: functional.pad(o[:, :2], (0, 1)),
    "mirrored": lambda o: functional.pad(o[:, :2], (0, 1), "reflect"),
    "largest": lambda o: o.topk(3, 1).values,
    "means": lambda o: functional.avg_pool1d(o, 2, 1),
    "maxima": lambda o: functional.max_pool1d(o.unsqueeze(1), 2, 1).squeeze(1),
    "unit_lengths": lambda o: functional.normalize(o[:, :3], dim=1),
    "resampled": lambda o: functional.interpolate(o.unsqueeze(1), size=3).squeeze(1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_loss_takes_of_its_outputs_may_be_as_many_as_the_samples(name):
    model, clipper = _attached("bookkeeping", 1.0)
    batch = take(_rows(), [0, 1, 2], {})
    found = _back(model, clipper, lambda o, b: TAKEN[name](o).square().sum(1).mean(), batch)
    assert all(grad.isfinite().all() for grad in found.values())


# Targets of other samples; with as many samples as features their axis looks like one of the outputs.
ALL_TARGETS = {
    "product": lambda o, b: o @ b["z"].T,
    "linear": lambda o, b: functional.linear(o, b["z"], o.detach()[0]),
    "einsum": lambda o, b: torch.einsum("bi,ci->bc", o, b["z"]),
    "left_factor": lambda o, b: (b["z"] @ o.T).T,
    "each_alone": lambda o, b: (o[:, None] @ b["z"].T).squeeze(1),
    "distances": lambda o, b: -torch.cdist(o, b["z"]),
    "differences": lambda o, b: -(o[:, None] - b["z"]).square().sum(-1),
    "labels_as_columns": lambda o, b: o[:, b["y"]],
    "columns": lambda o, b: o.index_select(1, b["y"]),
    "gathered": lambda o, b: o.gather(1, b["y"].expand(len(o), -1)),
}


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_all_targets_are_found_where_there_are_as_many_as_features(name):
    model, clipper = _attached("bookkeeping", 1.0)
    batch = take(_rows(), list(range(V)), {})
    with pytest.raises(SampleMixingError, match="pairs each of the 4 samples"):
        _back(model, clipper, lambda o, b: functional.cross_entropy(ALL_TARGETS[name](o, b), torch.arange(V)), batch)


@pytest.mark.parametrize(
    "picked", [lambda o: o[torch.arange(V), [2, 0, 1, 1]], lambda o: o[:, -1], lambda o: o[:, [2]]]
)
def test_positions_that_a_loss_picks_are_no_other_samples(picked):
    """One position of each of as many samples as there are features."""
    model, clipper = _attached("bookkeeping", 1.0)
    batch = take(_tokens(), [0, 1, 2, 3], {})
    found = _back(model, clipper, lambda o, b: picked(o).square().sum(-1).mean(), batch)
    assert all(grad.isfinite().all() for grad in found.values())


# Of one sample's own positions with each other, of which there are as many as samples.
WITHIN = {
    "broadcast": lambda o: (o[:, :, None] * o[:, None]).sum(-1),
    "differences": lambda o: (o.unsqueeze(2) - o.unsqueeze(1).tanh()).square().sum(-1),
    "product": lambda o: o @ o.mT,
    "einsum": lambda o: torch.einsum("bid,bjd->bij", o, o),
    "distances": lambda o: torch.cdist(o, o + 0.1),
}


@pytest.mark.parametrize("name", WITHIN)
def test_positions_that_a_loss_pairs_within_each_sample_may_be_as_many_as_samples(name):
    model, clipper = _attached("bookkeeping", 1.0)
    batch = take(_tokens(), [0, 1, 2], {})
    found = _back(model, clipper, lambda o, b: WITHIN[name](o).sin().sum((1, 2)).mean(), batch)
    assert all(grad.isfinite().all() for grad in found.values())


# All targets, brought into the graph first.
IN_THE_GRAPH = {
    "beside outputs": lambda o, t: o[:, :1] - (o[:, 0] * 0 + t),
    "beside detached ones": lambda o, t: o[:, :1] - (o[:, 0].detach() * o[:, 1].exp() * 0 + t),
    "chosen": lambda o, t: o[:, :1] - torch.where(t > -1, t, o[:, 0] * 0),
    "expanded": lambda o, t: o[:, :1].expand(-1, len(t)) * (o[:, 1] * 0 + t),
    "both expanded": lambda o, t: torch.sub(*torch.broadcast_tensors(o[:, :1], o[:, 1] * 0 + t)),
}


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("name", IN_THE_GRAPH)
def test_targets_that_enter_the_graph_before_they_are_paired_are_found(name, size):
    model, clipper = _attached("bookkeeping", 1.0)
    batch = take(_rows(), list(range(size)), {})
    with pytest.raises(SampleMixingError):
        _back(model, clipper, lambda o, b: IN_THE_GRAPH[name](o, b["z"][:, 0]).square().mean(1), batch)


def test_losses_of_a_loop_over_samples_are_divided_by_their_own_counts_as_the_refusal_says():
    model, clipper = _attached("bookkeeping", 1.0)

    def sums(x, counts):
        return torch.stack([row[:count].sin().sum() for row, count in zip(model(x), counts, strict=True)])

    for counts in ([1, 2, 3, 2, 1], [3, 3, 3], [2, 3, 1], [3]):
        clipper.backward((sums(_rows()["x"][: len(counts)], counts) / torch.tensor(counts)).mean())
    apart = [total / count for count, total in enumerate(sums(_rows()["x"], [1, 2, 3, 4, 5]), 1)]
    clipper.backward(torch.stack(apart).mean())
    thirds = torch.stack([total / 3 for total in sums(_rows()["x"], [3] * B)]).mean()
    with pytest.raises(LossReductionError, match=r"torch.stack\(sums\) / torch.tensor\(counts\)"):
        clipper.backward(thirds)


def test_weights_of_samples_in_a_loop_over_them_come_behind_it_as_the_refusal_says():
    model, clipper = _attached("bookkeeping", 1.0)
    losses, weights = list(model(_rows()["x"]).square().sum(1)), torch.rand(B).double()
    weighted = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)])
    with pytest.raises(LossReductionError, match=r"torch.stack\(losses\) \* weights"):
        clipper.backward(weighted.mean())
    clipper.backward((torch.stack(losses) * weights).mean())


FOREIGN = {
    "temperature": lambda own: lambda o, y: functional.cross_entropy(o * own, y),
    "criterion_with_weights": lambda own: lambda o, y: functional.cross_entropy(o + own, y) + own,
    "head": lambda own: lambda o, y: functional.cross_entropy(functional.linear(o, own * torch.eye(V).double()), y),
    "losses_of_samples": lambda own: lambda o, y: functional.cross_entropy(o * own, y, reduction="none"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("size", [1, 5])
def test_a_trainable_parameter_of_the_loss_itself_is_refused(name, size):
    batch = take(_rows(), list(range(size)), {})
    model, clipper = _attached("ghost", 1.0)
    own = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(UncoveredParameterError, match="no part of the private model"):
        clipper.backward(FOREIGN[name](own)(model(batch["x"]), batch["y"]))
    assert own.grad is None


TERMS = {"own": lambda model, own: model.weight.mean(), "of nobody": lambda model, own: own}


@pytest.mark.parametrize("name", TERMS)
def test_a_parameter_that_weighs_means_over_samples_is_refused_with_the_place_for_it(name):
    """Tasks are weighed by learned variances in the loop, as papers have it, or in a forward that returns one loss."""
    batch = _rows()
    model, clipper = _attached("bookkeeping", 1.0)
    own = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    log_var = TERMS[name](model[0], own)
    with pytest.raises(UncoveredParameterError, match="let the forward return each sample's own loss"):
        clipper.backward((-log_var).exp() * functional.cross_entropy(model(batch["x"]), batch["y"]) + log_var)


def test_a_sum_whose_weight_may_be_one_over_the_batch_is_declared_as_the_refusal_says():
    """A variational autoencoder's two sums, one times 0.5, in batches of two."""
    batch = take(_rows(), [0, 1], {})

    def step(reduction):
        model, clipper = _attached("bookkeeping", 1.0, reduction)
        means = model(batch["x"])
        clipper.backward(functional.mse_loss(means, batch["z"], reduction="sum") + 0.5 * means.square().sum())

    with pytest.raises(LossReductionError, match="summed throughout: loss_reduction='sum'"):
        step("mean")
    step("sum")


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("last", ["the batch", "the others"])
def test_a_loss_of_the_batch_and_of_another_number_of_rows_is_refused_by_their_numbers(rows, last):
    """Generated rows beside the batch, or public ones from a loader of their own."""
    batch, (model, clipper) = _rows(), _attached("bookkeeping", 1.0)
    inputs = [batch["x"], torch.ones(rows, F, dtype=DOUBLE)][:: 1 if last == "the others" else -1]
    losses = [functional.cross_entropy(model(x), torch.arange(len(x)) % V) for x in inputs]
    with pytest.raises(BatchAxisError, match=f"forwards of .*{rows}.* samples.*as many rows of other data"):
        clipper.backward(losses[0] + losses[1])


def test_what_is_not_trained_may_take_part_in_the_loss():
    """A frozen teacher, one called without gradients, and inputs that want a gradient are nobody's parameters."""
    batch, (model, clipper) = _rows(), _attached("bookkeeping", 1.0)
    frozen = torch.nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(o, b):
        with torch.no_grad():
            target = trained * b["z"]
        return functional.mse_loss(o * frozen, target)

    assert any(grad.any() for grad in _back(model, clipper, loss, batch).values())


class _Packed(nn.Module):
    """Scores of each position of packed sequences, in the order of their rows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 9)

    def forward(self, ids, lengths):
        return self.head(self.body(_packed(self.embedding(ids), lengths))[0].data)


def _packed(values, lengths):
    return nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)


def _packed_loss(model, records, reduction):
    ids, lengths = nn.utils.rnn.pad_sequence(records, batch_first=True), torch.tensor([len(ids) for ids in records])
    total = functional.cross_entropy(model(ids, lengths), _packed(ids, lengths).data, reduction=reduction)
    return total if reduction == "mean" else total / len(records)


def test_losses_over_packed_rows_are_exact_where_they_are_sums_of_records():
    torch.manual_seed(5)
    model, twin = _Packed().double(), _Packed().double()
    twin.load_state_dict(model.state_dict())
    with ghostclip.GhostClipper(model, max_grad_norm=0.5):
        for lengths in ([3, 5, 2], [4], [2, 6, 5, 3, 1, 4], [1], [3, 3], [6, 2, 5, 4, 3, 2, 1]):
            records = [torch.randint(1, 9, (length,)) for length in lengths]
            wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for record in records:
                grads = torch.autograd.grad(_packed_loss(twin, [record], "sum"), list(twin.parameters()))
                factor = min(1.0, 0.5 / whole_norm(dict(enumerate(grads))).item())
                for total, grad in zip(wanted.values(), grads, strict=True):
                    total.add_(factor * grad)
            model.zero_grad()
            _packed_loss(model, records, "sum").backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12)
        with pytest.raises(LossReductionError, match="differ in number"):
            _packed_loss(model, records, "mean").backward()
