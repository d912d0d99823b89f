"""Programs that pad records to the longest of their batch: side, padding, model, loss and host.

What a program releases is held against each record alone, without company: any difference follows the company.
Shape letters: B records, T positions, F features, V classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.errors import GhostClipError
from ghostclip.facade import PrivateCriterion

IDS, CLASSES, FEATURES, CLIP = 31, 5, 6, 0.3
_F64 = torch.float64


def _masked(h_BTF: Tensor, mask_BT: Tensor) -> Tensor:
    return h_BTF * mask_BT.unsqueeze(2).to(h_BTF)


# Of hidden states (B, T, F) and masks (B, T).
POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda h, mask: h.mean(1),
    "sum": lambda h, mask: h.sum(1),
    "own mean": lambda h, mask: _masked(h, mask).sum(1) / mask.sum(1, keepdim=True),
    "over length": lambda h, mask: _masked(h, mask).sum(1) / mask.shape[1],
    "last": lambda h, mask: h[:, -1],
    "first": lambda h, mask: h[:, 0],
    "last own": lambda h, mask: h[torch.arange(len(h)), (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)],
    "own max": lambda h, mask: h.masked_fill(mask.unsqueeze(2) == 0, -1e9).amax(1),
    "max": lambda h, mask: h.amax(1),
    "each": lambda h, mask: h,
}
BODIES = (
    "none", "places", "places of mask", "conv", "masked conv", "attention", "masked attention", "causal attention",
    "lstm", "both ways lstm", "packed lstm",
)  # fmt: skip


class Model(nn.Module):
    """Embedding, something that brings positions together, and a pool."""

    def __init__(self, body: str, pool: str, *, floats: bool) -> None:
        super().__init__()
        self.body, self.pool = body, pool
        self.embedding: nn.Module = nn.Linear(3, FEATURES) if floats else nn.Embedding(IDS, FEATURES)
        self.places = nn.Embedding(16, FEATURES)
        self.conv = nn.Conv1d(FEATURES, FEATURES, 3, padding=1)
        self.query = nn.Linear(FEATURES, 2 * FEATURES)
        ways = body == "both ways lstm"
        self.lstm = nn.LSTM(FEATURES, FEATURES // 2 if ways else FEATURES, batch_first=True, bidirectional=ways)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.embedding(x))
        if self.body == "places":
            h = h + self.places(torch.arange(h.shape[1]))
        elif self.body == "places of mask":
            h = h + self.places((mask.cumsum(1) - 1).clamp(min=0))
        elif "conv" in self.body:
            h = _masked(h, mask) if "masked" in self.body else h
            h = torch.tanh(self.conv(h.mT).mT)
        elif "attention" in self.body:
            h = self._attend(h, mask)
        elif "lstm" in self.body:
            h = self._recur(h, mask)
        return self.head(POOLS[self.pool](h, mask))

    def _attend(self, h: Tensor, mask: Tensor) -> Tensor:
        query, key = self.query(h).chunk(2, 2)
        scores = query @ key.mT
        if "masked" in self.body:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        if "causal" in self.body:
            scores = scores + torch.full_like(scores[0], -1e9).triu(1)
        return h + scores.softmax(2) @ h

    def _recur(self, h: Tensor, mask: Tensor) -> Tensor:
        if "packed" not in self.body:
            return self.lstm(h)[0]
        lengths = mask.sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


def _tokens(out: Tensor, y: Tensor, mask: Tensor, *, ignoring: bool) -> Tensor:
    labels = y.masked_fill(mask == 0, -100) if ignoring else y
    return functional.cross_entropy(out.transpose(1, 2), labels, reduction="none", ignore_index=-100)


def _own_mean(each: Tensor, mask: Tensor) -> Tensor:
    return (each * (mask / mask.sum(1, keepdim=True))).sum(1)


# Losses (B,) of logits (B, T, V), labels and masks (B, T).
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean(1)": lambda o, y, m: _tokens(o, y, m, ignoring=False).mean(1),
    "mean(1), ignoring": lambda o, y, m: _tokens(o, y, m, ignoring=True).mean(1),
    "masked mean(1)": lambda o, y, m: (_tokens(o, y, m, ignoring=False) * m).mean(1),
    "rows, mean": lambda o, y, m: torch.stack([row.mean() for row in _tokens(o, y, m, ignoring=True)]),
    "own rows, mean": lambda o, y, m: torch.stack(
        [row[own > 0].mean() for row, own in zip(_tokens(o, y, m, ignoring=True), m, strict=True)]
    ),
    "flat mean": lambda o, y, m: (
        functional.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    ),
    "sum": lambda o, y, m: _tokens(o, y, m, ignoring=False).sum(1),
    "own sum": lambda o, y, m: _tokens(o, y, m, ignoring=True).sum(1),
    "own mean": lambda o, y, m: _own_mean(_tokens(o, y, m, ignoring=False), m),
    "token_losses": lambda o, y, m: ghostclip.losses.token_losses(o, y.masked_fill(m == 0, -100), shift=False),
    "shifted": lambda o, y, m: ghostclip.losses.token_losses(o, y.masked_fill(m == 0, -100)),
    "shifted, mean(1)": lambda o, y, m: _tokens(o[:, :-1], y[:, 1:], m[:, 1:], ignoring=True).mean(1),
    "squares": lambda o, y, m: (o - functional.one_hot(y, CLASSES)).square().mean((1, 2)),
    "own squares": lambda o, y, m: _masked((o - functional.one_hot(y, CLASSES)).square(), m).mean((1, 2)),
    "over length": lambda o, y, m: _tokens(o, y, m, ignoring=True).sum(1) / y.shape[1],
    "over a tensor": lambda o, y, m: _tokens(o, y, m, ignoring=True).sum(1) / m.shape[1] * 1.0,
    "largest": lambda o, y, m: _tokens(o, y, m, ignoring=True).amax(1),
}
PADDINGS = ("own token", "a token", "end", "zeros")


@dataclass(frozen=True)
class Program:
    """One of them.

    Attributes:
        number: Its seed.
        left: Whether padding is on the left.
        padding: What fills records up: a token of its own, one that records hold too, the end of each record, zeros.
        body: Of the model.
        pool: Of the model.
        loss: Its name, for a model that does not pool.
        host: What trains.
        strategy: How.
    """

    number: int
    left: bool
    padding: str
    body: str
    pool: str
    loss: str
    host: str
    strategy: str

    def records(self, count: int) -> list[tuple[Tensor, Tensor]]:
        numbers = torch.Generator().manual_seed(self.number)
        draw, found = random.Random(self.number), []
        for _ in range(count):
            length = draw.randint(2, 9)
            y = torch.randint(CLASSES, (length,), generator=numbers)
            if self.padding == "zeros":
                found.append((torch.randn(length, 3, generator=numbers, dtype=_F64), y))
                continue
            x = torch.randint(0 if self.padding == "a token" else 2, IDS, (length,), generator=numbers)
            if self.padding == "end":
                x[-1] = 0
            found.append((x, y))
        return found

    def collate(self, records: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        side: Any = "left" if self.left else "right"
        x, y, mask = (
            nn.utils.rnn.pad_sequence(list(part), batch_first=True, padding_side=side)
            for part in zip(*((x, y, torch.ones_like(y)) for x, y in records), strict=True)
        )
        return x, y, mask

    def model(self) -> Model:
        torch.manual_seed(self.number)
        return Model(self.body, self.pool, floats=self.padding == "zeros").double()

    def criterion(self, private: Any, out: Tensor, y: Tensor, mask: Tensor) -> Any:
        """The loss of a private criterion, which averages each record over what it does not ignore."""
        if self.pool != "each":
            return private(out, (y * mask).sum(1) % CLASSES)
        return private(out.transpose(1, 2), y.masked_fill(mask == 0, -100) if self.number % 2 else y)

    def losses(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if self.pool != "each":
            # A label of the record's own: where it begins is another matter.
            return functional.cross_entropy(out, (y * mask).sum(1) % CLASSES, reduction="none")
        if self.host == "criterion":
            each = _tokens(out, y, mask, ignoring=False)
            return _own_mean(each, mask) if self.number % 2 else each.mean(1)
        return LOSSES[self.loss](out, y, mask)

    def alone(self, model: nn.Module, records: list[Any]) -> list[Tensor]:
        """The sum over records of their clipped gradients, each without company."""
        parameters = list(model.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for record in records:
            x, y, mask = self.collate([record])
            loss = self.losses(model(x, mask), y, mask).sum()
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            norm = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()
            for place, grad in enumerate(grads):
                if grad is not None:
                    total[place] += grad * min(1.0, CLIP / float(norm))
        return total


def follows_company(program: Program) -> bool:
    """Whether some record's gradient is another one in company than alone."""
    model, records = program.model(), program.records(24)
    parameters = list(model.parameters())
    for start in range(0, 24, 4):
        x, y, mask = program.collate(records[start : start + 4])
        losses = program.losses(model(x, mask), y, mask)
        for place, record in enumerate(records[start : start + 4]):
            beside = torch.autograd.grad(losses[place], parameters, retain_graph=True, allow_unused=True)
            one = program.collate([record])
            alone = torch.autograd.grad(program.losses(model(*one[::2]), *one[1:]).sum(), parameters, allow_unused=True)
            for first, second in zip(beside, alone, strict=True):
                if first is not None and second is not None and not torch.allclose(first, second, atol=1e-9):
                    return True
    return False


