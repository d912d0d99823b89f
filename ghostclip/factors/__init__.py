"""The forms a per-sample gradient takes, and every operation on them, written once.

A rule says which form a parameter's per-sample gradient has and hands over tensors; squared norms, cross terms,
clipped sums and materialised gradients follow from the form alone.
"""

from ghostclip.factors.base import Factor, SquaredNorm, accumulation_dtype
from ghostclip.factors.dense import Dense, Diagonal
from ghostclip.factors.head import Head, HeadBias
from ghostclip.factors.inner import inner
from ghostclip.factors.joined import joined
from ghostclip.factors.outer import Outer
from ghostclip.factors.permuted import Permuted
from ghostclip.factors.placed import Placed
from ghostclip.factors.rows import Rows
from ghostclip.factors.sampled import Sampled
from ghostclip.factors.stacked import Stacked
from ghostclip.factors.windows import Windows

__all__ = [
    "Dense",
    "Diagonal",
    "Factor",
    "Head",
    "HeadBias",
    "Outer",
    "Permuted",
    "Placed",
    "Rows",
    "Sampled",
    "SquaredNorm",
    "Stacked",
    "Windows",
    "accumulation_dtype",
    "inner",
    "joined",
]
