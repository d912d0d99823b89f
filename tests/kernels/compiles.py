"""Compile every kernel for two generations of GPUs, with the tiles that are used: `python -m tests.kernels.compiles`.

Prints one line a kernel: its name, the architecture, the type of its first argument and its bytes of shared memory.
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from ghostclip.kernels._compiled import affine, gram, noise, outer, rows

SIZES = ("positions", "inputs", "outputs", "tiles", "programs", "samples", "splits", "features", "share")
TYPES = dict.fromkeys((*SIZES, "first_block", "block_size", "offset", "count"), "i32")
TYPES |= dict.fromkeys(("value_ptr", "absolute_ptr", "scale_ptr", "drift_ptr", "square_ptr", "scales_ptr"), "*fp64")
TYPES |= dict.fromkeys(("coef_ptr", "out_ptr", "weight_ptr", "bias_ptr", "sum_ptr"), "*fp32")
TYPES |= dict.fromkeys(("order_ptr", "first_ptr", "end_ptr", "state_ptr"), "*i64") | {"eps": "fp32", "total": "i64"}
TYPES |= dict.fromkeys((*(f"k{number}" for number in range(8)), "low", "high"), "i32")
TYPES |= dict.fromkeys(("std_low", "std_high", "by_low", "by_high"), "i32")
MATRIX = {"BLOCK": 64, "CHUNK": 512}
NOISE = {"BLOCK": 1 << 15, "DIVIDE": True, "LANES": 128}


def _cases(data: str) -> list[tuple[Any, dict[str, Any], int]]:
    """Kernel, constants and warps; what is independent of the data's type once only."""
    cases = [
        (gram._gram, {**MATRIX, "BLOCK_K": 32}, 8),
        (outer._square, {**MATRIX, "BLOCK_T": 32}, 4),
        (outer._weighted_sum, {**MATRIX, "BLOCK_T": 32, "ADD": True}, 4),
    ]
    if data == "fp32":
        cases += [
            (rows._row_squares, {"BLOCK_R": 4, "BLOCK_I": 1024}, 4),
            (affine._norm_affine, {"CENTRED": True, "WHOLE": True, "BLOCK_T": 4, "BLOCK_F": 1024}, 4),
            (affine._norm_affine, {"CENTRED": False, "WHOLE": False, "BLOCK_T": 1, "BLOCK_F": 8192}, 8),
            (noise._add_noise, {**NOISE, "ALIGNED": True, "ROUNDS": 20}, 4),
            (noise._add_noise, {**NOISE, "ALIGNED": False, "ROUNDS": 8}, 4),
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
                target = GPUTarget("cuda", architecture, 32)
                made = compiler.compile(
                    compiler.ASTSource(kernel, signature, places), target=target, options={"num_warps": warps}
                )
                assert made.asm["cubin"]
                print(kernel.__name__, architecture, data, made.metadata.shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
