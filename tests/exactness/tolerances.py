"""How close is exact: each tolerance once, by dtype."""

import torch

# Relative error of sums, norms and coefficients against the float64 reference.
RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5}

# A parameter's error is measured against its own clipped sum, or this share of the whole sum where that is larger:
# the true gradient of a bias before a normalisation, or of an attention key's bias, is zero, and what float32 leaves
# there is rounding of the size of the other parameters (up to 2.8e-8 of the whole, by plain autograd).
PARAMETER_FLOOR = 1e-2

# By how much one sample's contribution may exceed C, relative. In float32 the sums with and without the sample
# are subtracted, which leaves the rounding of the others. In bfloat16 the gradients themselves are rounded to
# 8 bits, differently for another batch size, so that only a sample on its own is held to a tight bound.
SENSITIVITY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-3}
SENSITIVITY_OF_DIFFERENCE = {**SENSITIVITY, torch.bfloat16: 2e-2}
