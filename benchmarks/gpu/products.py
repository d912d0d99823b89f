"""Stage 2: the products of norms and clipped sums in every way this device has: time and error on two kinds of data.

float32 widened: 16-bit factors are converted and multiplied in float32. out_dtype: they are multiplied as they are,
with sums in float32. Triton: the kernel of this package. Constant data shows whether sums are truncated where they
should be rounded: the error is then of one sign and grows with the number of terms.

Shape suffixes: N samples, T positions, I inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.engines import CannotDo
from benchmarks.gpu.peaks import measured
from benchmarks.gpu.rows import Job, started
from benchmarks.timing import seconds
from ghostclip import kernels
from ghostclip.kernels import runtime

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Product:
    """One product in several ways.

    Attributes:
        name: What it is for.
        make: Its factors, of "random" or "constant" entries.
        exact: The product in float64, a corner of it.
        corner: The same corner of a result.
        flops: Its operations.
        ways: How it can be computed, the plain way first.
    """

    name: str
    make: Callable[[str], tuple[Tensor, Tensor]]
    exact: Callable[[Tensor, Tensor], Tensor]
    corner: Callable[[Tensor], Tensor]
    flops: float
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)


def _pair(device: torch.device, one: tuple[int, ...], two: tuple[int, ...], data: str) -> tuple[Tensor, Tensor]:
    if data == "constant":
        # 1 + 2**-7 is a number of bfloat16; its square is none.
        first, second = (torch.full(shape, 1 + 2**-7, dtype=DTYPE, device=device) for shape in (one, two))
        return first, second
    generator = torch.Generator(device).manual_seed(2024)
    first, second = (torch.randn(shape, generator=generator, device=device).to(DTYPE) for shape in (one, two))
    return first, second


def _only_on_gpus(multiply: Callable[..., Tensor], one: Tensor, two: Tensor) -> Tensor:
    if one.device.type != "cuda":
        raise CannotDo("products of 16-bit factors with sums in float32 are there on GPUs alone")
    return multiply(one, two, out_dtype=torch.float32)


def _gram(device: torch.device, samples: int, length: int, width: int) -> Product:
    shape = (samples, length, width)
    return Product(
        f"Gram of {samples}×{length}×{width}",
        partial(_pair, device, shape, shape),
        lambda a_NTI, _: a_NTI[0, :8].double() @ a_NTI[0].double().T,
        lambda gram_NTT: gram_NTT[0, :8],
        2.0 * samples * length**2 * width,
        {
            "float32 widened": lambda a_NTI, _: torch.bmm(a_NTI.float(), a_NTI.float().mT),
            "out_dtype": lambda a_NTI, _: _only_on_gpus(torch.bmm, a_NTI, a_NTI.mT),
            "bfloat16": lambda a_NTI, _: torch.bmm(a_NTI, a_NTI.mT),
        },
    )


def _sum(device: torch.device, rows: int, inputs: int, outputs: int) -> Product:
    return Product(
        f"sum of {rows} rows, {inputs}×{outputs}",
        partial(_pair, device, (rows, inputs), (rows, outputs)),
        lambda a_TI, g_TO: g_TO[:, :8].double().T @ a_TI.double(),
        lambda sum_OI: sum_OI[:8],
        2.0 * rows * inputs * outputs,
        {
            "float32 widened": lambda a_TI, g_TO: torch.mm(g_TO.float().T, a_TI.float()),
            "out_dtype": lambda a_TI, g_TO: _only_on_gpus(torch.mm, g_TO.T, a_TI),
            "bfloat16": lambda a_TI, g_TO: torch.mm(g_TO.T, a_TI),
            "Triton": _by_kernel,
        },
    )


def _by_kernel(a_TI: Tensor, g_TO: Tensor) -> Tensor:
    if not runtime.runs_on(a_TI.device):
        raise CannotDo("Triton is not installed" if not runtime.installed() else "Triton runs on GPUs")
    pair = next(pair for pair in kernels.TWINS if pair.name == "weighted_sum")
    total_OI = torch.zeros(g_TO.shape[1], a_TI.shape[1], device=a_TI.device)
    found = pair.fast(a_TI[None], g_TO[None], torch.ones(1, device=a_TI.device), total_OI)
    return found if isinstance(found, Tensor) else total_OI


def _head(device: torch.device, rows: int, width: int, vocabulary: int) -> Product:
    padded = -(-vocabulary // 64) * 64
    made = _sum(device, rows, width, vocabulary)
    wide = torch.nn.functional.pad

    def aligned(a_TI: Tensor, g_TO: Tensor) -> Tensor:
        return _only_on_gpus(torch.mm, wide(g_TO, (0, padded - vocabulary)).T, a_TI)[:vocabulary]

    ways = {**made.ways, f"out_dtype, padded to {padded}": aligned}
    return Product(f"head: {made.name}", made.make, made.exact, made.corner, made.flops, ways)


def products(device: torch.device, *, quick: bool) -> list[Product]:
    """The products of GPT-2 large and of a Llama of one billion parameters, at eight samples of 1024 tokens."""
    if quick:
        return [_gram(device, 2, 16, 24), _sum(device, 32, 24, 40), _head(device, 32, 24, 97)]
    return [
        _gram(device, 8, 1024, 1280),
        _gram(device, 8, 1024, 5120),
        _gram(device, 8, 1024, 8192),
        _sum(device, 8192, 1280, 5120),
        _sum(device, 8192, 2048, 8192),
        _head(device, 8192, 1280, 50257),
    ]


def _error(product: Product, way: Callable[[Tensor, Tensor], Tensor], data: str) -> float:
    """The mean relative error, with its sign: rounding averages out, truncation does not."""
    factors = product.make(data)
    exact, found = product.exact(*factors), product.corner(way(*factors)).double()
    if data == "constant":
        return float(((found - exact) / exact).mean())
    return float((found - exact).norm() / exact.norm())


def main(given: list[str] | None = None) -> int:
    """Measure every product in every way."""
    job: Job = started("benchmarks.gpu.products", __doc__, given=given)
    with job.case("this device's largest rates") as row:
        peak = measured(job.device, quick=job.quick)
        row |= {"bf16_tflops": peak.bf16 / 1e12, "float32_tflops": peak.float32 / 1e12, "gb_s": peak.memory / 1e9}
    for product in products(job.device, quick=job.quick):
        for way, work in product.ways.items():
            with job.case(f"{product.name}: {way}") as row:
                row["error"] = _error(product, work, "random")
                row["constant_error"] = _error(product, work, "constant")
                row["seconds"] = seconds(partial(work, *product.make("random")), job.device, rounds=10)
                row["tflops"] = product.flops / row["seconds"] / 1e12
    return 0


if __name__ == "__main__":
    sys.exit(main())
