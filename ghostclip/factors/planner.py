"""The cost model: how an ``Outer`` norm is computed and what is kept until the clipped sum.

Per sample, T positions, I inputs, O outputs, h = 2·I·O/(I+O). All counts are multiply-adds ×2 (FLOPs):
a symmetric Gram in n blocks costs (1 + 1/n)·T²·(I+O), instantiation 2·T·I·O, the backward's own weight gradient
2·T·I·O.
"""

from math import ceil
from typing import Final

# More blocks waste less of the lower triangle (loss 1/n) but make thinner products.
GRAM_BLOCKS: Final = 8
MIN_GRAM_ROWS: Final = 32
# Elements of the largest temporary a norm may allocate (float32: 64 MiB).
WORKSPACE_ELEMENTS: Final = 1 << 24


def keeps_per_sample(positions: int, inputs: int, outputs: int) -> bool:
    """Return whether the per-sample gradient is no larger than the two tensors it replaces.

    Args:
        positions: T.
        inputs: I.
        outputs: O.

    Returns:
        True when I·O <= T·(I+O): keeping it then costs no memory and saves the second contraction.
    """
    return inputs * outputs <= positions * (inputs + outputs)


def prefers_gram(positions: int, inputs: int, outputs: int) -> bool:
    """Return whether the symmetric Gram norm needs fewer FLOPs than instantiating the gradient.

    Args:
        positions: T.
        inputs: I.
        outputs: O.

    Returns:
        True when (1 + 1/n)·T·(I+O) < 2·I·O.
    """
    if positions == 1:
        return True
    blocks = ceil(positions / gram_rows(positions, 1))
    return (1 + 1 / blocks) * positions * (inputs + outputs) < 2 * inputs * outputs


def gram_rows(positions: int, samples: int) -> int:
    """Return how many rows of the Gram matrix are formed at a time.

    Args:
        positions: T.
        samples: Samples handled together.

    Returns:
        Rows per block: about T/8, at least 32, at most what the workspace holds.
    """
    wanted = max(MIN_GRAM_ROWS, ceil(positions / GRAM_BLOCKS))
    fits = max(1, WORKSPACE_ELEMENTS // max(1, samples * positions))
    return min(positions, wanted, fits)


def chunk_of_samples(elements_per_sample: int) -> int:
    """Return how many samples may be instantiated at a time within the workspace."""
    return max(1, WORKSPACE_ELEMENTS // max(1, elements_per_sample))
