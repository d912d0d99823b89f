"""Exact values of the samples of the last backward, for whoever debugs a training.

Shape letters: B samples, G clip groups.
"""

from torch import Tensor

from ghostclip.clipping.decisions import Decisions, columns
from ghostclip.errors import GhostClipError


class Diagnostics:
    """The part of a clipper that tells what it decided.

    Privacy:
        Nothing here is private: none of it may be published, or steer what is.
    """

    _decisions: Decisions

    @property
    def per_sample_norms(self) -> Tensor:
        """Norm of every sample's whole gradient in the last backward, shape ``(B,)``, rounded up. Not private."""
        if self._decisions.norm_GB is None:
            raise GhostClipError("per_sample_norms: no backward has been run yet.")
        return self._decisions.whole_norms().clone()

    @property
    def group_norms(self) -> Tensor:
        """Norm of every sample's gradient in each clip group, shape ``(B, G)``, rounded up. Not private."""
        if self._decisions.norm_GB is None:
            raise GhostClipError("group_norms: no backward has been run yet.")
        return columns(self._decisions.norm_GB)

    @property
    def clip_coefficients(self) -> Tensor:
        """Clip coefficients of the last backward, ``(B,)``, or ``(B, G)`` with several clip groups. Not private."""
        if self._decisions.coef_GB is None:
            raise GhostClipError("clip_coefficients: no backward has been run yet.")
        coef_GB = self._decisions.coef_GB
        return coef_GB[0].clone() if len(coef_GB) == 1 else columns(coef_GB)

    @property
    def non_finite_samples(self) -> int:
        """Number of samples of the last backward with a NaN or infinite gradient, which added nothing. Not private."""
        return self._decisions.non_finite

    @property
    def non_finite_total(self) -> int:
        """The same over all backwards since the clipper was attached. Not private."""
        return self._decisions.non_finite_total

    @property
    def batch_size(self) -> int:
        """Samples in the last backward."""
        return 0 if self._decisions.norm_GB is None else self._decisions.norm_GB[0].numel()

    def leave_plain_gradients(self) -> None:
        """Leave in ``p.grad`` what autograd would, as long as there is neither a bound nor an optimizer."""
        self._decisions.plain = True
