"""Every engine that makes whole training steps."""

from __future__ import annotations

from functools import partial
from operator import methodcaller

from torch import nn

from benchmarks.engines import STRATEGIES, Engine, trainable
from benchmarks.tasks import per_sample_losses
from paper_repro.peers import peers
from paper_repro.trainer import Trainer, mean_loss, sgd


def _plain(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool) -> Trainer:
    del max_grad_norm, sigma  # nothing is clipped or noised
    return Trainer(model, trainable(model), partial(mean_loss, model), methodcaller("backward"), sgd(model).step, keep)


def _ghostclip(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool, strategy: str) -> Trainer:
    import ghostclip
    from ghostclip.noise import make_noise_source
    from ghostclip.optim import DPOptimizer

    clipper = ghostclip.GhostClipper(model, max_grad_norm=max_grad_norm, strategy=strategy)
    optimizer = DPOptimizer(
        sgd(model), noise_multiplier=sigma, expected_batch_size=1, clipper=clipper, noise_source=make_noise_source()
    )
    loss = partial(per_sample_losses, model)
    return Trainer(model, trainable(model), loss, clipper.backward, optimizer.step, keep, proving_steps=4)


def trainers(*, sigma: float, keep: bool = False, every: bool = False) -> list[Engine]:
    """Every engine, making whole training steps.

    Args:
        sigma: Noise multiplier; 0 to see the clipped sums.
        keep: Whether gradients stay after a step.
        every: Whether Opacus's modes functorch and ew, and `torch.func`, are wanted as well.

    Returns:
        The non-private one first; Opacus only where it is installed.
    """
    options = {"sigma": sigma, "keep": keep}
    found = [Engine("nonprivate", "PyTorch, not private", False, partial(_plain, **options))]
    found += [
        Engine(name, f"ghostclip {name}", True, partial(_ghostclip, strategy=name, **options)) for name in STRATEGIES
    ]
    return found + peers(every=every, sigma=sigma, keep=keep)
