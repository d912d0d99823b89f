"""The check of a layer under Opacus's import path."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.validation.layer_check import (
    Comparison,
    Report,
    check_per_sample_gradients_are_correct,
    compute_grad_sample,
    compute_microbatch_grad_sample,
    compute_opacus_grad_sample,
    get_grad_sample_modes,
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

__getattr__ = refusing(__name__)
