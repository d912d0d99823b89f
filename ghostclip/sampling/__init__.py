"""Which records take part in a step, what that means to an accountant, and the keys that randomness follows from.

`PrivateSampler` draws what a scheme (`Poisson`, `FullBatch`, `Shuffled`, `UserPoisson`) says and carries its event;
`DeclaredSampling` states what a user samples.
"""

from ghostclip.sampling.declared import DeclaredSampling
from ghostclip.sampling.keys import RandomKey, WordStream
from ghostclip.sampling.sampler import PoissonSampler, PrivateSampler, UniformWithReplacementSampler
from ghostclip.sampling.schemes import FullBatch, Poisson, SamplingScheme, Shuffled
from ghostclip.sampling.users import UserDataset, UserPoisson

__all__ = [
    "DeclaredSampling",
    "FullBatch",
    "Poisson",
    "PoissonSampler",
    "PrivateSampler",
    "RandomKey",
    "SamplingScheme",
    "Shuffled",
    "UniformWithReplacementSampler",
    "UserDataset",
    "UserPoisson",
    "WordStream",
]
