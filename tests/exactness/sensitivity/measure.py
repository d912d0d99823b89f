"""How far one sample moves the clipped sum of a model, in units of the bound C.

Shape letters: B samples.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

import ghostclip
from ghostclip.clipping import policies
from tests.exactness.sensitivity.layers import Data, Kind, Model

STRATEGIES: Final = ("bookkeeping", "ghost", "fast", "hooks")
# What is added to 1 before a move is too large: the rounding of sums that are subtracted, and of the other samples'
# norms, which a batch of another size rounds otherwise. In float64 1.3e-12 was met, of a gradient of 5e-7 whose terms
# are of 4e3 and cancel, scaled to C.
ALLOWED: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float64: 1e-11}


@dataclass(frozen=True)
class Numerics:
    """What is computed in.

    Attributes:
        name: What it is called.
        dtype: Of the model and of its data.
        autocast: Whether the forward runs under autocast to bfloat16.
        precision: Of torch's float32 products.
    """

    name: str
    dtype: torch.dtype
    autocast: bool = False
    precision: str = "highest"

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Compute float32 products in the precision asked for."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


NUMERICS: Final = {
    each.name: each
    for each in (
        Numerics("float32", torch.float32),
        Numerics("float64", torch.float64),
        Numerics("bfloat16", torch.bfloat16),
        Numerics("autocast", torch.float32, autocast=True),
        Numerics("medium", torch.float32, precision="medium"),
    )
}


def reduced_products() -> dict[str, bool]:
    """Return for torch's settings "high" and "medium" whether they change a float32 product on this machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, right = torch.randn(2, 64, 64)
    exact, changed = left @ right, {}
    for precision in ("high", "medium"):
        with Numerics("", torch.float32, precision=precision).products():
            changed[precision] = not torch.equal(left @ right, exact)
    return changed


@dataclass(frozen=True)
class Moves:
    """How far a sample moves the clipped sum, over C; the largest over the samples that were tried.

    Attributes:
        left_out: When the batch is one sample shorter.
        silenced: When the sample's loss is multiplied by 0.
        alone: The sum of a batch of that sample alone.
        others: How far the sum moves beyond what the sample adds alone.
        sample: The sample of the largest move.
    """

    left_out: float
    silenced: float
    alone: float
    others: float
    sample: int

    def worst(self, *, computed: bool = False) -> float:
        """Return the largest move."""
        return max(self.silenced, self.alone, 0.0 if computed else self.left_out)


class Subject:
    """A clipper around a model of one kind, and what it sums up for any batch."""

    def __init__(self, kind: Kind, width: int, numerics: Numerics, strategy: str, *, normalised: bool = False) -> None:
        """Attach."""
        self.kind, self.width, self.numerics, self.normalised = kind, width, numerics, normalised
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = kind.model(width).to(numerics.dtype)
        self._plain = copy.deepcopy(self.model)
        self.clipper = ghostclip.GhostClipper(
            self.model,
            policy=policies.normalised() if normalised else policies.flat(1.0),
            strategy=strategy,
            loss_reduction="sum",
            probe=False,
        )
        self._parameters = list(self.model.parameters())

    def shapes(self, positions: int) -> dict[str, tuple[int, ...]]:
        """Return the shape that each input has for a sample."""
        shapes = {name: (positions, *rest) for name, rest in self.kind.values(self.width).items()}
        dtype = self.numerics.dtype
        data: dict[str, Tensor] = {name: torch.zeros(1, *shape, dtype=dtype) for name, shape in shapes.items()}
        data |= {name: torch.zeros(1, positions, dtype=torch.int64) for name in self.kind.ids}
        with torch.no_grad():
            outputs = self._outputs(self._plain, data)
        return {**shapes, **{weight_name(place): tuple(out.shape[1:]) for place, out in enumerate(outputs)}}

    def _outputs(self, model: Model, data: Data) -> tuple[Tensor, ...]:
        return model(data) + model({**data, "x": data["y"]}) if self.kind.again else model(data)

    def sums(self, data: Data) -> Tensor:
        """Return the clipped sum of a batch."""
        if len(data["w"]) == 0:
            return torch.zeros(sum(parameter.numel() for parameter in self._parameters), dtype=torch.float64)
        self.clipper.reset()
        with self.numerics.products():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.numerics.autocast):
                outputs = self._outputs(self.model, data)
            self.clipper.backward(_losses(outputs, data))
        return torch.cat([self._sum_of(parameter) for parameter in self._parameters])

    def norms(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the norms of the samples' gradients, by the engine and by autograd on one sample after the other."""
        self.sums(data)
        alone = []
        for sample in range(len(data["w"])):
            self._plain.zero_grad()
            own = _taken(data, [sample])
            _losses(self._outputs(self._plain, own), own).sum().backward()
            alone.append(torch.cat([p.grad.flatten() for p in self._plain.parameters() if p.grad is not None]).norm())
        return self.clipper.per_sample_norms, torch.stack(alone)

    def _sum_of(self, parameter: Tensor) -> Tensor:
        found = self.clipper.summed_gradient(parameter)
        if found is None:
            return torch.zeros(parameter.numel(), dtype=torch.float64)
        return found.detach().double().flatten()

    def moves(self, data: Data, samples: Sequence[int] | None = None, *, bound: float = 1.0) -> Moves:
        """Return how far samples move the sum."""
        self.clipper.reset()
        self.clipper.max_grad_norm = bound
        size = len(data["w"])
        whole = self.sums(data)
        found = []
        for sample in range(size) if samples is None else samples:
            alone = whole if size == 1 else self.sums(_taken(data, [sample]))
            rest = whole - alone if size == 1 else self.sums(_taken(data, [i for i in range(size) if i != sample]))
            silent = self.sums(_silenced(data, sample))
            moved = (whole - rest, whole - silent, alone, whole - rest - alone)
            found.append((*(_length(move) / bound for move in moved), sample))
        worst = max(found, key=lambda row: max(row[:3]))
        return Moves(*(max(row[place] for row in found) for place in range(4)), worst[4])


def weight_name(place: int) -> str:
    """Return the name of what multiplies the output at a place."""
    return f"w{place or ''}"


def _losses(outputs: Sequence[Tensor], data: Data) -> Tensor:
    """Return the samples' losses, ``(B,)``: the weights are the gradients of the outputs, whatever the outputs are."""
    losses = []
    for place, output in enumerate(outputs):
        wide = torch.promote_types(output.dtype, torch.float32)
        losses.append((output.to(wide) * data[weight_name(place)].to(wide)).flatten(1).sum(1))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)


def _length(vector: Tensor) -> float:
    # Scaled, so that squares neither overflow nor vanish.
    largest = vector.abs().max().item() if len(vector) else 0.0
    if not math.isfinite(largest):
        return math.inf
    return largest * (vector / largest).norm().item() if largest else 0.0


def _taken(data: Data, samples: Sequence[int]) -> Data:
    return {name: values[list(samples)] for name, values in data.items()}


def _silenced(data: Data, sample: int) -> Data:
    silenced = dict(data)
    for name in data:
        if name.startswith("w"):
            silenced[name] = data[name].clone()
            silenced[name][sample] = 0
    return silenced
