"""Per-sample gradients that are sums of outer products, linear maps and convolutions, and their cheapest forms.

Shape letters: B samples, S independent slots (convolution groups; 1 otherwise), N = B·S, T positions, I inputs, O
outputs; h = 2·I·O/(I+O). All counts are multiply-adds ×2 (FLOPs), per sample: a symmetric Gram of E entries costs
2·E·(I+O), instantiation 2·T·I·O, the backward's own weight gradient 2·T·I·O. Matrix units of a GPU make FLOPs so cheap
that bytes count beside them, unless a kernel stores nothing that it forms.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from opt_einsum import contract_expression
from torch import Tensor

from ghostclip import kernels
from ghostclip.factors.base import Dense, Factor, SquaredNorm, Terms, no_error, to_accumulation
from ghostclip.kernels import products, runtime
from ghostclip.kernels.bounds import (
    Bounded,
    Product,
    Reduced,
    Unfinished,
    block_norms,
    masses,
    position_norms,
    product_norms,
    sum_of_squares,
)
from ghostclip.kernels.outer import is_fused, summed_by_units, sums_by_kernel, weighting

INSTANTIATE: Final = "instantiate"
SYMMETRIC_GRAM: Final = "symmetric Gram"
PRODUCT_OF_NORMS: Final = "product of two norms"

BYTE: Final = 200
"""FLOPs of matrix units in the time of one byte of memory: 600e12 a second beside 3e12 (H100, what is reached)."""

# A Gram's entries are written by two products, multiplied, and read for two sums, 4 bytes each.
_BYTES_AN_ENTRY: Final = 24
# A gradient is written, and read for its norm.
_BYTES_FORMED: Final = 8


class Outer(Factor):
    """The gradient of sample b, slot s, is ``sum_t g[b,s,t] ⊗ a[b,s,t]``, a matrix (O, I).

    Reference: ghost norm, Li et al. 2022 (arXiv 2110.05679), section 4; book-keeping, Bu et al. 2023 (arXiv
    2210.00038).
    """

    def __init__(self, a_NTI: Tensor, g_NTO: Tensor, *, shape: Sequence[int], slots: int = 1) -> None:
        self.a_NTI = a_NTI
        self.g_NTO = g_NTO
        self.shape = torch.Size(shape)
        self.slots = slots
        self.batch_size = a_NTI.shape[0] // slots

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, I and O."""
        return self.a_NTI.shape[1], self.a_NTI.shape[2], self.g_NTO.shape[2]

    def stores_gradient(self) -> bool:
        """Return whether the per-sample gradient is no larger than the two factors, so that it replaces them."""
        itemsize = min(self.a_NTI.element_size(), self.g_NTO.element_size())
        positions, inputs, outputs = self.sizes
        return self.batch_size > 0 < positions and stores_per_sample(positions, inputs, outputs, itemsize)

    def stores_in_any_batch(self) -> bool:
        """Return whether `stores_gradient` holds for any number of samples."""
        return self.stores_gradient()

    def norm_plan(self) -> tuple[str, int]:
        """Return how the squared norm of one sample and slot is formed, in a few words, and its FLOPs."""
        positions, inputs, outputs = self.sizes
        if positions <= 1:
            return PRODUCT_OF_NORMS, 0
        if not self._prefers_gram():
            return INSTANTIATE, 2 * positions * inputs * outputs
        return SYMMETRIC_GRAM, gram_flops(positions, inputs, outputs, **formed_by(self.a_NTI, self.g_NTO))

    def _prefers_gram(self) -> bool:
        """Return whether a Gram matrix gives the norm cheaper than the formed gradient."""
        return prefers_gram(*self.sizes, **formed_by(self.a_NTI, self.g_NTO))

    def sqnorm(self) -> SquaredNorm:
        """Return squared norms, by the cheaper of a symmetric Gram and instantiation.

        Cost: little more than min(T²·(I+O), 2·T·I·O) per sample.
        """
        if self.a_NTI.shape[0] == 0 or self.a_NTI.shape[1] == 0:
            return no_error(self._per_sample(to_accumulation(self.a_NTI).sum((1, 2))))
        norms = self.block_norms()
        if norms is not None:
            return no_error(sum_of_squares(norms))
        return self.gram_sqnorm() if self._prefers_gram() else self.instantiated_sqnorm()

    def block_norms(self) -> list[Tensor] | None:
        """Return norms of blocks of the gradients."""
        # At one position, products of the norms of input and output gradient.
        if self.a_NTI.shape[0] == 0 or self.a_NTI.shape[1] != 1:
            return None
        return [norm_NK.reshape(self.batch_size, -1) for norm_NK in product_norms([self._product()])]

    def _product(self) -> Product:
        """Return the two norms whose product is the norm, for one position."""
        # One position meets no other: nothing cancels.
        return Product(block_norms(to_accumulation(self.a_NTI.flatten(1))), position_norms(self.g_NTO), self.sizes[1:])

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        """Return the norms of both factors at one position, a Gram's sums or those of the gradients formed at more."""
        if self.slots > 1 or self.a_NTI.shape[0] == 0:
            return None
        if self.a_NTI.shape[1] == 1:
            return self._product()
        return self.gram_sums() if self._prefers_gram() else self.instantiated_sums()

    def gram_sums(self) -> Unfinished | Reduced | None:
        """Return the sums that `gram_sqnorm` is worked out from; None where there is nothing."""
        workspace = runtime.elements(self.a_NTI.device)
        return kernels.gram_sums(self.a_NTI, self.g_NTO, workspace=workspace, also=self.also)

    also: kernels.PositionSum | None = None
    """Sum of one of the two tensors over positions, which a kernel that forms the norm is to leave there."""

    def gram_sqnorm(self) -> SquaredNorm:
        """Return squared norms from ``sum_{s,t} (a_s·a_t)(g_s·g_t)``, upper triangle only, block by block.

        The double sum cancels when positions oppose each other; ``error_B`` bounds what rounding may have hidden.

        Cost: little more than T²·(I+O) per sample, see `ghostclip.kernels.gram_entries`.
        """
        workspace = runtime.elements(self.a_NTI.device)
        return self._summed(kernels.symmetric_gram(self.a_NTI, self.g_NTO, workspace=workspace))

    def instantiated_sqnorm(self) -> SquaredNorm:
        """Return squared norms of the gradients, formed a few samples at a time.

        Cost: 2·T·I·O per sample.
        """
        chunk = chunk_of_samples(self.sizes[1] * self.sizes[2], self.a_NTI.device)
        return self._summed(kernels.outer_square(self.a_NTI, self.g_NTO, samples_at_once=chunk))

    def instantiated_sums(self) -> Unfinished | Reduced | None:
        """Return the sums that `instantiated_sqnorm` is worked out from, in one slot; None where there is nothing."""
        if self.slots > 1 or self.sizes[0] <= 1:
            return None
        chunk = chunk_of_samples(self.sizes[1] * self.sizes[2], self.a_NTI.device)
        return kernels.square_sums(self.a_NTI, self.g_NTO, samples_at_once=chunk)

    def terms(self) -> Terms | None:
        """Return the positions' outer products; None where there is one position, which is added as it is."""
        if self.a_NTI.shape[1] <= 1 or not len(self.a_NTI):
            return None
        term_masses = masses(position_norms(self.a_NTI), position_norms(self.g_NTO), *self.sizes[1:])
        return self._terms(term_masses.mass_N, term_masses.scale_N)

    def _summed(self, bounded: Bounded) -> SquaredNorm:
        """Return the squared norms of samples from those of their slots."""
        value_B, error_B = self._per_sample(bounded.value_N).clamp_(min=0), self._per_sample(bounded.error_N)
        return SquaredNorm(value_B, error_B, self._terms(bounded.mass_N, bounded.scale_N))

    def _by_units(self) -> bool:
        """Return whether matrix units form products of one of the two tensors at least."""
        return products.on_units(self.a_NTI, self.a_NTI) or products.on_units(self.g_NTO, self.g_NTO)

    def _terms(self, mass_N: Tensor, scale_N: Tensor) -> Terms:
        """Return the masses of the positions' terms, by sample."""
        mass_B = mass_N if self.slots == 1 else torch.linalg.vector_norm(mass_N.view(-1, self.slots), dim=1)
        rounds = self._weighting()
        if rounds > 1:
            mass_B = mass_B * rounds
        return Terms(mass_B, self._per_sample(scale_N), self.sizes[0], self._by_units())

    def _weighting(self) -> int:
        """Return how often a term is rounded when it is weighted for the clipped sum, at most."""
        return weighting(self.a_NTI, self.g_NTO) if self.slots == 1 else 1

    def materialize(self) -> Tensor:
        """Return the per-sample gradients, shape ``(B, *P)``. Cost: 2·T·I·O per sample."""
        grad_NOI = products.pair_by_pair(self.g_NTO.mT, self.a_NTI)
        return grad_NOI.reshape(self.batch_size, *self.shape)

    def aligned(self) -> "Outer":
        """Return the factor as matrix units read it, copied once for norm and sum."""
        a_NTI, g_NTO = self.a_NTI, self.g_NTO
        if not products.on_units(a_NTI, g_NTO) or (products.is_taken(a_NTI) and products.is_taken(g_NTO)):
            return self
        return Outer(products.aligned(a_NTI), products.aligned(g_NTO), shape=self.shape, slots=self.slots)

    def instantiated(self) -> Factor:
        """Return the factor of the materialised per-sample gradients, in the order in which they are formed."""
        return Dense(self.materialize())

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add ``sum_b coef_b g_bᵀ a_b`` to ``out`` with one contraction. Cost: 2·B·T·I·O."""
        positions, inputs, outputs = self.sizes
        if self.slots == 1:
            kernels.weighted_sum(self.a_NTI, self.g_NTO, coef_B, out.view(outputs, inputs))
            return
        out_SOI = out.view(self.slots, outputs, inputs)
        if sums_by_kernel(self.a_NTI, self.g_NTO, coef_B, out_SOI, side_by_side=True):
            return
        if summed_by_units(self.a_NTI, self.g_NTO, coef_B, out):
            return
        a_NTI, g_NTO = self.a_NTI.to(out.dtype), self.g_NTO.to(out.dtype)
        lead = (self.batch_size, self.slots, positions)
        factors = (g_NTO.reshape(*lead, outputs), a_NTI.reshape(*lead, inputs))
        out_SOI += contraction("b,bsto,bsti->soi", coef_B, *factors)

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to ``sum_b coef_b g_bᵀ a_b``. Cost: 2·B·T·I·O."""
        if self.slots > 1:
            super().write_clipped_sum_(coef_B, out)
            return
        _, inputs, outputs = self.sizes
        kernels.weighted_sum(self.a_NTI, self.g_NTO, coef_B, out.view(outputs, inputs), fresh=True)

    def _with(self, change: Callable[[Any], Any]) -> "Outer":
        a_NTI, g_NTO = (
            change(x.unflatten(0, (self.batch_size, self.slots))).flatten(0, 1) for x in (self.a_NTI, self.g_NTO)
        )
        return Outer(a_NTI, g_NTO, shape=self.shape, slots=self.slots)

    def transposed(self) -> "Outer":
        """Return the factor of the transposed matrix; only for one slot and a two-dimensional parameter."""
        return Outer(self.g_NTO, self.a_NTI, shape=(self.shape[1], self.shape[0]))

    def reshaped(self, shape: Sequence[int]) -> "Outer":
        return Outer(self.a_NTI, self.g_NTO, shape=shape, slots=self.slots)

    def added_elements(self) -> int:
        return self.g_NTO.numel()

    def _per_sample(self, values_N: Tensor) -> Tensor:
        """Return the sum over a sample's slots."""
        return values_N if self.slots == 1 else values_N.view(-1, self.slots).sum(1)


