"""What the examples learn from: images drawn here, and the documentation that Python ships.

Shape suffixes: B samples, H rows, W columns, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# Digits of five columns and seven rows: a byte is a row, its lowest five bits are the pixels.
_GLYPHS = (
    "0e11131519110e",
    "040c040404040e",
    "0e11010204081f",
    "1f02040101110e",
    "02060a121f0202",
    "1f100f0101110e",
    "0608100f11110e",
    "1f010204080808",
    "0e11110e11110e",
    "0e11110f01020c",
)
CLASSES = 10


def _glyphs() -> torch.Tensor:
    rows = [list(bytes.fromhex(glyph)) for glyph in _GLYPHS]
    return (torch.tensor(rows)[:, :, None] >> torch.arange(4, -1, -1) & 1).float()


def digits(samples: int) -> TensorDataset:
    """Draw digits that are shifted, turned, scaled, slanted and noisy.

    Args:
        samples: How many.

    Returns:
        Images `[B, 1, 28, 28]` in [-1, 1] up to the noise, and labels.
    """
    labels_B = torch.randint(CLASSES, (samples,))
    glyphs_BHW = _glyphs()[labels_B][:, None]
    angle_B, slant_B = 0.25 * torch.randn(samples), 0.2 * torch.randn(samples)
    wide_B, high_B = (size * torch.empty(samples).uniform_(0.8, 1.25) for size in (2.2, 1.5))
    shift = 0.2 * torch.randn(2, samples)
    first = torch.stack([wide_B * angle_B.cos(), wide_B * (angle_B.sin() + slant_B), shift[0]], 1)
    second = torch.stack([-high_B * angle_B.sin(), high_B * angle_B.cos(), shift[1]], 1)
    grid = F.affine_grid(torch.stack([first, second], 1), [samples, 1, 28, 28], align_corners=False)
    images = F.grid_sample(glyphs_BHW, grid, align_corners=False)
    return TensorDataset(2 * images - 1 + 0.3 * torch.randn_like(images), labels_B)


def textures(samples: int, size: int = 32) -> TensorDataset:
    """Draw coloured stripes: five directions in two colours, of any phase and width, on a noisy ground.

    Args:
        samples: How many.
        size: Pixels on a side.

    Returns:
        Images `[B, 3, size, size]` and labels of ten classes.
    """
    labels_B = torch.randint(CLASSES, (samples,))
    angle_B = (labels_B % 5) * math.pi / 5 + 0.12 * torch.randn(samples)
    waves_B, phase_B = torch.empty(samples).uniform_(3, 6), torch.empty(samples).uniform_(0, 2 * math.pi)
    line = torch.linspace(-1, 1, size)
    across_BHW = angle_B.cos()[:, None, None] * line + angle_B.sin()[:, None, None] * line[:, None]
    stripes_BHW = torch.sin(math.pi * waves_B[:, None, None] * across_BHW + phase_B[:, None, None])
    colours = torch.tensor([[1.0, 0.6, 0.1], [0.1, 0.5, 1.0]])[labels_B // 5] + 0.3 * torch.randn(samples, 3)
    images = colours[:, :, None, None] * stripes_BHW[:, None]
    return TensorDataset(images + 0.5 * torch.randn_like(images), labels_B)


def paragraphs(*names: str) -> Iterator[tuple[int, str]]:
    """Read the documentation that Python ships, each paragraph once.

    Args:
        *names: Its topics; all by default.

    Yields:
        The number of the topic among the names, and a paragraph.
    """
    from pydoc_data.topics import topics

    seen = set()
    for number, name in enumerate(names or sorted(topics)):
        for text in topics[name].split("\n\n"):
            plain = " ".join(text.split())
            if plain and plain not in seen:
                seen.add(plain)
                yield number, plain
