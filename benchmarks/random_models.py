"""Random small models against one-sample autograd: `python -m benchmarks.random_models [--count N] [--write]`.

A model is a chain of blocks drawn from a seed, each of which puts rows of samples somewhere else: folded, transposed,
routed to experts, gathered, beside constants of as many entries as there are samples. Every third one has a block that
lets samples depend on each other, and must be refused.

Shape letters: B samples, T positions, D features, N = B*T.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from benchmarks.harness import CPU, describe, parser, table, write
from ghostclip.errors import GhostClipError

BOUND = 0.5
# Relative error of a clipped sum that counts as exact, in float64.
EXACT = 1e-8
_REFUSALS_SHOWN = 40


@dataclass(frozen=True)
class Sizes:
    """The sizes of one model and its batch."""

    B: int
    T: int
    D: int
    heads: int


class Block(nn.Module):
    """A block whose forward is a function of (itself, ``x_BTD``)."""

    def __init__(self, name: str, run: Callable[[Block, Tensor], Tensor], sizes: Sizes, **parts: nn.Module) -> None:
        super().__init__()
        self.name, self.run, self.sizes = name, run, sizes
        for key, part in parts.items():
            self.add_module(key, part)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.run(self, x)


class Parameter(nn.Module):
    """One raw parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(*shape))


def _mlp(d: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d))


def _linear(s: Sizes, rng: random.Random) -> Block:
    return Block("linear", lambda b, x: x + b.f(x), s, f=_mlp(s.D, rng.choice([s.B, s.T, 7])))


