"""Compile every kernel for two generations of GPUs, with the tiles that are used: `python -m tests.kernels.compiles`.

Prints one line a kernel: its name, the architecture, the type of its first argument and its bytes of shared memory.
Matrices are taken to begin, and their rows to be apart, by multiples of 16, as those of most layers are.
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from ghostclip.kernels import triton_noise, triton_products, triton_sums
from ghostclip.kernels.bounds import CHAIN_OF_KERNELS, COLUMNS, FORMED_COLUMNS, UNIT_CHAIN

SIZES = ("positions", "inputs", "outputs", "tiles", "programs", "samples", "splits", "features", "share")
STRIDES = ("a_sample", "a_step", "g_sample", "g_step", "between", "stride", "bias_offset")
TYPES = dict.fromkeys((*SIZES, *STRIDES, "first_block", "block_size", "offset", "count"), "i32")
TYPES |= dict.fromkeys(("value_ptr", "part_ptr", "square_ptr", "scales_ptr"), "*fp64")
TYPES |= dict.fromkeys(("coef_ptr", "out_ptr", "weight_ptr", "bias_ptr", "sum_ptr"), "*fp32")
TYPES |= dict.fromkeys(("order_ptr", "first_ptr", "end_ptr", "state_ptr"), "*i64") | {"eps": "fp32", "total": "i64"}
TYPES |= dict.fromkeys((*(f"k{number}" for number in range(8)), "low", "high"), "i32")
TYPES |= dict.fromkeys(("std_low", "std_high", "by_low", "by_high"), "i32")
EVEN = ("a_ptr", "g_ptr", *STRIDES[:4], "positions", "inputs", "outputs")
DIVISIBLE = [["tt.divisibility", 16]]
NOISE = {"BLOCK": 1 << 15, "DIVIDE": True, "LANES": 128}


def _cases(data: str) -> list[tuple[Any, dict[str, Any], int]]:
    """Kernel, constants and warps; what is independent of the data's type once only."""
    cases = []
    tiles = ((64, CHAIN_OF_KERNELS),) if data == "fp32" else ((64, 0), (128, 0), (128, UNIT_CHAIN))
    for block, chunk in tiles:
        matrix, deep = {"BLOCK": block, "CHUNK": chunk}, 64 if block == 128 else 32
        cases += [
            (triton_products._gram, {**matrix, "BLOCK_K": deep, "COLUMNS": len(COLUMNS), "SUMMED": 0}, 8),
            (triton_products._gram, {**matrix, "BLOCK_K": deep, "COLUMNS": len(COLUMNS), "SUMMED": 2}, 8),
            (triton_products._square, {**matrix, "BLOCK_T": deep, "COLUMNS": FORMED_COLUMNS}, block // 16),
            (triton_products._weighted_sum, {**matrix, "BLOCK_T": deep, "GROUP": 8, "ADD": True}, block // 16),
        ]
    if data == "fp32":
        cases += [
            (triton_sums._row_squares, {"BLOCK_R": 4, "BLOCK_I": 1024}, 4),
            (triton_sums._norm_affine, {"CENTRED": True, "BLOCK_T": 4, "BLOCK_F": 1024}, 4),
            (triton_sums._norm_affine, {"CENTRED": False, "BLOCK_T": 1, "BLOCK_F": 8192}, 8),
            (triton_noise._add_noise, {**NOISE, "ALIGNED": True, "ROUNDS": 20}, 4),
            (triton_noise._add_noise, {**NOISE, "ALIGNED": False, "ROUNDS": 8}, 4),
        ]
    return cases


def main() -> int:
    """Compile all of them."""
    for architecture in (80, 90):
        for data in ("fp32", "fp16", "bf16"):
            types = TYPES | dict.fromkeys(("a_ptr", "g_ptr", "x_ptr"), f"*{data}")
            for kernel, constants, warps in _cases(data):
                signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
                places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
                even = {(kernel.arg_names.index(name),): DIVISIBLE for name in EVEN if name in kernel.arg_names}
                source = compiler.ASTSource(kernel, signature, places, even)
                made = compiler.compile(
                    source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps}
                )
                assert made.asm["cubin"]
                print(kernel.__name__, architecture, data, made.metadata.shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
