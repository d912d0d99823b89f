"""Training on several ranks under Opacus's import path."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.distributed import DifferentiallyPrivateDistributedDataParallel

__all__ = ["DifferentiallyPrivateDistributedDataParallel"]

__getattr__ = refusing(__name__)
