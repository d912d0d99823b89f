"""Data that broke the bound, by name: the smallest of each kind that is known, and their nearest relatives.

Shape letters: B samples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tests.exactness.sensitivity.data import Sample
from tests.exactness.sensitivity.layers import ROWS, kind
from tests.exactness.sensitivity.measure import NUMERICS, Moves, Subject


@dataclass(frozen=True)
class Known:
    """A batch that broke the bound.

    Attributes:
        name: What it is called.
        kind: Name of the kind of layer.
        width: Of the layers.
        data: Makes the batch.
        numerics: Name of what is computed in.
        bound: C.
        normalised: Whether every gradient is scaled to length C.
    """

    name: str
    kind: str
    width: int
    data: Callable[[], Sample]
    numerics: str = "float32"
    bound: float = 1.0
    normalised: bool = False

    def moves(self, strategy: str) -> Moves:
        """Return how far each of its samples moves the sum."""
        numerics = NUMERICS[self.numerics]
        subject = Subject(kind(self.kind), self.width, numerics, strategy, normalised=self.normalised)
        return subject.moves(self.data(), bound=self.bound)


def _numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def _beside_others(sample: Sample, others: int = 5) -> Sample:
    """Return a batch of equal ordinary samples, whose sum is as long as they are many, and after them the given one."""
    batch = {}
    for place, (name, values) in enumerate(sample.items()):
        plain = _numbers(*values.shape, seed=100 + place) if values.is_floating_point() else values
        batch[name] = torch.stack([plain] * others + [values])
    return batch


def _places(ids_T: Tensor) -> list[int]:
    """Return three places of row 0 of which the one that is last in the order of a sort is not the last."""
    order = [place for place in ids_T.unsqueeze(0).sort(1).indices[0].tolist() if ids_T[place] == 0]
    triples = itertools.combinations(order, 3)
    return list(next((i, j, k) for i, j, k in triples if k < max(i, j)))


def _coefficients(scale: float = 1e30) -> tuple[Tensor, Tensor]:
    """Return row numbers and a, b, -(a+b) at three of them: nothing when added in the order of the sorted rows."""
    ids_T = torch.cat([torch.zeros(17, dtype=torch.int64), torch.arange(1, 24)])
    first, second = torch.tensor(scale), torch.tensor(0.3 * scale)
    coefficients_T1 = torch.zeros(len(ids_T), 1)
    coefficients_T1[_places(ids_T), 0] = torch.stack([first, second, -(first + second)])
    return ids_T, coefficients_T1


def _rows(width: int, scale: float = 1e30) -> Sample:
    ids_T, coefficients_T1 = _coefficients(scale)
    return _beside_others({"ids": ids_T, "w": coefficients_T1.expand(-1, width)})


def _weighted_rows(width: int) -> Sample:
    ids_T, coefficients_T1 = _coefficients()
    return _beside_others({"ids": ids_T, "x": coefficients_T1, "w": torch.ones(len(ids_T), width)})


def _bag(width: int) -> Sample:
    ids_T, coefficients_T1 = _coefficients()
    return _beside_others({"ids": ids_T, "x": coefficients_T1, "w": torch.ones(1, width)})


def _absorbing_rows(width: int) -> Sample:
    """Return look-ups of one row that are nothing together in any order."""
    g_TI = 1e15 * torch.tensor([1.0, 1.0, -1.0, -1.0]).unsqueeze(1).expand(-1, width)
    return _beside_others({"ids": torch.zeros(4, dtype=torch.int64), "w": g_TI})


def _calls(width: int, shares: tuple[float, float, float] = (1.0, 3.0, -4.0), scale: float = 2.0**50) -> Sample:
    """Return three calls on one input whose gradients are nothing together."""
    x_I, g_O = _numbers(2, width, seed=2)
    few_bits_O = (g_O * 2**12).round() / 2**12 * scale
    return _beside_others({"x": x_I.expand(3, -1), "w": torch.tensor(shares).unsqueeze(1) * few_bits_O})


def _two_calls(width: int) -> Sample:
    """Return two calls that see one input and opposite gradients."""
    x_TI, g_TO = _numbers(2, 3, width, seed=4)
    return _beside_others({"x": x_TI, "y": x_TI, "w": g_TO * 2.0**50, "w1": -g_TO * 2.0**50})


def _tied(width: int) -> Sample:
    """Return a head's products that fill every row with an input, and look-ups that take it away."""
    x_TI = _numbers(ROWS, width, seed=8)
    g_TV = torch.eye(ROWS) * 2.0**50
    return _beside_others({"ids": torch.arange(ROWS), "x": x_TI, "w": -(2.0**50) * x_TI, "w1": g_TV})


def _common_part(width: int, positions: int = 60, apart: float = 0.05) -> Sample:
    """Return inputs that are one of two near ones in turn and opposite gradients: a Gram's errors have one sign."""
    first_I, second_I, g_O = _numbers(3, width, seed=0)
    in_turn_T1 = (torch.arange(positions) % 2).unsqueeze(1)
    x_TI = first_I + apart * in_turn_T1 * second_I
    return {"x": x_TI.unsqueeze(0), "w": ((1 - 2 * in_turn_T1) * g_O).unsqueeze(0)}


def _opposite(width: int) -> Sample:
    """Return two positions of one input and opposite gradients, in float64."""
    x_I, g_O = _numbers(2, width, seed=12).double() / 3
    sample = {"x": x_I.expand(2, -1), "w": torch.stack([g_O, -g_O]) * 2.0**76}
    return {name: values.double() for name, values in _beside_others(sample).items()}


