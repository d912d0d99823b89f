"""Losses that loops are searched with: those that are a sum over records, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.loops.models import cross_entropy, encoder, functional, mlp, tag_losses, tag_means, tagger
from tests.loops.world import Losses, World

# Of the model, the two tensors of a batch, to the loss.
BatchLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss and what it is computed on.

    Attributes:
        batch: The loss of a batch.
        make: Makes the model.
        reference: The loss of each record alone, where the batch's loss is their mean or sum.
        tokens: Whether records are tokens.
        reduction: As declared to the engine.
        unseen: Why no engine can see what a record does; see `Loop`.
        uneven: Why it may be refused at another step without a record; see `Loop`.
    """

    batch: BatchLoss
    make: Callable[[], nn.Module] = mlp
    reference: Callable[[World], Losses] | None = None
    tokens: bool = False
    reduction: str = "mean"
    unseen: str = ""
    uneven: str = ""

    def data(self, world: World) -> Dataset:
        """The records."""
        return world.tokens if self.tokens else world.data


def _each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, reduction="none")


def _alone(each: BatchLoss) -> Callable[[World], Losses]:
    """The reference of a loss that is given for each record, (B,)."""

    def of(world: World) -> Losses:
        return lambda model, records: each(model, world.features[records], world.labels[records])

    return of


def _smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, reduction="none", label_smoothing=0.1)


def _terms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    return functional.cross_entropy(scores, y, reduction="none") + 0.1 * scores.square().sum(1)


def _twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, x, y) + 0.5 * _each(model, x * 1.1, y)


def _focal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = _each(model, x, y)
    return (1 - (-each).exp()) ** 2 * each


def _weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, x, y) * (1.0 + x[:, 0].detach().abs())


def _batch_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = 1.0 + x[:, 0].detach().abs()
    return (_each(model, x, y) * weights).sum() / weights.sum().clamp(min=1e-9)


def _class_balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=3).clamp(min=1).double()
    return (_each(model, x, y) * (len(y) / counts)[y]).mean()


def _info_nce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    del y
    one, two = functional.normalize(model(x), dim=1), functional.normalize(model(x.flip(1)), dim=1)
    return functional.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)))


def _hardest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = _each(model, x, y)
    return each.topk(max(1, len(each) // 2) if len(each) else 0).values.mean()


def _mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, 0.7 * x + 0.3 * x.flip(0), y).mean()


def _gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = _each(model, x, y).mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def _augmented(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, torch.cat([x, x * 1.1]), torch.cat([y, y])).mean()


def _interleaved(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)).mean()


