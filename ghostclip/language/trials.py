"""Trials of a model on a few made-up or given inputs, which leave no trace in it or in the random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from ghostclip.evidence.module_state import restored


@contextmanager
def own_randomness(seed: int | None = None) -> Iterator[None]:
    """Restore the global random generators afterwards; inside they start at the seed, if there is one."""
    before = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            # Not `torch.manual_seed`, which notes where it was called from for devices that are not in use.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the random generators, and what a model's forward writes."""
    with own_randomness(), restored(model):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients, and restore the random generators."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with without_trace(model), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