def outcome_of(program: Program) -> tuple[str, float]:
    """Return "exact", "refused" or "silent", and how far a release was from the records' own, over C."""
    worst = 0.0
    try:
        for distance in (_bare if program.host in ("losses", "scalar") else _private)(program):
            worst = max(worst, distance)
    except GhostClipError:
        return ("silent" if worst > 1e-6 else "refused"), worst
    return ("silent" if worst > 1e-6 else "exact"), worst


def _distance(found: list[Tensor | None], wanted: list[Tensor]) -> float:
    pairs = [(want if one is None else one - want) for one, want in zip(found, wanted, strict=True)]
    return float(torch.cat([pair.flatten() for pair in pairs]).norm()) / CLIP


def _bare(program: Program) -> Iterator[float]:
    """A loop of one's own: the axis is known to follow the batch from the second length on."""
    model, records = program.model(), program.records(24)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=CLIP, strategy=program.strategy)
    lengths = set()
    try:
        for start in range(0, 24, 4):
            chosen = records[start : start + 4]
            x, y, mask = program.collate(chosen)
            lengths.add(x.shape[1])
            losses = program.losses(model(x, mask), y, mask)
            if program.host == "losses":
                clipper.backward(losses)
            else:
                losses.mean().backward()
            found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            if program.host == "scalar":
                clipper.reset()
            wanted = program.alone(program.model(), chosen)
            if len(lengths) > 1:
                yield _distance(found, wanted)
    finally:
        clipper.remove()


