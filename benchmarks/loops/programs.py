"""Random programs that stand between a loader and `backward()`: inputs, targets and losses out of torch's operations.

Whether a program keeps records apart is known from autograd alone: how much a record adds to the gradient must not
depend on which other records there are. What the library makes of it is measured as for any other loop.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import short_line, write
from benchmarks.loops.report import first_sentence
from tests.loops.loop import Loop
from tests.loops.models import functional, mlp
from tests.loops.oracle import measure
from tests.loops.world import World

# Inputs x (B, 4), targets y (B,) of three classes. What is on the left keeps records apart.
_INPUTS = (
    (
        "x * 2", "x / x.norm(dim=1, keepdim=True)", "x.clamp(-1, 1)", "x[:, [1, 0, 3, 2]]", "x.flip(1)",
        "F.layer_norm(x, (4,))", "x.where(y[:, None] > 0, -x)", "x + x.detach().sign()", "torch.cat([x[:2], x[2:]])",
        "x.clone().mul_(0.5)", "x.T.contiguous().T", "x - torch.tensor([0.1, 0.2, 0.3, 0.4])", "x.sort(1).values",
        "x.index_select(0, torch.arange(len(x)))", "torch.stack(list(x))",
    ),
    (
        "x - x.mean(0)", "x / (x.std(0, unbiased=False) + 0.1)", "x - x[:1]", "x - x[-1:]", "x * x[0, 0]",
        "torch.lerp(x, x.flip(0), 0.3)", "x[torch.randperm(len(x))] * 0.5 + x", "x / x.abs().max()",
        "x - x.median(0).values", "torch.where(x > x.mean(), x, 0.5 * x)", "x + 0.1 * x[y.argmax()]", "x.cumsum(0)",
        "x @ (x.T @ x) / len(x)", "F.normalize(x, dim=0)", "(x - x.min()) / (x.max() - x.min() + 0.1)",
        "x * y.double().mean()", "torch.where((y == y[0])[:, None], x, -x)", "x.roll(1, 0)",
        "x * torch.quantile(x, 0.9)", "F.batch_norm(x, None, None, training=True)",
        "x.index_copy(0, torch.tensor([0]), x[-1:])", "torch.cat([x[1:], x[:1]])",
        "x * (1.0 + y.bincount(minlength=3).max())", "x - x.split(2)[0].mean(0)",
        "x + x.unbind(0)[0]", "x.masked_fill(x > x.mean(), 0.0)", "x * torch.einsum('bi,bi->', x, x)",
        "x + torch.cdist(x, x).argmin(1, keepdim=True)", "x * (x[:, :1] > x[:, 0].mean())",
        "x * (x[:, :1] > 0.5 * x[:, 0].max())",
    ),
)  # fmt: skip
_TARGETS = (
    ("(y + 1) % 3", "torch.where(x[:, 0] > 1, y, 0 * y)", "y.clamp(max=1)", "model(x).detach().argmax(1)"),
    (
        "y.flip(0)", "y.mode().values.expand(len(y))", "torch.where(x[:, 0] > x[:, 0].mean(), y, 0 * y)",
        "x[:, 0].argsort() % 3", "torch.where(y == y[:1], y, 0 * y)", "model(x).detach().softmax(0).argmax(1)",
        "torch.where((p := model(x).detach().max(1).values) > p.median(), y, 0 * y)",
    ),
)  # fmt: skip
_OUTPUTS = ("model(x)", "model(x)", "model(x * 1.1)", "model(x.flip(1))", "model(x + 0.1)")
_ROWS = (
    "{a}.tanh()", "{a}.softmax(1)", "{a}.log_softmax(-1)", "F.normalize({a}, dim=1)", "{a} - {a}.mean(1, keepdim=True)",
    "{a} * x[:, :1]", "{a}.sort(dim=1).values", "{a}.cumsum(1)", "torch.cat([{a}, x], 1)[:, :3]", "{a}.clamp(min=-1)",
)  # fmt: skip
_NUMBERS = (
    "x[:, 0]", "x[:, 1].abs()", "y.double()", "(y == 0).double()", "(x[:, 1] > 0.7).double()", "x.norm(dim=1)",
)  # fmt: skip
_LOSSES = (
    "F.cross_entropy({a}, y, reduction='none')", "F.cross_entropy({a}, y, reduction='none')", "{a}[:, 0]",
    "{a}.gather(1, y[:, None]).squeeze(1)", "{a}.logsumexp(1)", "{a}.square().sum(1)", "{a}.max(1).values",
    "F.mse_loss({a}, x[:, :3], reduction='none').mean(1)", "torch.einsum('bi,bi->b', {a}, x[:, :3])",
    "F.binary_cross_entropy_with_logits({a}[:, 0], (y > 0).double(), reduction='none')",
    "F.cosine_similarity({a}, x[:, :3], dim=1)", "F.multi_margin_loss({a}, y, reduction='none')",
    "F.gaussian_nll_loss({a}[:, 0], x[:, 0], F.softplus({a}[:, 1]) + 0.1, reduction='none')",
)  # fmt: skip
_EACH = (
    (
        "{a}.tanh()", "{a} * 0.7", "F.softplus({a})", "{a}.square()", "{a}.clamp(max=1.5)", "{a} + {b}", "{a} * {b}",
        "(1 - (-{a}).exp()) ** 2 * {a}", "torch.stack([{a}, {a} * 2], 1).sum(1)", "{a} * {a}.detach()", "{a} + {c}",
        "{a} * {c}", "torch.where({c} > 0.5, {a}, 0.5 * {a})", "F.huber_loss({a}, x[:, 0], reduction='none')",
    ),
    (
        "{a} - {b}.detach().mean()", "{a} * {b}.mean()", "{a} * {b}.detach().softmax(0)", "{a}.cumsum(0)",
        "{a} / (1 + {b}.detach().abs().sum())", "{a} * ({b}.detach() > {b}.detach().mean())", "{a} - {a}.flip(0)",
        "{a} * ({c} >= {c}.max())", "{a} * {b}.argsort()", "{a} * {a}.detach().roll(1)", "{a} * len({a})",
        "{a}.topk(len({a}) // 2).values", "{a}[{b}.detach() > {b}.detach().median()]", "{a} * (len({a}) % 2 + 1)",
        "({a}[:, None] - {a}[None, :]).abs().mean(1)", "{a} * float({b}.detach().sum())", "{a} * {b}.sum().item()",
        "{a} * torch.bincount(y, minlength=3)[y]", "{a} * (y == y[0])", "{a} * (1.0 + torch.isin(y, y[:1]))",
        "{a} / torch.bincount(y, minlength=3)[y]", "{a} * {c}.std(unbiased=False)", "{a} * x.abs().max(0).values[0]",
        "{a}.clamp(max={b}.detach().max() * 0.8)", "{a} * torch.cdist(x, x).mean(1)", "{a} - {a}.detach().logsumexp(0)",
        "{a} * ({b}.detach()[:, None] >= {b}.detach()).double().mean(1)", "torch.cat([{a}, {a}.sum().reshape(1)])",
    ),
)  # fmt: skip
_ALL = (
    (
        "{a}.mean()", "{a}.mean()", "{a}.sum() / len(x)", "({a} / len(x)).sum()", "{a}.mean() * 0.5",
        "({a} * {c}).mean()", "{a}.mean() + 0.3 * {b}.mean()", "F.cross_entropy({m}, y, label_smoothing=0.1)",
        "F.mse_loss({m}, x[:, :3])", "F.kl_div({m}.log_softmax(1), x[:, :3].softmax(1), reduction='batchmean')",
        "F.smooth_l1_loss({m}[:, 0], x[:, 0])", "F.nll_loss({m}.log_softmax(1), y)", "F.multi_margin_loss({m}, y)",
        "F.cosine_embedding_loss({m}, x[:, :3], 2.0 * (y > 0) - 1)", "F.poisson_nll_loss({m}[:, 0], y.double())",
    ),
    (
        "({a} * {c}).sum() / ({c}.sum().abs() + 1e-3)", "{a}.logsumexp(0)", "{a}.mean().square()", "{a}.max()",
        "({a}.square().mean() + 1e-9).sqrt()", "({a} @ {a}) / len(x)", "{a}.mean().clamp(max=0.9)", "{a}.prod()",
        "{a}.mean() * {a}.detach().mean()", "{a}.mean() if {a}.mean() < 0.9 else 2 * {a}.mean()", "{a}.norm()",
        "{a}.var(unbiased=False) + {b}.mean()", "{a}.median()", "{a}.mean() * {c}.sum()", "({a}.mean() - 0.8).abs()",
        "{a}[{a}.detach() > {a}.detach().mean()].sum() / len(x)", "{a}.mean() + F.mse_loss({b}.mean(), {c}.mean())",
    ),
)  # fmt: skip
# What no engine sees in a step: factors that follow the batch's size or a number that was read, where no other batch
# was met yet or a function that is not linear follows; inputs that stand beside other records' labels.
_UNSEEN = ("* len(", "% 2 + 1", ".item()", "x.roll(1, 0)", "x = torch.cat([x[1:], x[:1]])")
_LEFT_OUT = 4
_DIGITS = 1e-7
_BATCHES = ([0, 1, 2, 3, 4], [4, 9, 5, 6, 7, 8], [10, 14, 11, 12, 13], [19, 1, 2, 23, 20, 16, 3])


@dataclass(frozen=True)
class Program:
    """Statements that compute a loss of a model, inputs and targets."""

    statements: tuple[str, ...]

    def compiled(self) -> Callable[[Any, Tensor, Tensor], Tensor]:
        """The function of (model, x, y) that returns the loss."""
        source = "\n    ".join(["def loss(model, x, y):", "if not len(x): return model(x).sum()", *self.statements])
        names: dict[str, Any] = {"torch": torch, "F": functional}
        exec(source, names)
        loss: Callable[[Any, Tensor, Tensor], Tensor] = names["loss"]
        return loss

    def __call__(self, world: World) -> None:
        """Train for an epoch."""
        loss, bare = self.compiled(), world.watch(mlp)
        model, optimizer, loader = world.private(bare, torch.optim.SGD(bare.parameters(), lr=0.1), world.loader())
        for x, y in loader:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()

    def keeps_apart(self) -> str:
        """Whether each record adds its own part, whatever others there are, to a "mean" or a "sum"; else ""."""
        world, model, loss = World(), mlp(), self.compiled()
        parts = {kind: _adds_up(model, loss, world, mean=kind == "mean") for kind in ("mean", "sum")}
        return next((kind for kind, adds_up in parts.items() if adds_up), "")


def _adds_up(model: nn.Module, loss: Callable[..., Tensor], world: World, *, mean: bool) -> bool:
    """Whether what a record adds to the gradient is the same with and without another one."""
    parameters = list(model.parameters())

    def gradient(records: list[int]) -> Tensor:
        torch.manual_seed(0)
        value = loss(model, world.features[records], world.labels[records])
        grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([grad.reshape(-1) for grad in grads]) * (len(records) if mean else 1)

    for batch in _BATCHES:
        whole = gradient(batch)
        for one, two in ((batch[0], batch[1]), (batch[2], batch[4]), (batch[1], batch[3])):
            without = [record for record in batch if record != one]
            rest = [record for record in batch if record != two]
            with_it, alone = whole - gradient(without), gradient(rest) - gradient([r for r in rest if r != one])
            if float((with_it - alone).norm()) > _DIGITS * float(with_it.norm() + whole.norm() + 1e-3):
                return False
    return True


class _Author:
    """Writes a program, at most one statement of which mixes records."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._statements: list[str] = []
        self._mixes = self._chance.choice(["nothing", "nothing", "inputs", "targets", "each", "each", "all"])

    def program(self) -> Program:
        """Write it."""
        for name, table, what in (("x", _INPUTS, "inputs"), ("y", _TARGETS, "targets")):
            if self._mixes == what or self._chance.random() < 0.3:
                self._statements.append(f"{name} = {self._pick(table, what)}")
        last = self._pick(_ALL, "all").format(a=self._each(), b=self._each(), c=self._number(), m=self._matrix())
        return Program((*self._statements, f"return {last}"))

    def _pick(self, table: tuple[Sequence[str], Sequence[str]], what: str) -> str:
        mixes, self._mixes = self._mixes == what, "nothing" if self._mixes == what else self._mixes
        return self._chance.choice(table[mixes])

    def _name(self, expression: str) -> str:
        self._statements.append(f"v{len(self._statements)} = {expression}")
        return self._statements[-1].partition(" ")[0]

    def _number(self) -> str:
        return self._name(self._chance.choice(_NUMBERS))

    def _matrix(self) -> str:
        name = self._name(self._chance.choice(_OUTPUTS))
        return self._name(self._chance.choice(_ROWS).format(a=name)) if self._chance.random() < 0.4 else name

    def _each(self) -> str:
        name = self._name(self._chance.choice(_LOSSES).format(a=self._matrix()))
        for _ in range(self._chance.randrange(3) + (self._mixes == "each")):
            other = self._name(self._chance.choice(_LOSSES).format(a=self._matrix()))
            name = self._name(self._pick(_EACH, "each").format(a=name, b=other, c=self._number()))
        return name


