"""Data that an adversary would choose: values that cancel, drift, overflow or vanish, and changes to what was found.

Every generator makes one sample: a pattern of coefficients over positions, times vectors that are equal, alike or
unrelated from position to position, times a scale. Where the vectors are equal and the coefficients add up to nothing,
the gradient is what rounding leaves of it.

Shape letters: B samples, T positions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor

from tests.exactness.sensitivity.layers import ROWS

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What a sample must look like.

    Attributes:
        shapes: Of the inputs that are values, and of the weights "w", "w1" and so on, by name.
        ids: Inputs that are row numbers.
        positions: T.
        dtype: Of the values.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ids: tuple[str, ...]
    positions: int
    dtype: torch.dtype


def _random(count: int, chance: Random) -> list[float]:
    return [chance.gauss(0, 1) for _ in range(count)]


def _closing(count: int, chance: Random) -> list[float]:
    values = _random(count, chance)
    values[-1] = -math.fsum(values[:-1])
    return values


def _triple(count: int, chance: Random) -> list[float]:
    first, second = chance.uniform(0.5, 2), chance.uniform(0.1, 1)
    values = [first, second, -(first + second)] if count > 2 else [first, -first]
    return (values + [0.0] * count)[:count]


def _alternating(count: int, chance: Random) -> list[float]:
    return [(-1.0) ** place for place in range(count)]


def _huge_pair(count: int, chance: Random) -> list[float]:
    values = _random(count, chance)
    huge = 10.0 ** chance.uniform(3, 25)
    first, second = (chance.sample(range(count), 2)) if count > 1 else (0, 0)
    values[first], values[second] = huge, -huge
    return values


def _telescoping(count: int, chance: Random) -> list[float]:
    values = _random(count, chance)
    return [after - before for before, after in zip(values, [*values[1:], values[0]], strict=True)]


def _rounded_away(count: int, chance: Random) -> list[float]:
    small = chance.choice([2.0**-24, 2.0**-25, 2.0**-23.5, 2.0**-53, 2.0**-9, 3 * 2.0**-25])
    return [1.0] + [small] * (count - 1)


def _growing(count: int, chance: Random) -> list[float]:
    base = chance.choice([2.0, -2.0, 10.0, -1.0001, 0.5, -0.99])
    return [base ** min(place, 80) for place in range(count)]


def _equal(count: int, chance: Random) -> list[float]:
    return [chance.choice([1.0, 1 / 3, 1.1])] * count


def _wide(count: int, chance: Random) -> list[float]:
    return [chance.choice([-1, 1]) * 10 ** chance.uniform(-12, 12) for _ in range(count)]


def _single(count: int, chance: Random) -> list[float]:
    values = [0.0] * count
    values[chance.randrange(count)] = 1.0
    return values


COEFFICIENTS: Final[dict[str, Callable[[int, Random], list[float]]]] = {
    "random": _random,
    "adding up to nothing": _closing,
    "a, b, -(a+b)": _triple,
    "alternating": _alternating,
    "huge pair": _huge_pair,
    "telescoping": _telescoping,
    "rounded away": _rounded_away,
    "growing": _growing,
    "equal": _equal,
    "of all sizes": _wide,
    "single": _single,
}
VECTORS: Final = ("equal", "alike", "unrelated", "constant", "one entry", "rounded away", "common part", "two in turn")


def _vectors(form: str, positions: int, features: int, chance: Random) -> Tensor:
    """Return vectors, shape ``(T, F)``, float64."""
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    one_F = torch.randn(features, generator=generator, dtype=torch.float64)
    noise_TF = torch.randn(positions, features, generator=generator, dtype=torch.float64)
    if form == "unrelated":
        return noise_TF
    if form == "constant":
        one_F = torch.full_like(one_F, chance.choice([1.0, 1 / 3, 0.7]))
    elif form == "one entry":
        one_F = torch.zeros_like(one_F)
        one_F[chance.randrange(features)] = 1.0
    elif form == "rounded away":
        one_F = torch.full_like(one_F, chance.choice([2.0**-12, 2.0**-12.5, 2.0**-24, 0.0003]))
        one_F[0] = 1.0
    elif form == "alike":
        one_F = one_F + 10 ** chance.uniform(-9, -1) * noise_TF
    elif form == "common part":
        one_F = 10 ** chance.uniform(0, 4) * one_F + noise_TF
    elif form == "two in turn":
        # What the two have in common rounds alike for every pair of positions.
        in_turn_T1 = torch.arange(positions).unsqueeze(1) % 2
        one_F = one_F + 10 ** chance.uniform(-3, 0) * in_turn_T1 * noise_TF[:1]
    return one_F.expand(positions, features).clone()


def _scale(chance: Random) -> float:
    """Return a scale: mostly an ordinary one, sometimes one whose squares leave the range of float32."""
    span = chance.choice([0, 2, 2, 5, 10, 15, 20, 30, 37])
    return float(10 ** chance.uniform(-span, span))


def sample_of(setting: Setting, chance: Random) -> Sample:
    """Return one sample of an adversary."""
    made: Sample = {}
    shapes, positions = setting.shapes, setting.positions
    pattern = COEFFICIENTS[chance.choice(list(COEFFICIENTS))]
    weights = [name for name in shapes if name.startswith("w")]
    # Inputs and weights of opposite sizes: their product is ordinary, their squares are not.
    opposite = 10 ** chance.uniform(-22, 22) if chance.random() < 0.25 else 1.0
    bearers = {chance.choice(weights + list(shapes)), chance.choice(weights)}
    for name, shape in shapes.items():
        rows, features = _rows_of(shape, positions)
        values_TF = _vectors(chance.choice(VECTORS), rows, features, chance)
        if name in bearers:
            coefficients = pattern(rows, chance)
            if chance.random() < 0.3:
                chance.shuffle(coefficients)
            values_TF = torch.tensor(coefficients, dtype=torch.float64).unsqueeze(1) * values_TF
        if opposite != 1:
            values_TF = values_TF * (opposite if name in weights else 1 / opposite)
        elif chance.random() < 0.7:
            values_TF = values_TF * _scale(chance)
        made[name] = _finite(values_TF, setting.dtype).reshape(shape)
    _copy_(made, chance)
    for name in weights:
        if chance.random() < 0.4:
            _close_(made[name], positions)
    for name in setting.ids:
        made[name] = _row_numbers(positions, chance)
    return made


def _row_numbers(positions: int, chance: Random) -> Tensor:
    """Return row numbers, ``(T,)``: of one row, of few, of any, or as many of one row as of others."""
    form = chance.choice(["few", "few", "any", "half"])
    if form == "half":
        numbers = [0 if place % 2 else 1 + place // 2 % (ROWS - 1) for place in range(positions)]
        chance.shuffle(numbers)
        return torch.tensor(numbers)
    choices = range(ROWS if form == "any" else chance.choice([1, 1, 2, 3]))
    return torch.tensor([chance.choice(choices) for _ in range(positions)])


def _copy_(sample: Sample, chance: Random) -> None:
    """Sometimes let inputs of one shape be equal or opposite, so that uses of one parameter cancel."""
    if chance.random() < 0.5:
        return
    names = list(sample)
    for place, name in enumerate(names):
        for other in names[place + 1 :]:
            weighs = name.startswith("w")
            if sample[name].shape == sample[other].shape and weighs == other.startswith("w"):
                sample[other] = sample[name] * (chance.choice([1, -1, -1]) if weighs else 1)


def _rows_of(shape: tuple[int, ...], positions: int) -> tuple[int, int]:
    """Return how a shape is read as positions and features."""
    count = math.prod(shape)
    if shape[0] > 1 or count % positions:
        return shape[0], count // shape[0]
    return positions, count // positions


def _finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def _close_(values: Tensor, positions: int) -> None:
    """Let the last position be what makes the positions add up to nothing, in the tensor's own precision."""
    rows, features = _rows_of(tuple(values.shape), positions)
    if rows > 1:
        flat_TF = values.view(rows, features)
        flat_TF[-1] = _finite(-flat_TF[:-1].double().sum(0), values.dtype)


