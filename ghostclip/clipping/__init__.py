"""From factors to clipped sums: norms, the one clip factor, the strategies and the clipper that users hold."""

from ghostclip.clipper import GhostClipper
from ghostclip.clipping.coefficients import clip_coefficients

__all__ = ["GhostClipper", "clip_coefficients"]