def programs(count: int, *, seed: int) -> Iterator[Program]:
    """Write programs."""
    return (_Author(f"{seed} {number}").program() for number in range(count))


def try_programs(
    report: dict[str, Any], count: int, *, seed: int, out: Path, say: Callable[[str], None] = print
) -> int:
    """Try random programs, and write what became of them."""
    begun, rows = time.monotonic(), []
    for number, program in enumerate(programs(count, seed=seed)):
        try:
            apart = program.keeps_apart()
        except Exception:  # noqa: BLE001 - shapes that do not fit: a program that nobody could run
            continue
        outcome = measure(Loop(str(number), "", program, clips=(1.0,)), left_out=_LEFT_OUT)
        # A program whose records meet in few batches is refused in some of the runs.
        harmless = ("never trained", "without record")
        problems = [problem for problem in outcome.problems if not problem.startswith(harmless)]
        kind, text = outcome.outcome, "; ".join(program.statements)
        if kind == "wrong":
            kind = "exact in part" if not problems else "out of sight" if any(s in text for s in _UNSEEN) else "wrong"
        rows.append({"number": number, "apart": apart, "outcome": kind, "problems": problems})
        rows[-1] |= {"message": outcome.message, "program": text}
        say(f"{number}: {'apart' if apart else 'mixed'}, {kind}")
    report |= {"seed": seed, "count": count, "seconds": time.monotonic() - begun, "programs": rows}
    say(f"written: {write(out, 'loops-programs', report, markdown(report))}.json, .md")
    return int(any(row["outcome"] == "wrong" for row in rows))


