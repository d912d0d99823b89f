"""What is computed how: contractions along their cheapest path, the form of an ``Outer`` norm, what is kept for a sum.

Per sample, T positions, I inputs, O outputs, h = 2·I·O/(I+O). All counts are multiply-adds ×2 (FLOPs):
a symmetric Gram of E entries costs 2·E·(I+O), instantiation 2·T·I·O, the backward's own weight gradient 2·T·I·O.
Matrix units of a GPU make FLOPs so cheap that bytes count beside them, unless a kernel stores nothing that it forms.
"""

from functools import lru_cache
from typing import Any, Final

import torch
from opt_einsum import contract_expression
from torch import Tensor

from ghostclip import kernels
from ghostclip.kernels import gram, outer, products, runtime


def contraction(subscripts: str, *tensors: Tensor) -> Tensor:
    """Contract tensors as ``einsum`` with an explicit output does, along the cheapest path."""
    expression = _expression(subscripts, tuple(tuple(tensor.shape) for tensor in tensors))
    result: Tensor = expression(*tensors)
    return result


@lru_cache(maxsize=512)
def _expression(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Return a contraction along its cheapest path, cached by shapes."""
    return contract_expression(subscripts, *shapes)


# Elements of the largest temporary a norm may allocate on a CPU (float32: 16 MiB).
WORKSPACE_ELEMENTS: Final = kernels.WORKSPACE

BYTE: Final = 200
"""FLOPs of matrix units in the time of one byte of memory: 600e12 a second beside 3e12 (H100, what is reached)."""

# A Gram's entries are written by two products, multiplied, and read for two sums, 4 bytes each.
_BYTES_AN_ENTRY: Final = 24
# A gradient is written, and read for its norm.
_BYTES_FORMED: Final = 8


def workspace(device: torch.device) -> int:
    """Return how many elements the largest temporary of a norm may have on a device."""
    return runtime.elements(device) if device.type == "cuda" else WORKSPACE_ELEMENTS


def stores_per_sample(positions: int, inputs: int, outputs: int, itemsize: int = 4) -> bool:
    """Return whether the per-sample gradient is no larger than the two tensors it replaces, in bytes."""
    # Storing it then costs no memory and saves the second contraction. Never for one position, whose norm is the
    # product of two norms and costs nothing.
    return positions > 1 and max(itemsize, 4) * inputs * outputs <= itemsize * positions * (inputs + outputs)


def formed_by(a_NTI: Tensor, g_NTO: Tensor) -> dict[str, bool]:
    """Return whether matrix units, and fused kernels, form the norms of outer products, as keywords for this module."""
    by_units = products.on_units(a_NTI, g_NTO)
    return {"by_units": by_units, "fused": by_units and gram.is_fused(a_NTI, g_NTO) and outer.is_fused(a_NTI, g_NTO)}


def prefers_gram(positions: int, inputs: int, outputs: int, *, by_units: bool = False, fused: bool = False) -> bool:
    """Return whether the symmetric Gram norm needs fewer FLOPs than instantiating the gradient."""
    # On matrix units, what entries cost in memory counts as well, unless a fused kernel stores none.
    if fused and positions > 1:
        return gram.fused_entries(positions) * (inputs + outputs) < positions * inputs * outputs
    if by_units and positions > 1:
        entries = kernels.gram_entries(positions, inputs, outputs, by_units=True)
        cost = entries * (2 * (inputs + outputs) + _BYTES_AN_ENTRY * BYTE)
        return cost < inputs * outputs * (2 * positions + _BYTES_FORMED * BYTE)
    return (
        positions == 1
        or kernels.gram_entries(positions, inputs, outputs) * (inputs + outputs) < positions * inputs * outputs
    )


def gram_flops(positions: int, inputs: int, outputs: int, *, by_units: bool = False, fused: bool = False) -> int:
    """Return the FLOPs of one sample's symmetric Gram; none for one position."""
    if positions <= 1:
        return 0
    if fused:
        return 2 * gram.fused_entries(positions) * (inputs + outputs)
    return 2 * kernels.gram_entries(positions, inputs, outputs, by_units=by_units) * (inputs + outputs)


def block_rows(positions: int, samples: int, device: torch.device) -> int:
    """Return how many rows of an unsymmetric T×T product are formed at a time, as the workspace allows."""
    return max(1, min(positions, workspace(device) // max(1, samples * positions)))


def chunk_of_samples(elements_per_sample: int, device: torch.device) -> int:
    """Return how many samples may be instantiated at a time within the workspace, one at least."""
    return max(1, workspace(device) // max(1, elements_per_sample))