def batch_of(samples: list[Sample]) -> Sample:
    """Return samples as a batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def ordinary(setting: Setting, chance: Random) -> Sample:
    """Return one sample of random values of ordinary size: what an adversary's sample is put beside."""
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    made = {name: torch.randn(shape, generator=generator).to(setting.dtype) for name, shape in setting.shapes.items()}
    ids = {name: torch.randint(ROWS, (setting.positions,), generator=generator) for name in setting.ids}
    return made | ids


def _rescale(values: Tensor, chance: Random, positions: int) -> Tensor:
    return _finite(values.double() * 10 ** chance.gauss(0, 3), values.dtype)


def _nudge(values: Tensor, chance: Random, positions: int) -> Tensor:
    flat, changed = values.flatten(), values.flatten().clone()
    toward = torch.tensor(chance.choice([-math.inf, math.inf]), dtype=values.dtype)
    for _ in range(chance.choice([1, 1, 3])):
        place = chance.randrange(len(flat))
        changed[place] = torch.nextafter(flat[place], toward)
    return torch.nan_to_num(changed, 0.0).view_as(values)


def _perturb(values: Tensor, chance: Random, positions: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return _finite(values.double() * (1 + 10 ** chance.uniform(-8, 0) * noise), values.dtype)


def _move_row(values: Tensor, chance: Random, positions: int) -> Tensor:
    changed = values.clone()
    rows, features = _rows_of(tuple(values.shape), positions)
    flat_TF = changed.view(rows, features)
    source, target = chance.randrange(rows), chance.randrange(rows)
    factor = chance.choice([1, -1, 0, 2, 0.5, -1 / 3])
    if chance.random() < 0.5:
        flat_TF[[source, target]] = flat_TF[[target, source]]
    else:
        flat_TF[target] = _finite(flat_TF[source].double() * factor, values.dtype)
    return changed


def _closed(values: Tensor, chance: Random, positions: int) -> Tensor:
    changed = values.clone()
    _close_(changed, positions)
    return changed


def _rounder(values: Tensor, chance: Random, positions: int) -> Tensor:
    mantissa, exponent = torch.frexp(values.double())
    digits = 2 ** chance.choice([1, 4, 8, 12])
    return _finite(torch.ldexp((mantissa * digits).round() / digits, exponent), values.dtype)


_CHANGES: Final = (_rescale, _nudge, _nudge, _perturb, _move_row, _move_row, _closed, _rounder)


def changed(data: Sample, setting: Setting, chance: Random) -> Sample:
    """Return a batch with one or a few changes to one of its samples."""
    after = dict(data)
    sample = chance.randrange(len(data["w"]))
    for _ in range(chance.choice([1, 1, 2, 3])):
        name = chance.choice([*data, "w"])
        values = after[name].clone()
        if values.is_floating_point():
            values[sample] = chance.choice(_CHANGES)(values[sample], chance, setting.positions)
            alike = [other for other in data if other != name and after[other].shape == values.shape]
            if alike and chance.random() < 0.1:
                values[sample] = after[chance.choice(alike)][sample] * chance.choice([1, -1])
        else:
            values[sample, chance.randrange(values.shape[1])] = chance.choice([0, 1, chance.randrange(ROWS)])
        after[name] = values
    return after