def _folded(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(torch.stack([x, x * 1.1], dim=1))
    return functional.cross_entropy(scores.flatten(0, 1), y.repeat_interleave(2))


def _folded_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (_each(model, x, y) + _each(model, x * 1.1, y)) / 2


def _detached(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = _each(model, x, y)
    return (each / each.detach().sum().clamp(min=1e-9)).sum()


def _standardised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = _each(model, x, y)
    return (each / (1.0 + each.detach().std(unbiased=False))).mean() if len(each) else each.sum()


def _contrast_in_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _each(model, x - x.mean(0, keepdim=True).nan_to_num(), y).mean()


def _masked_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    keep = (x[:, 1] > 0.7).double()
    return (_each(model, x, y) * keep).sum() / keep.sum().clamp(min=1)


def _selected_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    each = _each(model, x, y)[x[:, 1] > 0.7]
    return each.mean() if len(each) else each.sum()


def _pairwise(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)[:, 0]
    return functional.softplus(-(scores[:, None] - scores[None, :]) * (y[:, None] - y[None, :])).mean()


def _fixed_class_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y, weight=torch.tensor([1.0, 4.0, 1.0], dtype=torch.float64))


def _token_mean(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return (tag_losses(model, ids) * mask).sum() / mask.sum().clamp(min=1)


def _token_selected(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return tag_losses(model, ids)[mask].sum() / max(1, int(mask.sum()))


def _token_scaled(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return (tag_losses(model, ids) * mask).sum() * (1.0 / max(1.0, float(mask.sum())))


def _token_ignored(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    targets = (ids > 6).long().masked_fill(~mask, -100)
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _token_summed(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    targets = (ids > 6).long().masked_fill(~mask, -100)
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum") / len(ids)


def _token_sums(world: World) -> Losses:
    return lambda model, records: (tag_losses(model, world.ids[records]) * world.mask[records]).sum(1)


def _own_means(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return ((tag_losses(model, ids) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


ORDINARY = "mean"
LOSSES: dict[str, Loss] = {
    "mean": Loss(lambda m, x, y: _each(m, x, y).mean(), reference=cross_entropy),
    "criterion's mean": Loss(lambda m, x, y: functional.cross_entropy(m(x), y), reference=cross_entropy),
    "sum": Loss(lambda m, x, y: _each(m, x, y).sum(), reference=cross_entropy, reduction="sum"),
    "sum declared as mean": Loss(lambda m, x, y: _each(m, x, y).sum(), reference=cross_entropy),
    "mean declared as sum": Loss(lambda m, x, y: _each(m, x, y).mean(), reference=cross_entropy, reduction="sum"),
    "sum over the expected size": Loss(
        lambda m, x, y: _each(m, x, y).sum() / 6,
        reference=cross_entropy,
        uneven="is the mean in batches of six, and refused in the first other one",
    ),
    "label smoothing": Loss(lambda m, x, y: _smoothed(m, x, y).mean(), reference=_alone(_smoothed)),
    "several terms": Loss(lambda m, x, y: _terms(m, x, y).mean(), reference=_alone(_terms)),
    "terms of two means": Loss(
        lambda m, x, y: functional.cross_entropy(m(x), y) + 0.5 * functional.cross_entropy(m(x * 1.1), y),
        reference=_alone(_twice),
    ),
    "two forwards": Loss(lambda m, x, y: _twice(m, x, y).mean(), reference=_alone(_twice)),
    "focal": Loss(lambda m, x, y: _focal(m, x, y).mean(), reference=_alone(_focal)),
    "weights of each record": Loss(lambda m, x, y: _weighted(m, x, y).mean(), reference=_alone(_weighted)),
    "weights over the batch's sum": Loss(_batch_weights),
    "weights of classes": Loss(_fixed_class_weights),
    "weights from the batch's classes": Loss(_class_balanced),
    "InfoNCE": Loss(_info_nce, make=encoder),
    "pairwise ranking": Loss(_pairwise),
    "hardest half": Loss(_hardest),
    "largest": Loss(lambda m, x, y: _each(m, x, y).max() if len(x) else _each(m, x, y).sum()),
    "median": Loss(lambda m, x, y: _each(m, x, y).median() if len(x) else _each(m, x, y).sum()),
    "logsumexp": Loss(lambda m, x, y: _each(m, x, y).logsumexp(0) if len(x) else _each(m, x, y).sum()),
    "RMSE": Loss(lambda m, x, y: (_each(m, x, y).square().mean() + 1e-9).sqrt()),
    "log of the mean": Loss(lambda m, x, y: _each(m, x, y).mean().log()),
    "square of the mean": Loss(lambda m, x, y: _each(m, x, y).mean() ** 2),
    "clamped mean": Loss(lambda m, x, y: _each(m, x, y).mean().clamp(max=0.84)),
    "flooding": Loss(lambda m, x, y: (_each(m, x, y).mean() - 0.84).abs()),
    "variance": Loss(lambda m, x, y: _each(m, x, y).mean() + _each(m, x, y).var(unbiased=False)),
    "over its own detached sum": Loss(_detached),
    "over a detached deviation": Loss(_standardised),
    "over the detached mean": Loss(
        lambda m, x, y: _each(m, x, y).mean() / _each(m, x, y).mean().item(),
        unseen="losses are divided by a number of the batch, refused in the first step in which it changes",
    ),
    "mixup": Loss(_mixup),
    "centred inputs": Loss(_contrast_in_inputs),
    "gradient penalty": Loss(_gradient_penalty),
    "augmented rows": Loss(_augmented),
    "interleaved rows": Loss(_interleaved),
    "folded augmentation": Loss(_folded, reference=_alone(_folded_alone)),
    "mean of the selected": Loss(_selected_mean),
    "masked mean of records": Loss(_masked_mean),
    "weight decay in the loss": Loss(
        lambda m, x, y: _each(m, x, y).mean() + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
    "own means of tokens": Loss(_own_means, make=tagger, reference=tag_means, tokens=True),
    "sums of tokens": Loss(_token_summed, make=tagger, reference=_token_sums, tokens=True),
    "mean of all tokens": Loss(_token_mean, make=tagger, tokens=True),
    "mean of selected tokens": Loss(_token_selected, make=tagger, tokens=True),
    "tokens scaled by a number": Loss(_token_scaled, make=tagger, tokens=True),
    "ignore_index": Loss(_token_ignored, make=tagger, tokens=True),
}
