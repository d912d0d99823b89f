"""The command line that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def options_of(  # noqa: PLR0913 - one default for each option
    name: str,
    description: str | None,
    given: Sequence[str] | None,
    *,
    samples: int,
    epochs: int,
    batch_size: int,
    lr: float,
    noise_multiplier: float | None,
    max_grad_norm: float = 1.0,
) -> argparse.Namespace:
    """Read an example's command line, and seed what is not private: data, initial weights.

    Args:
        name: Of the example.
        description: What it trains.
        given: The arguments; the process's own by default.
        samples: Training records by default.
        epochs: Passes by default.
        batch_size: Expected records of a batch by default.
        lr: Learning rate by default.
        noise_multiplier: σ by default; None for an example that is given ε instead.
        max_grad_norm: C by default.

    Returns:
        The options.
    """
    summary = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m paper_repro.examples.{name}", description=summary)
    parser.add_argument("--samples", type=_count, default=samples, help="training records (default: %(default)s)")
    parser.add_argument("--epochs", type=_count, default=epochs, help="passes (default: %(default)s)")
    parser.add_argument("--batch-size", type=_count, default=batch_size, help="expected batch (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="learning rate (default: %(default)s)")
    if noise_multiplier is None:
        parser.add_argument("--epsilon", type=float, default=8.0, help="ε to spend (default: %(default)s)")
    else:
        parser.add_argument("--sigma", type=float, default=noise_multiplier, help="noise (default: %(default)s)")
    parser.add_argument("-c", "--max-grad-norm", type=float, default=max_grad_norm, help="C (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=1e-5, help="δ (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of data and weights, not of noise (default: %(default)s)")
    options = parser.parse_args(given)
    torch.manual_seed(options.seed)
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the share of records that a model classifies rightly.

    Args:
        model: Is left in evaluation mode.
        loader: Yields inputs and labels.

    Returns:
        The share.
    """
    model.eval()
    right = [model(inputs).argmax(-1) == labels for inputs, labels in loader]
    return torch.cat(right).float().mean().item()