def _beyond_float64(width: int) -> Sample:
    """Return three positions that are nothing together, so large that float64 loses the fourth, an ordinary one."""
    x_TI, g_TO = _numbers(2, 4, width, seed=13)
    x_TI[1:3] = x_TI[0]
    few_bits_O = (g_TO[0] * 2**12).round() / 2**12 * 2.0**54
    g_TO[:3] = torch.tensor([1.0, 3.0, -4.0]).unsqueeze(1) * few_bits_O
    return _beside_others({"x": x_TI, "w": g_TO})


def _terms_beyond_float32(width: int, outputs: int = 17) -> Sample:
    """Return positions whose products are beyond float32, though not their sum, which float64 knows."""
    x_I, g_O = _numbers(2, width, seed=16)
    x_TI, g_TO = x_I.expand(17, -1).clone(), g_O.expand(outputs, -1).clone()
    for place, power in ((0, 70), (1, 70), (2, 60)):
        x_TI[place] *= 2.0**power
        g_TO[place] *= 2.0**power
    g_TO[1] *= -1
    return _beside_others({"x": x_TI, "w": g_TO})


def _kept_where_alone(width: int) -> Sample:
    """Return four positions that are nothing together, beside one other without which their gradient is kept whole."""
    x_TI, g_TO = _numbers(2, 4, width, seed=13)
    x_TI[1:] = x_TI[0]
    g_TO[3] = -g_TO[:3].double().sum(0).float()
    products, ids = {"x": x_TI, "w": g_TO * 2.0**64}, torch.zeros(4, dtype=torch.int64)
    return _beside_others({**products, "ids": ids, "w1": torch.ones(4, width), "w2": torch.ones(4, width)}, others=1)


def _rounding_alone(width: int, positions: int = 9, batch: int = 7) -> Sample:
    """Return samples of which nothing is left but rounding, in products that begin anywhere in memory, in float64."""
    x_BI, g_BTO = (
        _numbers(batch, *size, width, seed=seed).double() / 3 for size, seed in (((), 14), ((positions,), 15))
    )
    g_BTO[:, -1] = -g_BTO[:, :-1].sum(1)
    return {"x": x_BI.unsqueeze(1).expand(-1, positions, -1), "w": g_BTO}


def _vanishing(width: int, positions: int) -> Sample:
    """Return inputs whose squares all but overflow and gradients whose squares vanish, though not their products."""
    x_BTI = torch.full((1, positions, width), 1.7e19 / math.sqrt(width))
    return {"x": x_BTI, "w": torch.full((1, positions, width), 2.6e-23)}


def _products(width: int) -> Sample:
    return {"x": _numbers(8, 17, width, seed=8), "w": _numbers(8, 17, width, seed=9)}


KNOWN: Final = (
    Known("rows that cancel", "embedding", 3, lambda: _rows(3)),
    Known("rows times a weight that cancel", "embedding times a weight", 3, lambda: _weighted_rows(3)),
    Known("bag with weights that cancel", "bag, sum", 3, lambda: _bag(3)),
    Known("indexed rows with weights that cancel", "indexed rows", 3, lambda: _weighted_rows(3)),
    Known("rows, absorption", "embedding", 3, lambda: _absorbing_rows(3)),
    Known("three calls", "linear, a call for each position", 3, lambda: _calls(3)),
    Known("three calls, wide", "linear, a call for each position", 48, lambda: _calls(48)),
    Known("three calls, absorption", "linear, a call for each position", 3, lambda: _calls(3, (1.0, 1.0, -2.0))),
    Known("two calls", "linear, two calls", 3, lambda: _two_calls(3)),
    Known("two calls, wide", "linear, two calls", 48, lambda: _two_calls(48)),
    Known("embedding and head", "embedding and head, tied", 3, lambda: _tied(3)),
    Known("Gram of a common part", "linear, wide", 300, lambda: _common_part(300)),
    Known("one layer in float64", "linear", 3, lambda: _opposite(3), numerics="float64"),
    Known("one layer in float64, wide", "linear", 48, lambda: _opposite(48), numerics="float64"),
    Known("one layer, beyond float64", "linear", 3, lambda: _beyond_float64(3)),
    Known("one layer, beyond float64, wide", "linear", 48, lambda: _beyond_float64(48)),
    Known("terms beyond float32", "linear", 3, lambda: _terms_beyond_float32(3)),
    Known("terms beyond float32, wide", "linear", 48, lambda: _terms_beyond_float32(48)),
    Known("terms beyond float32, convolution", "convolution 1d", 4, lambda: _terms_beyond_float32(4, 18)),
    Known("kept where it is alone", "several parameters", 48, lambda: _kept_where_alone(48)),
    Known("rounding alone, normalised", "linear", 9, lambda: _rounding_alone(9), numerics="float64", normalised=True),
    Known("rounding alone in a weight derived from two, normalised", "weight derived from two", 9,
          lambda: _rounding_alone(9), numerics="float64", normalised=True),
    Known("squares that vanish", "linear, wide", 300, lambda: _vanishing(300, 250)),
    Known("squares that vanish, one position", "linear", 48, lambda: _vanishing(48, 1), bound=1e-3),
    Known("rows of ordinary size, normalised", "embedding", 3, lambda: _rows(3, 1.0), normalised=True),
    Known("three calls of ordinary size, normalised", "linear, a call for each position", 3,
          lambda: _calls(3, scale=1.0), normalised=True),
    Known("products in bfloat16", "linear", 48, lambda: _products(48), numerics="medium"),
)  # fmt: skip