def markdown(report: dict[str, Any]) -> str:
    """Return the report."""
    rows = report["programs"]
    counts = Counter(("apart" if row["apart"] else "mixed", row["outcome"]) for row in rows)

    def listed(holds: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [
            f"- {row['outcome']}: `{row['program']}` {'; '.join(row['problems'])} {first_sentence(row['message'])}"
            for row in rows
            if holds(row)
        ]

    parts = [
        "# Random programs between loader and backward\n",
        f"{short_line(report, 'torch ' + report['hosts']['torch'])} Seed {report['seed']}.\n",
        f"{__doc__.partition(chr(10))[2].strip()}\n" if __doc__ else "",
        "| records by autograd | outcome | programs |\n|---|---|---:|",
        *[f"| {apart} | {outcome} | {number} |" for (apart, outcome), number in sorted(counts.items())],
        "\n## Wrong\n",
        *listed(lambda row: row["outcome"] == "wrong"),
        "\n## Out of sight: by the batch's size, by a number that was read, or beside other records' labels\n",
        *listed(lambda row: row["outcome"] == "out of sight"),
        "\n## Mixed by autograd, and exact in these batches\n",
        *listed(lambda row: not row["apart"] and row["outcome"] == "exact"),
        "\n## Apart by autograd, and refused\n",
        *listed(lambda row: row["apart"] == "mean" and row["outcome"].startswith("refused")),
    ]
    return "\n".join(parts) + "\n"
