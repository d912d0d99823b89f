"""Training on several ranks in two passes under Opacus's import path; nothing differs."""

from ghostclip.compat.opacus.optimizers.variants import (
    DistributedDPOptimizer as DistributedDPOptimizerFastGradientClipping,
)

__all__ = ["DistributedDPOptimizerFastGradientClipping"]
