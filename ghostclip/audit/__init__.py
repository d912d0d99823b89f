"""Auditing: what an attack's scores prove about ε, so that a claimed guarantee can be tested instead of believed.

An audit gives a *lower* bound. One above the claim contradicts it; one below only says that this attack failed.
`audit_scores` is the way in: scores of canaries that were included or left out by coin, in one training
(`CanaryRecorder`, `GradientCanaries`) or in many, go in, and a `Finding` comes out.
"""

from ghostclip.audit.canaries import CanaryDataset, GradientCanaries, flip_coins, mislabelled
from ghostclip.audit.methods import CanaryRecorder, Finding, Scores, audit_scores, load_scores

__all__ = [
    "CanaryDataset",
    "CanaryRecorder",
    "Finding",
    "GradientCanaries",
    "Scores",
    "audit_scores",
    "flip_coins",
    "load_scores",
    "mislabelled",
]