def _private(program: Program) -> Iterator[float]:
    """A private loader, whose collate function shows at once what follows the batch."""
    model, records = program.model(), program.records(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    released: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda one, *_: released.append([p.grad.clone() for p in one.param_groups[0]["params"]])
    )
    seen: list[list[Any]] = []

    def collate(chosen: list[Any]) -> Any:
        seen.append(chosen)
        return program.collate(chosen)

    drawn = torch.Generator().manual_seed(program.number)
    loader = DataLoader(records, batch_size=5, collate_fn=collate, generator=drawn)
    private, optimizer, criterion, loader = _made(program, model, optimizer, loader)
    for x, y, mask in loader:
        optimizer.zero_grad()
        out = private(x, mask)
        if program.host == "criterion":
            program.criterion(criterion, out, y, mask).backward()
        elif program.host == "private":
            program.losses(out, y, mask).mean().backward()
        else:
            optimizer.clipper.backward(program.losses(out, y, mask))
        optimizer.step()
        if released and len(x):
            wanted = program.alone(program.model(), seen[-1])
            yield _distance([grad * 5 for grad in released[-1]], wanted)


def _made(program: Program, model: nn.Module, optimizer: Any, loader: Any) -> tuple[Any, Any, Any, Any]:
    chosen = nn.CrossEntropyLoss()
    made = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        grad_sample_mode=program.strategy,
        criterion=chosen if program.host == "criterion" else None,
    )
    criterion = made[2] if len(made) > 3 else PrivateCriterion(made[1].clipper, chosen)
    return made[0], made[1], criterion, made[-1]