def _folded(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.f(x.reshape(-1, x.shape[-1])).view(x.shape)

    return Block("rows B*T", run, s, f=_mlp(s.D, rng.choice([s.B, 6])), norm=nn.Identity())


def _folded_time_first(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        flat = x.transpose(0, 1).reshape(-1, x.shape[-1])
        return x + b.f(flat).view(x.shape[1], x.shape[0], -1).transpose(0, 1)

    return Block("rows T*B", run, s, f=_mlp(s.D, 5))


def _time_first(s: Sizes, rng: random.Random) -> Block:
    return Block("(T, B, D)", lambda b, x: x + b.f(x.transpose(0, 1)).transpose(0, 1), s, f=_mlp(s.D, s.B))


def _conv(s: Sizes, rng: random.Random) -> Block:
    conv = nn.Conv1d(s.D, s.D, 3, padding=1, groups=rng.choice([1, s.D]))
    return Block("conv", lambda b, x: x + b.f(x.transpose(1, 2)).transpose(1, 2).tanh(), s, f=conv)


def _over_time(s: Sizes, rng: random.Random) -> Block:
    return Block("linear over T", lambda b, x: x + b.f(x.transpose(1, 2)).transpose(1, 2), s, f=nn.Linear(s.T, s.T))


def _norm(s: Sizes, rng: random.Random) -> Block:
    return Block("layer norm", lambda b, x: b.f(x), s, f=nn.LayerNorm(s.D))


def _heads(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        parts = b.qkv(x).view(*x.shape[:2], 3, s.heads, -1).permute(2, 0, 3, 1, 4)
        if s.T % 2:
            parts = parts.reshape(3, -1, *parts.shape[3:])
            q, k, v = parts
            h = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(x.shape[0], s.heads, s.T, -1)
        else:
            h = functional.scaled_dot_product_attention(*parts)
        h = h + b.table.p.view(s.heads, 1, 1) * h.tanh()
        return x + b.out(h.transpose(1, 2).flatten(2))

    width = 2 * s.heads
    parts = {"qkv": nn.Linear(s.D, 3 * width), "out": nn.Linear(width, s.D), "table": Parameter(s.heads)}
    return Block("attention", run, s, **parts)


def _torch_attention(s: Sizes, rng: random.Random) -> Block:
    first = rng.random() < 0.5

    def run(b: Block, x: Tensor) -> Tensor:
        y = x if first else x.transpose(0, 1)
        h = b.f(y, y, y, need_weights=rng_weights)[0]
        return x + (h if first else h.transpose(0, 1))

    rng_weights = rng.random() < 0.5
    return Block("nn.MultiheadAttention", run, s, f=nn.MultiheadAttention(s.D, 1, batch_first=first))


def _recurrent(s: Sizes, rng: random.Random) -> Block:
    first = rng.random() < 0.5
    kind = rng.choice([nn.GRU, nn.LSTM, nn.RNN])

    def run(b: Block, x: Tensor) -> Tensor:
        h = b.f(x if first else x.transpose(0, 1))[0]
        return x + (h if first else h.transpose(0, 1))

    return Block(kind.__name__, run, s, f=kind(s.D, s.D, batch_first=first))


def _cell(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[0], s.D), []
        for step in x.unbind(1):
            h = b.f(step, h)
            states.append(h)
        return x + torch.stack(states, 1)

    return Block("GRUCell", run, s, f=nn.GRUCell(s.D, s.D))


def _router(s: Sizes, rng: random.Random) -> Block:
    way, count = rng.choice(["mask", "index_add", "in place", "behind an axis", "top 2"]), rng.choice([2, 3, 4])
    turned = rng.random() < 0.3

    def run(b: Block, x: Tensor) -> Tensor:
        y = x.transpose(0, 1) if turned else x
        flat = y.reshape(-1, s.D)
        share = b.gate(flat).softmax(-1)
        best = share.topk(2 if way == "top 2" else 1).indices
        out = torch.zeros_like(flat)
        for number, expert in enumerate(b.experts):
            out = _expert(way, flat, out, (best == number).any(1), expert, share[:, number : number + 1])
        out = out.view(y.shape)
        return x + (out.transpose(0, 1) if turned else out)

    experts = nn.ModuleList([_mlp(s.D, 3) for _ in range(count)])
    return Block(f"router, {way}{', T*B' if turned else ''}", run, s, gate=nn.Linear(s.D, count), experts=experts)


def _expert(way: str, flat: Tensor, out: Tensor, hit: Tensor, expert: nn.Module, share: Tensor) -> Tensor:
    if way == "mask":
        return out.index_put((hit,), expert(flat[hit]) * share[hit])
    if way == "in place":
        out[hit] = expert(flat[hit]) * share[hit]
        return out
    number = hit.nonzero().squeeze(-1)
    if way == "behind an axis":
        return out.index_add(0, number, expert(flat[None, number].reshape(-1, flat.shape[-1])) * share[number])
    return out.index_add(0, number, expert(flat.index_select(0, number)) * share[number])


def _routed_samples(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        hit = b.gate(x.mean(1)).squeeze(-1) > 0
        out = torch.zeros_like(x)
        for number, expert in enumerate(b.experts):
            where = (hit == bool(number)).nonzero().squeeze(-1)
            out = out.index_put((where,), expert(x[where]))
        return x + out

    experts = nn.ModuleList([_mlp(s.D, 3) for _ in range(2)])
    return Block("router of samples", run, s, gate=nn.Linear(s.D, 1), experts=experts)


def _positions(s: Sizes, rng: random.Random) -> Block:
    name = rng.choice(["added", "looked up", "concatenated"])

    def run(b: Block, x: Tensor) -> Tensor:
        if name == "added":
            return x + b.table.p
        if name == "looked up":
            return x + functional.embedding(torch.arange(x.shape[1]), b.table.p)
        return torch.cat([b.table.p[None, :1].expand(x.shape[0], -1, -1), x], 1)[:, : x.shape[1]]

    return Block(f"positions, {name}", run, s, table=Parameter(s.T, s.D))


def _constant(s: Sizes, rng: random.Random) -> Block:
    """A constant with as many entries as there are samples, or positions, meets a parameter."""
    name = rng.choice(["times", "product", "of heads", "filled", "ramp"])
    size = rng.choice([s.B, s.T])

    def run(b: Block, x: Tensor) -> Tensor:
        c = torch.linspace(0.5, 1.5, size, dtype=x.dtype)
        if name == "times":
            return x * (b.w.p * c[:, None]).mean(0)
        if name == "product":
            return x + c @ b.w.p
        if name == "of heads":
            return x + (c[:, None] * b.w.p).sum(0).tanh()
        if name == "filled":
            w = x.new_zeros(size, s.D)
            w[:1] = b.w.p[:1] * 2
            return x * (1 + w.sum(0))
        return x + torch.linspace(0, 1, s.T, dtype=x.dtype)[:, None] * b.w.p[:1]

    return Block(f"constant, {name}", run, s, w=Parameter(size, s.D))


def _copies(s: Sizes, rng: random.Random) -> Block:
    """Copies of a parameter, one for each sample or of another number."""
    name = rng.choice(["expanded", "stack", "repeated", "token"])

    def run(b: Block, x: Tensor) -> Tensor:
        if name == "expanded":
            return x + b.w.p[0].expand(x.shape[0], x.shape[1], -1)
        if name == "stack":
            return x + torch.bmm(x, b.w.p.expand(x.shape[0], -1, -1))
        if name == "repeated":
            return x * b.w.p[:1].repeat(x.shape[0], 1)[:, None]
        return x + torch.matmul(x.mean(1, keepdim=True), b.w.p).expand(-1, x.shape[1], -1)

    return Block(f"copies, {name}", run, s, w=Parameter(s.D, s.D))


def _shared(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        once = b.f(x).tanh()
        return x + b.f(once.transpose(0, 1)).transpose(0, 1) + b.f(once.reshape(-1, s.D)).view(x.shape)

    return Block("shared layer", run, s, f=nn.Linear(s.D, s.D))


def _gathered(s: Sizes, rng: random.Random) -> Block:
    name = rng.choice(["sorted", "flipped", "gather", "scatter", "slice", "one position"])

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        if name == "sorted":
            order = y.sum(-1).argsort(1)
            return x + torch.take_along_dim(y, order[..., None], 1).cumsum(1)
        if name == "flipped":
            return x + b.f(y.flip(1)).flip(1)
        if name == "gather":
            return x + y.gather(1, y.sum(-1, keepdim=True).argsort(1).expand_as(y))
        if name == "scatter":
            return x + torch.zeros_like(y).scatter_add(1, y.sum(-1, keepdim=True).argsort(1).expand_as(y), y.tanh())
        if name == "slice":
            return torch.cat([x[:, :1], x[:, 1:] + b.f(x[:, :-1])], 1)
        return x + b.f(x[:, -1]).unsqueeze(1)

    return Block(f"gathered, {name}", run, s, f=nn.Linear(s.D, s.D))


def _undone(s: Sizes, rng: random.Random) -> Block:
    """The batch is put into another order for one layer, and back."""

    def run(b: Block, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        back = order.argsort()
        return x + b.f(x[order])[back]

    return Block("reordered and undone", run, s, f=_mlp(s.D, 4))


def _parts(s: Sizes, rng: random.Random) -> Block:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + torch.cat([b.f(part) for part in x.chunk(2, 0)])

    return Block("chunks of the batch", run, s, f=_mlp(s.D, 4))


BLOCKS = (
    _linear, _folded, _folded_time_first, _time_first, _conv, _over_time, _norm, _heads, _torch_attention, _recurrent,
    _cell, _router, _router, _router, _routed_samples, _positions, _constant, _copies, _shared, _gathered, _undone,
    _parts,
)  # fmt: skip

MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch mean": lambda y: y - y.mean(0, keepdim=True),
    "batch norm": lambda y: (y - y.mean((0, 1))) / (y.var((0, 1)) + 1e-3).sqrt(),
    "sorted across the batch": lambda y: y.sort(0).values,
    "rolled": lambda y: y.roll(1, 0),
    "flipped": lambda y: y.flip(0),
    "softmax over the batch": lambda y: y.softmax(0) * y,
    "attention over the batch": lambda y: torch.matmul(
        torch.matmul(y.transpose(0, 1), y.permute(1, 2, 0)).softmax(-1), y.transpose(0, 1)
    ).transpose(0, 1),
    "sum over all rows": lambda y: y.reshape(-1, y.shape[-1]).cumsum(0).view(y.shape),
    "largest of the batch": lambda y: y / y.detach().abs().amax(),
    "divided by the number": lambda y: y / y.shape[0],
    "neighbour": lambda y: torch.cat([y[1:], y[:1]]) + y,
    "reordered by what is in it": lambda y: y[y.sum((1, 2)).argsort()],
    "one sample for all": lambda y: y + y[:1],
}


def _mixer(s: Sizes, rng: random.Random) -> Block:
    name = rng.choice(sorted(MIXERS))
    return Block(f"MIXES: {name}", lambda b, x: b.g(MIXERS[name](b.f(x)) + x), s, f=nn.Linear(s.D, s.D), g=_mlp(s.D, 4))


class Model(nn.Module):
    """A chain of blocks between an input layer and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        B = rng.choice([1, 2, 2, 3, 3, 4, 4, 5])
        T = B if B > 1 and rng.random() < 0.4 else rng.choice([2, 3, 4, 6, 2 * B])
        self.sizes = s = Sizes(B, T, rng.choice([3, 4, 5, 6, B + 1, 2 * B]), rng.choice([1, 2, B]))
        self.mixes = B > 1 and seed % 3 == 0
        self.takes = rng.choice(["ids", "values", "values at once"])
        blocks = [rng.choice(BLOCKS)(s, rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        if self.mixes:
            blocks.insert(rng.randrange(len(blocks) + 1), _mixer(s, rng))
        first = {"ids": nn.Embedding(11, s.D), "values": nn.Linear(s.D, s.D), "values at once": nn.Identity()}
        self.first, self.blocks = first[self.takes], nn.Sequential(*blocks)
        self.head, self.pooled = nn.Linear(s.D, 2), rng.choice(["mean", "none", "rows", "time first"])

    @property
    def names(self) -> list[str]:
        """Names of its blocks."""
        return [block.name for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        out = self.head(self.blocks(self.first(x)))
        if self.pooled == "mean":
            return out.mean(1)
        if self.pooled == "rows":
            return out.reshape(-1, 2)
        return out.transpose(0, 1) if self.pooled == "time first" else out

    def batch(self, generator: torch.Generator) -> Tensor:
        """Draw a batch."""
        s = self.sizes
        if self.takes == "ids":
            return torch.randint(0, 11, (s.B, s.T), generator=generator)
        return torch.randn(s.B, s.T, s.D, generator=generator, dtype=torch.float64)

    def losses(self, x: Tensor) -> Tensor:
        """Per-sample losses, shape (B,)."""
        out, size = self(x), x.shape[0]
        if self.pooled == "time first":
            out = out.transpose(0, 1)
        return (out.reshape(size, -1) ** 2).sum(1) + out.reshape(size, -1).sum(1).sin()


def _expected(model: Model, x: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for sample in range(len(x)):
        loss = model.losses(x[sample : sample + 1]).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for into, grad in zip(total, grads, strict=True):
            into.add_(grad, alpha=min(1.0, float(BOUND / norm)))
    return total


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    apart = torch.stack([(one - two).norm() for one, two in zip(got, want, strict=True)]).norm()
    return float(apart / torch.stack([two.norm() for two in want]).norm().clamp(min=1e-30))


def measure(seed: int, *, steps: int = 3) -> dict[str, object]:
    """Run the model of a seed for a few steps."""
    torch.manual_seed(seed)
    model, generator = Model(seed).double(), torch.Generator().manual_seed(seed)
    row: dict[str, object] = {"seed": seed, "mixes": model.mixes, "blocks": model.names, "pooled": model.pooled}
    row |= {"takes": model.takes, "sizes": list(vars(model.sizes).values()), "outcome": "exact", "error": 0.0}
    batches = [model.batch(generator) for _ in range(steps)]
    wanted = [_expected(model, x) for x in batches]
    with ghostclip.GhostClipper(model, max_grad_norm=BOUND) as clipper:
        for number, (x, want) in enumerate(zip(batches, wanted, strict=True)):
            try:
                clipper.backward(model.losses(x))
            except GhostClipError as error:
                return row | {"outcome": "refused", "step": number, "why": f"{type(error).__name__}: {error}"}
            got = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            row["error"] = max(float(str(row["error"])), _error(got, want))
            if float(str(row["error"])) > EXACT:
                row["outcome"] = "wrong"
            clipper.reset()
    return row


def summary(rows: list[dict[str, object]]) -> str:
    """Return the table as Markdown."""
    right = [row for row in rows if not row["mixes"]]
    mixing = [row for row in rows if row["mixes"]]
    refused = [row for row in right if row["outcome"] == "refused"]
    lines = [
        f"{len(right)} correct models: {sum(row['outcome'] == 'exact' for row in right)} exact, "
        f"{len(refused)} refused, {sum(row['outcome'] == 'wrong' for row in right)} accepted with wrong gradients.",
        f"{len(mixing)} models that mix samples: {sum(row['outcome'] == 'refused' for row in mixing)} refused, "
        f"{sum(row['outcome'] == 'wrong' for row in mixing)} accepted with wrong gradients, "
        f"{sum(row['outcome'] == 'exact' for row in mixing)} whose samples did not meet in these batches.",
        "",
    ]
    bad = [row for row in rows if (row["outcome"] == "exact") == bool(row["mixes"]) or row["outcome"] == "wrong"]
    cells = []
    for row in bad[:_REFUSALS_SHOWN]:
        why = str(row.get("why", row["error"]))[:160].replace("|", "/")
        blocks = "; ".join(map(str, row["blocks"]))  # type: ignore[call-overload]
        cells.append([row["seed"], row["sizes"], f"{row['takes']}; {blocks}; {row['pooled']}", why])
    return "\n".join([*lines, table("refused or wrong | B, T, D, heads | blocks | why", cells, left=4)])


def main() -> int:
    """Measure many models."""
    options = parser("benchmarks.random_models", __doc__)
    options.add_argument("--count", type=int, default=1000, help="how many models (default: %(default)s)")
    options.add_argument("--begin", type=int, default=0, help="the first seed")
    options.add_argument("--write", action="store_true", help="write random-models.json and .md")
    given = options.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows = [measure(seed) for seed in range(given.begin, given.begin + given.count)]
    text = summary(rows)
    print(text)
    if given.write:
        report = {"machine": describe(CPU), "cpu_s": round(time.process_time() - begun, 1), "models": rows}
        write(given.out, "random-models", report, f"# Random models\n\n{text}")
    wrong = [row for row in rows if row["outcome"] == "wrong"]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
