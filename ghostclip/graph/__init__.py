"""The private step as one compiled graph: traced, every sum over samples replaced by its factors, compiled again."""

from ghostclip.graph.options import GraphOptions
from ghostclip.graph.refusal import NoGraphError
from ghostclip.graph.step import GraphStep

__all__ = ["GraphOptions", "GraphStep", "NoGraphError"]
