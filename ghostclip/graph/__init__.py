"""The private step as one compiled graph: traced, every sum over samples replaced by its factors, compiled again."""

from ghostclip.graph.compiled import GraphOptions
from ghostclip.graph.step import GraphStep
from ghostclip.graph.trace import NoGraphError

__all__ = ["GraphOptions", "GraphStep", "NoGraphError"]
