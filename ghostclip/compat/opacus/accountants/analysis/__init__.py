"""The computations behind the accountants, as functions: Rényi curves, and the Gaussian trade-off."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.accountants.analysis import gdp, rdp

__all__ = ["gdp", "rdp"]

__getattr__ = refusing(__name__)
