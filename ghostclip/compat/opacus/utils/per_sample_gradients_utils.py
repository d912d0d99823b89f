"""The check of a layer under Opacus's import path."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.validation.layer_check import (
    STRATEGIES,
    Comparison,
    Report,
    check_per_sample_gradients_are_correct,
    compute_grad_sample,
    compute_microbatch_grad_sample,
    is_batch_empty,
    per_sample_gradient_report,
)

__all__ = [
    "Comparison",
    "Report",
    "check_per_sample_gradients_are_correct",
    "compute_grad_sample",
    "compute_microbatch_grad_sample",
    "compute_opacus_grad_sample",
    "get_grad_sample_modes",
    "is_batch_empty",
    "per_sample_gradient_report",
]

compute_opacus_grad_sample = compute_grad_sample
"""The name under which scripts written for Opacus ask for the engine's own result."""


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:  # noqa: FBT001, FBT002 - Opacus's signature
    """Return the strategies that a check goes through.

    Args:
        use_ew: Of no effect: Opacus's "ew" is the strategy "hooks".

    Returns:
        Their names.
    """
    del use_ew
    return list(STRATEGIES)


__getattr__ = refusing(__name__)
