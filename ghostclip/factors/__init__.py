"""The forms a per-sample gradient takes, and every operation on them, written once.

A rule says which form a parameter's per-sample gradient has and hands over tensors; squared norms, cross terms,
clipped sums and materialised gradients follow from the form alone.
"""

from ghostclip.factors.base import Dense, Diagonal, Factor, SquaredNorm
from ghostclip.factors.convolution import Windows
from ghostclip.factors.head import Head, HeadBias
from ghostclip.factors.inner import inner, joined
from ghostclip.factors.outer import Outer
from ghostclip.factors.rows import Rows
from ghostclip.factors.wrapped import AtIndex, FromSampler, Permuted, Stacked

__all__ = [
    "Dense",
    "Diagonal",
    "Factor",
    "Head",
    "HeadBias",
    "Outer",
    "Permuted",
    "AtIndex",
    "Rows",
    "FromSampler",
    "SquaredNorm",
    "Stacked",
    "Windows",
    "inner",
    "joined",
]
