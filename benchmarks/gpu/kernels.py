"""Kernels beside their twins, on shapes of layers that people train: is one right, and only then how fast is it.

Shape letters: N samples, T positions, I inputs, O outputs, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.timing import seconds
from ghostclip import kernels
from ghostclip._memory import PeakMemory
from ghostclip.kernels.bounds import Bounded
from ghostclip.kernels.noise import BLOCK, FAST_ROUNDS, SECURE_ROUNDS, chacha_state
from ghostclip.kernels.runtime import difference, relative_difference

# Samples, positions, inputs, outputs.
LAYERS: Final = {
    "GPT-2 attention output": (16, 1024, 768, 768),
    "GPT-2 feed-forward": (16, 1024, 768, 3072),
    "ViT-B feed-forward": (64, 197, 768, 3072),
    "7B feed-forward": (4, 512, 4096, 11008),
    "vocabulary head": (4, 256, 768, 50257),
    "long context": (1, 32768, 128, 128),
}
QUICK: Final = {"small": (2, 63, 60, 33)}
# The first is what large models are trained in; float32 pays least.
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One problem for one kernel.

    Attributes:
        kernel: The kernel with its twin.
        title: What the shape is taken from.
        shape: The sizes, for the table.
        dtype: Of the data.
        make: New arguments on a device, the same at every call.
        exact: What is right, from such arguments, in float64; None where the twin is the definition.
    """

    kernel: kernels.Twins
    title: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[torch.device], tuple[Any, ...]]
    exact: Callable[..., Tensor] | None = None


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(2024 + seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _by_name() -> Mapping[str, kernels.Twins]:
    return {pair.name: pair for pair in kernels.TWINS}


def _squares(a_NTI: Tensor, g_NTO: Tensor, _: int) -> Tensor:
    squares = [(g.double().T @ a.double()).square().sum() for a, g in zip(a_NTI, g_NTO, strict=True)]
    return torch.stack(squares)


def _sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor) -> Tensor:
    total = out_OI.double()
    for a, g, coef in zip(a_NTI, g_NTO, coef_N, strict=True):
        total += coef.double() * (g.double().T @ a.double())
    return total


def _layer_cases(title: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    n, t, i, o = size
    named = _by_name()

    def factors(device: torch.device) -> tuple[Tensor, Tensor]:
        return _random((n, t, i), dtype, device), _random((n, t, o), dtype, device, 1)

    def norm(device: torch.device) -> tuple[Any, ...]:
        return *factors(device), 1 << 22

    def formed(device: torch.device) -> tuple[Any, ...]:
        return *factors(device), max(1, (1 << 24) // (i * o))

    def weighted(device: torch.device) -> tuple[Any, ...]:
        return *factors(device), torch.linspace(0.1, 1, n, device=device), torch.zeros(o, i, device=device)

    yield Case(named["symmetric_gram"], title, size, dtype, norm, _squares)
    yield Case(named["outer_square"], title, size, dtype, formed, _squares)
    yield Case(named["weighted_sum"], title, size, dtype, weighted, _sum)


def _pointwise_cases(shape: tuple[int, int, int], rows: int, dtype: torch.dtype) -> Iterator[Case]:
    named = _by_name()

    def looked_up(device: torch.device) -> tuple[Any, ...]:
        # Few rows stand for most of a text, as words do.
        ids = (
            torch.rand(shape[:2], generator=torch.Generator(device).manual_seed(5), device=device) ** 4 * rows
        ).long()
        return ids, _random(shape, dtype, device)

    def normalised(device: torch.device) -> tuple[Any, ...]:
        return _random(shape, dtype, device), _random(shape, dtype, device, 1), 1e-5, 1

    yield Case(named["row_square"], f"embedding of {rows} rows", shape, dtype, looked_up)
    yield Case(named["norm_affine"], "layer norm", shape, dtype, normalised)


def _noise_case(elements: int, level: str, rounds: int) -> Case:
    def make(device: torch.device) -> tuple[Any, ...]:
        part_N = _random((elements,), torch.float32, device)
        return part_N, chacha_state(bytes(range(32)), 11), (2.0, 64.0), (0, elements), (BLOCK, rounds)

    return Case(_by_name()["add_noise_"], f"{level} noise of a parameter", (elements,), torch.float32, make)


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield every problem."""
    for dtype in DTYPES:
        for title, size in (QUICK if quick else LAYERS).items():
            yield from _layer_cases(title, size, dtype)
        for shape, rows in (((2, 63, 60), 50),) if quick else (((16, 1024, 768), 50257), ((64, 512, 4096), 32000)):
            yield from _pointwise_cases(shape, rows, dtype)
    for elements in (1000,) if quick else (768 * 768, 4096 * 11008):
        yield _noise_case(elements, "fast", FAST_ROUNDS)
        yield _noise_case(elements, "secure", SECURE_ROUNDS)


TOLERANCE: Final = 1e-5
"""Largest relative error of a kernel, against float64 or its twin."""


def _values(result: Any) -> Any:
    return result.value_N if isinstance(result, Bounded) else result


def _checked(case: Case, device: torch.device) -> dict[str, object]:
    """Run the kernel twice and compare: with the definition in float64, its bound, its twin and itself."""
    first, second = (case.kernel.fast(*case.make(device)) for _ in range(2))
    row: dict[str, object] = {"repeats": difference(second, first) == 0.0, "bound_holds": True}
    if case.exact is None:
        row["error"] = difference(first, case.kernel.naive(*case.make(device)))
    else:
        exact = case.exact(*case.make(device))
        row["error"] = relative_difference(_values(first), exact)
        if isinstance(first, Bounded):
            row["bound_holds"] = bool((first.value_N.double() + first.error_N.double() >= exact).all())
    right = float(str(row["error"])) <= TOLERANCE and row["repeats"] and row["bound_holds"]
    return {**row, "status": "ok" if right else "wrong"}


def measure(case: Case, device: torch.device, *, rounds: int) -> dict[str, object]:
    """Check one case and, if it is right, time it."""
    row: dict[str, object] = {
        "kernel": case.kernel.name,
        "title": case.title,
        "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    try:
        row |= _checked(case, device)
    except Exception as problem:  # noqa: BLE001 - whatever a compiler or driver raises is a result
        return {**row, "status": "failed", "problem": f"{type(problem).__name__}: {problem}"[:300]}
    if row["status"] != "ok" or device.type != "cuda":
        return row
    arguments = case.make(device)
    for name, work in (("kernel", case.kernel.fast), ("twin", case.kernel.naive)):
        row[f"{name}_seconds"] = seconds(partial(work, *arguments), device, rounds=rounds)
        row[f"{name}_bytes"] = PeakMemory(device).above(partial(work, *arguments))
    row["speed_up"] = float(str(row["twin_seconds"])) / float(str(row["kernel_seconds"]))
    return row
