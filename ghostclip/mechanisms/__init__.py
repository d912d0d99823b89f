"""Mechanisms: sampling, noise and their cost as one object; a comparison of them for a budget; averages of iterates.

`PoissonSampling` is DP-SGD as usual. `BallsInBins` shows each record exactly once in each epoch, for less noise at the
same ε. `BandedInverse` lets each step take back noise of the steps before, at no memory. `BandedMatrixFactorization`
does so beside sampling, and `BufferedToeplitz` over all steps of long trainings, with buffers. `plan_privacy` compares.
"""

from ghostclip.mechanisms.averages import AveragedWeights
from ghostclip.mechanisms.mechanism import (
    BallsInBins,
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    CyclicPoissonSampling,
    Mechanism,
    PoissonSampling,
    UnamplifiedSampling,
)
from ghostclip.mechanisms.plan import CalibratedMechanism, plan_privacy

__all__ = [
    "AveragedWeights",
    "BallsInBins",
    "BandedInverse",
    "BandedMatrixFactorization",
    "BufferedToeplitz",
    "CalibratedMechanism",
    "CyclicPoissonSampling",
    "Mechanism",
    "PoissonSampling",
    "UnamplifiedSampling",
    "plan_privacy",
]
