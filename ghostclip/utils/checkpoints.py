"""Checkpoints of a private training: what `PrivacyEngine.save_checkpoint` writes and `load_checkpoint` checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ghostclip.accounting import Accountant
from ghostclip.errors import ResumeError
from ghostclip.optimizers import DPOptimizer
from ghostclip.utils.sampling_plan import SamplingPlan

MODULE, OPTIMIZER, ACCOUNTANT = "module_state_dict", "optimizer_state_dict", "privacy_accountant_state_dict"
SCHEDULERS = {"noise_multiplier": "noise_scheduler_state_dict", "max_grad_norm": "grad_clip_scheduler_state_dict"}
MECHANISM, NOISE, SAMPLER = "ghostclip_mechanism", "ghostclip_noise", "ghostclip_sampler"

Place = str | os.PathLike[str] | IO[bytes]


def mechanism(optimizer: DPOptimizer, plan: SamplingPlan | None) -> dict[str, Any]:
    """Describe what a step releases, as far as its privacy depends on it.

    Args:
        optimizer: The private optimizer.
        plan: How its batches are sampled, if known.

    Returns:
        Plain values by name.
    """
    described: dict[str, Any] = {
        "noise_multiplier": optimizer.noise_multiplier,
        "max_grad_norm": optimizer.max_grad_norm,
        "expected_batch_size": optimizer.expected_batch_size,
        "loss_reduction": optimizer.loss_reduction,
    }
    if plan is not None:
        described.update(sampling=plan.name, sample_rate=plan.sample_rate)
    return described


def _sampler_of(plan: SamplingPlan | None) -> Any:
    """Return what holds the position in the data, or None where it keeps no state."""
    sampler = None if plan is None else plan.loader.batch_sampler
    return sampler if hasattr(sampler, "state_dict") else None


def training_state(accountant: Accountant, optimizer: DPOptimizer | None, plan: SamplingPlan | None) -> dict[str, Any]:
    """Collect everything but the model that a resumed training needs to be the same training.

    Args:
        accountant: The ledger.
        optimizer: The private optimizer, if it is to be saved.
        plan: How its batches are sampled, if known.

    Returns:
        Plain values and tensors.

    Raises:
        MissingGradientError: In the middle of a logical batch, whose sums no checkpoint holds.
    """
    state: dict[str, Any] = {ACCOUNTANT: dict(accountant.state_dict())}
    if optimizer is not None:
        optimizer.require_released()
        state[OPTIMIZER] = optimizer.state_dict()
        state[NOISE] = optimizer.noise_source.state_dict()
        state[MECHANISM] = mechanism(optimizer, plan)
    sampler = _sampler_of(plan)
    if sampler is not None:
        state[SAMPLER] = sampler.state_dict()
    return state


def refuse_other_mechanism(saved: Mapping[str, Any], current: Mapping[str, Any], *, scheduled: set[str]) -> None:
    """Refuse to continue one ledger with another mechanism.

    Args:
        saved: What the checkpoint says.
        current: What the optimizer does.
        scheduled: Names that a scheduler will restore.

    Raises:
        ResumeError: If they differ.
    """
    names = sorted((saved.keys() & current.keys()) - scheduled)
    different = [
        f"{name}: saved {saved[name]!r}, now {current[name]!r}" for name in names if saved[name] != current[name]
    ]
    if different:
        raise ResumeError(
            f"checkpoint of another mechanism ({'; '.join(different)}). Make the training private with the saved "
            "values, or pass allow_mechanism_change=True to add steps of the new mechanism to the same ledger."
        )


def restore(
    checkpoint: dict[str, Any], accountant: Accountant, optimizer: DPOptimizer | None, plan: SamplingPlan | None
) -> None:
    """Put a saved training state back.

    Args:
        checkpoint: What was loaded.
        accountant: Takes the ledger.
        optimizer: The private optimizer, or None to leave it out.
        plan: How its batches are sampled, if known.

    Raises:
        ResumeError: If the state is incomplete or belongs to something else.
    """
    if ACCOUNTANT not in checkpoint:
        raise ResumeError(f"checkpoint: no {ACCOUNTANT}; it was not written by save_checkpoint().")
    accountant.load_state_dict(checkpoint[ACCOUNTANT])
    sampler = _sampler_of(plan)
    if sampler is not None and SAMPLER in checkpoint:
        sampler.load_state_dict(checkpoint[SAMPLER])
    if optimizer is None:
        return
    if OPTIMIZER not in checkpoint:
        raise ResumeError("checkpoint: it was saved without its optimizer. Pass optimizer=None, or save it too.")
    optimizer.load_state_dict(checkpoint[OPTIMIZER])
    if NOISE in checkpoint:
        optimizer.noise_source.load_state_dict(checkpoint[NOISE])


def continue_schedule(name: str, checkpoint: Mapping[str, Any], optimizer: DPOptimizer | None) -> None:
    """Set what a scheduler had changed to where the saved training had got.

    Args:
        name: What is scheduled: `noise_multiplier` or `max_grad_norm`.
        checkpoint: What was loaded.
        optimizer: The private optimizer, if it is restored.
    """
    saved = checkpoint.get(MECHANISM, {})
    if optimizer is not None and name in saved:
        setattr(optimizer, name, saved[name])


def save(state: dict[str, Any], place: Place, options: Mapping[str, Any]) -> None:
    """Write a checkpoint; a file appears under its name only when it is complete.

    Args:
        state: What to write.
        place: A path or an open binary file.
        options: Further options of `torch.save`.
    """
    if not isinstance(place, (str, os.PathLike)):
        torch.save(state, place, **options)
        return
    path = Path(place)
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(state, unfinished, **options)
    unfinished.replace(path)


def load(place: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint, by default without running any code from it.

    Args:
        place: A path or an open binary file.
        options: Further options of `torch.load`.

    Returns:
        What was written.
    """
    return torch.load(place, **{"weights_only": True, **options})


def load_module(module: nn.Module, checkpoint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Load the model's part.

    Args:
        module: The model, private or not.
        checkpoint: What was loaded.
        options: Further options of `load_state_dict`.

    Raises:
        ResumeError: If there is no such part.
    """
    if MODULE not in checkpoint:
        raise ResumeError(f"checkpoint: no {MODULE}; it was not written by save_checkpoint().")
    module.load_state_dict(checkpoint[MODULE], **options)
