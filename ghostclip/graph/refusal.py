"""`NoGraphError`: why a step is computed eagerly and not as one graph."""

from ghostclip.errors import UnsupportedModelError


class NoGraphError(UnsupportedModelError):
    """A step cannot be traced into one graph whose per-sample gradients are known to be exact."""
