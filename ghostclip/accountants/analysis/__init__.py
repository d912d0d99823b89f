"""The computations behind the accountants, as functions: Rényi curves, and the Gaussian trade-off."""

from ghostclip.accountants.analysis import gdp, rdp

__all__ = ["gdp", "rdp"]