def stores_per_sample(positions: int, inputs: int, outputs: int, itemsize: int = 4) -> bool:
    """Return whether the per-sample gradient is no larger than the two tensors it replaces, in bytes."""
    # Storing it then costs no memory and saves the second contraction. Never for one position, whose norm is the
    # product of two norms and costs nothing.
    return positions > 1 and max(itemsize, 4) * inputs * outputs <= itemsize * positions * (inputs + outputs)


def formed_by(a_NTI: Tensor, g_NTO: Tensor) -> dict[str, bool]:
    """Return whether matrix units, and fused kernels, form the norms of outer products, as keywords."""
    by_units = products.on_units(a_NTI, g_NTO)
    return {"by_units": by_units, "fused": by_units and kernels.gram.is_fused(a_NTI, g_NTO) and is_fused(a_NTI, g_NTO)}


def prefers_gram(positions: int, inputs: int, outputs: int, *, by_units: bool = False, fused: bool = False) -> bool:
    """Return whether the symmetric Gram norm needs fewer FLOPs than instantiating the gradient."""
    # On matrix units, what entries cost in memory counts as well, unless a fused kernel stores none.
    if fused and positions > 1:
        return kernels.gram.fused_entries(positions) * (inputs + outputs) < positions * inputs * outputs
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
        return 2 * kernels.gram.fused_entries(positions) * (inputs + outputs)
    return 2 * kernels.gram_entries(positions, inputs, outputs, by_units=by_units) * (inputs + outputs)


def block_rows(positions: int, samples: int, device: torch.device) -> int:
    """Return how many rows of an unsymmetric T×T product are formed at a time, as the workspace allows."""
    return max(1, min(positions, runtime.elements(device) // max(1, samples * positions)))


def chunk_of_samples(elements_per_sample: int, device: torch.device) -> int:
    """Return how many samples may be instantiated at a time within the workspace, one at least."""
    return max(1, runtime.elements(device) // max(1, elements_per_sample))


def contraction(subscripts: str, *tensors: Tensor) -> Tensor:
    """Contract tensors as ``einsum`` with an explicit output does, along the cheapest path."""
    expression = _expression(subscripts, tuple(tuple(tensor.shape) for tensor in tensors))
    result: Tensor = expression(*tensors)
    return result


@lru_cache(maxsize=512)
def _expression(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Return a contraction along its cheapest path, cached by shapes."""
    return contract_expression(subscripts, *shapes)
