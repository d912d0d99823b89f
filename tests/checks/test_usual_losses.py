"""Losses as people write them, right ones, with every step checked: none may be refused, at whatever size of batch.

Batches of random size are as large as classes, features or positions sooner or later, and a training goes on for days.

Shape letters: B samples, T positions, D features, C classes.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.checks.unchecked import CheckSchedule
from ghostclip.errors import GhostClipError
from ghostclip.losses import token_losses

D, C, IDS = 6, 4, 11
SIZES = ((4, 4), (6, 5), (11, 6))  # B on average, T
STEPS = 12


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


class _Tagger(_Perceptron):
    def __init__(self, *, recurrent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS + 1, D)
        self.body = nn.GRU(D, D, batch_first=True) if recurrent else nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.embedding(x))
        return super().forward(hidden[0] if isinstance(hidden, tuple) else hidden)


class _Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(1, C, 3, padding=1), nn.GroupNorm(2, C), nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


def _own(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask).sum(1) / mask.sum(1).clamp(min=1)


def _each(m, x, mask, targets=None):
    losses = F.cross_entropy(m(x).transpose(1, 2), x % C if targets is None else targets, reduction="none")
    return _own(losses, mask)


def _log_odds(m, x, mask):
    return _own(m(x).log_softmax(-1).gather(-1, (x % C)[..., None]).squeeze(-1), mask)


def _paths(m, x, mask):
    scores, alpha = m(x), None
    moves = torch.linspace(-1, 1, C * C).view(C, C)
    for place in range(x.shape[1]):
        after = scores[:, place]
        if alpha is not None:
            after = torch.logsumexp(alpha[:, :, None] + moves + after[:, None, :], 1)
        alpha = after if alpha is None else torch.where(mask[:, place, None] > 0, after, alpha)
    return alpha.logsumexp(1).mean()


def _answers(m, x, mask):
    begin, end = m(x)[..., :2].split(1, -1)
    closed, last = mask == 0, mask.sum(1) - 1
    begins = F.cross_entropy(begin.squeeze(-1).masked_fill(closed, -1e4), 0 * last)
    return (begins + F.cross_entropy(end.squeeze(-1).masked_fill(closed, -1e4), last)) / 2


def _summed_in_a_loop(m, x, y):
    total = 0.0
    for scores, label in zip(m(x), y, strict=True):
        total = total - scores.log_softmax(0)[label]
    return total / len(x)


def _of_ratios(m, x, y):
    likely = m(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    ratio = (likely - likely.detach()).exp()
    return -torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0]).mean()


def _agreed(m, x, y):
    with torch.no_grad():
        sure = m(x * 0.9).softmax(1).max(1)
    return (F.cross_entropy(m(x), sure.indices, reduction="none") * (sure.values > 0.3)).mean()


# Of features (B, D) and labels (B,).
OF_FEATURES = {
    "cross-entropy": lambda m, x, y: F.cross_entropy(m(x), y),
    "by vector": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").mean(),
    "gathered": lambda m, x, y: -m(x).log_softmax(-1).gather(1, y[:, None]).mean(),
    "indexed": lambda m, x, y: -m(x).log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "in a range": lambda m, x, y: -m(x).log_softmax(-1)[range(len(y)), y].mean(),
    "one-hot": lambda m, x, y: -(F.one_hot(y, C) * m(x).log_softmax(-1)).sum() / len(x),
    "focal": lambda m, x, y: (lambda e: ((1 - (-e).exp()) ** 2 * e).mean())(F.cross_entropy(m(x), y, reduction="none")),
    "binary": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x)[:, 0], (y > 1).float()),
    "several labels": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), F.one_hot(y, C).float()),
    "sums of means": lambda m, x, y: (m(x) - x[:, :C]).square().mean(0).sum(),
    "norms": lambda m, x, y: (m(x) - x[:, :C]).norm(dim=1).mean(),
    "quantiles": lambda m, x, y: torch.stack(
        [torch.maximum(q * e, (q - 1) * e) for q, e in zip((0.1, 0.5, 0.9), (x[:, :3] - m(x)[:, :3]).T, strict=True)]
    ).mean(),
    "heads": lambda m, x, y: sum(F.mse_loss(o, x[:, i]) for i, o in enumerate(m(x).unbind(1))) / C,
    "gaussian": lambda m, x, y: (lambda o: F.gaussian_nll_loss(o[:, 0], x[:, 0], F.softplus(o[:, 1]) + 0.1))(m(x)),
    "mixture": lambda m, x, y: (
        lambda o: -(o[:, :2].log_softmax(1) - (x[:, :1] - o[:, 2:]).square()).logsumexp(1).mean()
    )(m(x)),
    "distribution": lambda m, x, y: -torch.distributions.Categorical(logits=m(x)).log_prob(y).mean(),
    "ratios": _of_ratios,
    "distilled": lambda m, x, y: F.kl_div(m(x).log_softmax(1), x[:, :C].softmax(1), reduction="batchmean"),
    "pseudo-labels": _agreed,
    "class weights": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="none") * torch.tensor([0.5, 1, 2, 1])[y]
    ).mean(),
    "either": lambda m, x, y: torch.where(
        y > 1, F.cross_entropy(m(x), y, reduction="none"), m(x).square().mean(1)
    ).mean(),
    "rows of one": lambda m, x, y: torch.stack(
        [F.cross_entropy(a[None], b[None]) for a, b in zip(m(x), y, strict=True)]
    ).mean(),
    "added in a loop": _summed_in_a_loop,
    "entries": lambda m, x, y: torch.stack([-row[label] for row, label in zip(m(x), y.tolist(), strict=True)]).mean(),
    "split": lambda m, x, y: torch.cat(
        [F.cross_entropy(a, b, reduction="none") for a, b in zip(m(x).split(1), y.split(1), strict=True)]
    ).mean(),
    "outer product": lambda m, x, y: (m(x)[:, :, None] * x[:, None, :C]).square().mean(),
    "batched products": lambda m, x, y: -torch.bmm(m(x)[:, None], x[:, :C, None]).view(-1).sigmoid().log().mean(),
    "small matrices": lambda m, x, y: torch.linalg.det(m(x).view(-1, 2, 2)).square().mean(),
    "triplets": lambda m, x, y: F.triplet_margin_loss(m(x), m(x * 0.9), m(x.flip(1))),
}
# Of ids (B, T), a mask (B, T) and labels (B,); both are also cut to the longest record, in the loop or before.
OF_TOKENS = {
    "own mean": lambda m, x, k, y: F.cross_entropy((m(x) * k[..., None]).sum(1) / k.sum(1, keepdim=True), y),
    "last": lambda m, x, k, y: F.cross_entropy(m(x)[torch.arange(len(x)), k.sum(1) - 1], y),
    "first": lambda m, x, k, y: F.cross_entropy(m(x)[:, 0], y),
    "largest": lambda m, x, k, y: F.cross_entropy(m(x).masked_fill(k[..., None] == 0, -1e4).amax(1), y),
    "tagged": lambda m, x, k, y: _each(m, x, k).mean(),
    "ignored": lambda m, x, k, y: _each(m, x, k, (x % C).masked_fill(k == 0, -100)).mean(),
    "summed": lambda m, x, k, y: (F.cross_entropy(m(x).mT, x % C, reduction="none") * k).sum() / len(x),
    "by the library": lambda m, x, k, y: token_losses(m(x), (x % C).masked_fill(k == 0, -100)).mean(),
    "rows cut": lambda m, x, k, y: torch.stack(
        [F.cross_entropy(v[:n], a[:n] % C) for v, a, n in zip(m(x), x, k.sum(1).tolist(), strict=True)]
    ).mean(),
    "rows masked": lambda m, x, k, y: (
        sum(F.cross_entropy(v[b.bool()], a[b.bool()] % C) for v, a, b in zip(m(x), x, k, strict=True)) / len(x)
    ),
    "rows pooled": lambda m, x, k, y: F.cross_entropy(
        torch.stack([v[:n].mean(0) for v, n in zip(m(x), k.sum(1).tolist(), strict=True)]), y
    ),
    "last of rows": lambda m, x, k, y: torch.stack(
        [F.cross_entropy(v[n - 1], b) for v, n, b in zip(m(x), k.sum(1).tolist(), y, strict=True)]
    ).mean(),
    "last by place": lambda m, x, k, y: (
        lambda o: sum(F.cross_entropy(o[i, int(k[i].sum()) - 1][None], y[i : i + 1]) for i in range(len(x))) / len(x)
    )(m(x)),
    "answers": lambda m, x, k, y: _answers(m, x, k),
    "paths": lambda m, x, k, y: _paths(m, x, k),
    "preferred": lambda m, x, k, y: -F.logsigmoid(_log_odds(m, x, k) - _log_odds(m, x * 3 % IDS, k)).mean(),
}
# Of images (B, 1, T, T + 1), labels of pixels, and labels (B,).
OF_IMAGES = {
    "pixels": lambda m, x, t, y: F.cross_entropy(m(x), t),
    "pixels in rows": lambda m, x, t, y: F.cross_entropy(m(x).permute(0, 2, 3, 1).reshape(-1, C), t.reshape(-1)),
    "own pixels": lambda m, x, t, y: _own(
        F.cross_entropy(m(x), t, reduction="none").flatten(1), (t > 0).flatten(1)
    ).mean(),
    "overlap": lambda m, x, t, y: (
        1 - (m(x).softmax(1) * F.one_hot(t, C).permute(0, 3, 1, 2)).sum((2, 3)) / (t[0].numel() + 1)
    ).mean(),
    "pooled": lambda m, x, t, y: F.cross_entropy(m(x).mean((2, 3)), y),
    "restored": lambda m, x, t, y: F.mse_loss(m(x)[:, :1], x) + (m(x)[:, :, 1:] - m(x)[:, :, :-1]).abs().mean(),
    "image by image": lambda m, x, t, y: torch.stack(
        [F.cross_entropy(a[None], b[None]) for a, b in zip(m(x), t, strict=True)]
    ).mean(),
}


def _features(records: int, positions: int) -> list[Tensor]:
    return [torch.randn(records, D), torch.randint(C, (records,))]


def _images(records: int, positions: int) -> list[Tensor]:
    pixels = records, positions, positions + 1
    return [torch.randn(*pixels)[:, None], torch.randint(C, pixels), torch.randint(C, (records,))]


def _texts(records: int, positions: int) -> list[Tensor]:
    mask = (torch.arange(positions) < torch.randint(2, positions + 1, (records, 1))).long()
    return [torch.randint(1, IDS, (records, positions)) * mask, mask, torch.randint(C, (records,))]


def _cut(loss):
    def of_cut(m, x, mask, y):
        longest = int(mask.sum(1).max())
        return loss(m, x[:, :longest], mask[:, :longest], y)

    return of_cut


def _padded(records):
    x, mask, y = map(torch.stack, zip(*records, strict=True))
    longest = int(mask.sum(1).max()) if len(x) else 1
    return x[:, :longest], mask[:, :longest], y


CASES = {
    **{f"features, {name}": (_Perceptron, _features, None, loss) for name, loss in OF_FEATURES.items()},
    **{f"images, {name}": (_Segmenter, _images, None, loss) for name, loss in OF_IMAGES.items()},
    **{f"texts, {name}": (_Tagger, _texts, None, loss) for name, loss in OF_TOKENS.items()},
    **{f"texts that a loop cuts, {name}": (_Tagger, _texts, None, _cut(loss)) for name, loss in OF_TOKENS.items()},
    **{
        f"padded texts, {name}": (lambda: _Tagger(recurrent=True), _texts, _padded, loss)
        for name, loss in OF_TOKENS.items()
    },
}
# In the first steps alone, these may be mistaken: by sizes a matrix of constants for the targets of all samples, and a
# weight for the length of records of two positions.
MISTAKEN = {"paths": "pairs each of the", "answers": "divided by 2, a number of positions"}


@pytest.mark.parametrize("name", CASES)
def test_no_right_loss_is_refused_in_any_step(name, monkeypatch):
    monkeypatch.setattr(CheckSchedule, "is_due", lambda *_: True)
    monkeypatch.setattr(CheckSchedule, "advance", lambda *_: True)
    model_of, records_of, collate, loss = CASES[name]
    for seed, (batch_size, positions) in enumerate(SIZES):
        torch.manual_seed(seed)
        model = model_of()
        data = TensorDataset(*records_of(STEPS * batch_size, positions))
        model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), noise_multiplier=0.5,
            data_loader=DataLoader(data, batch_size, **({"collate_fn": collate} if collate else {})), max_grad_norm=1.0,
        )  # fmt: skip
        for number, (x, *targets) in enumerate(loader):
            optimizer.zero_grad()
            value = loss(model, x, *targets) if len(x) else model(x).sum()
            known = MISTAKEN.get(name.rpartition(", ")[2], "nothing") if number < 2 else "nothing"
            try:
                value.backward()
            except GhostClipError as error:
                if known not in str(error):
                    raise
                break
            optimizer.step()
