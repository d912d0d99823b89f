"""The cost model: how an ``Outer`` norm is computed and what is kept until the clipped sum.

Per sample, T positions, I inputs, O outputs, h = 2·I·O/(I+O). All counts are multiply-adds ×2 (FLOPs):
a symmetric Gram of E entries costs 2·E·(I+O), instantiation 2·T·I·O, the backward's own weight gradient 2·T·I·O.
"""

from typing import Final

from ghostclip import kernels

# Elements of the largest temporary a norm may allocate (float32: 16 MiB).
WORKSPACE_ELEMENTS: Final = kernels.WORKSPACE


def keeps_per_sample(positions: int, inputs: int, outputs: int) -> bool:
    """Return whether the per-sample gradient is no larger than the two tensors it replaces.

    Args:
        positions: T.
        inputs: I.
        outputs: O.

    Returns:
        True when I·O <= T·(I+O): keeping it then costs no memory and saves the second contraction. Never for one
        position, whose norm is the product of two norms and costs nothing.
    """
    return positions > 1 and inputs * outputs <= positions * (inputs + outputs)


def prefers_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Return whether the symmetric Gram norm needs fewer FLOPs than instantiating the gradient.

    Args:
        positions: T.
        inputs: I.
        outputs: O.

    Returns:
        True when the Gram's entries · (I+O) < T·I·O.
    """
    return (
        positions == 1
        or kernels.gram_entries(positions, inputs + outputs) * (inputs + outputs) < positions * inputs * outputs
    )


def gram_flops(positions: int, inputs: int, outputs: int) -> int:
    """Return what the symmetric Gram of one sample costs.

    Args:
        positions: T.
        inputs: I.
        outputs: O.

    Returns:
        FLOPs of its products; none for one position.
    """
    return 0 if positions <= 1 else 2 * kernels.gram_entries(positions, inputs + outputs) * (inputs + outputs)


def block_rows(positions: int, samples: int) -> int:
    """Return how many rows of a T×T product are formed at a time where it is not symmetric.

    Args:
        positions: T, of both sides.
        samples: Samples handled together.

    Returns:
        As many as the workspace holds, one at least.
    """
    return max(1, min(positions, WORKSPACE_ELEMENTS // max(1, samples * positions)))


def chunk_of_samples(elements_per_sample: int) -> int:
    """Return how many samples may be instantiated at a time within the workspace."""
    return max(1, WORKSPACE_ELEMENTS // max(1, elements_per_sample))
