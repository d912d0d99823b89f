"""From the norms of one backward to what is released of every sample, and what may be asked about it afterwards.

Shape letters: B samples, G clip groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.clipping.bounds import Grouping
from ghostclip.clipping.joint import Joint
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.policies import ClipPolicy, Layout, finite_samples, relation_factor
from ghostclip.clipping.store import GradientStore
from ghostclip.factors import Factor


@dataclass(frozen=True)
class ClipWeights:
    """Coefficients of the samples in the clipped sum, and how they are applied."""

    coef_GB: Sequence[Tensor]  # coefficients of every clip group, including the scale of the loss
    group_of: Mapping[str, int] = field(default_factory=dict)
    keep_B: Tensor | None = None  # True for finite samples; None when all are. The others are masked out (0·NaN is NaN)
    # samples whose gradients nearly cancel; None when there are none. Their contributions are formed in float64, over
    # all uses of a parameter, before they are added, so that what is added has the norm that was computed for it, and
    # what is huge and cancels meets no other sample's contribution
    ill_conditioned_B: Tensor | None = None
    # Coefficients by group, device and dtype.
    _converted: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)
    _apart: dict[str, Tensor] = field(default_factory=dict, repr=False)  # float64 sums of ill-conditioned samples

    def _coefficients(self, group: int, buffer: Tensor) -> Tensor:
        """Return a group's coefficients in a buffer's dtype and on its device, converted once for all parameters."""
        key = group, buffer.device, buffer.dtype
        if key not in self._converted:
            coef_B = self.coef_GB[group]
            if self.ill_conditioned_B is not None:
                coef_B = coef_B.masked_fill(self.ill_conditioned_B.to(coef_B.device), 0.0)
            self._converted[key] = coef_B.to(device=buffer.device, dtype=buffer.dtype)
        return self._converted[key]

    def into(self, sums: GradientStore, factor: Factor, name: str, *, more: bool = False) -> None:
        """Add a factor's clipped sum to the parameter's accumulator."""
        # ``more``: other uses may follow, with which this one may cancel.
        buffer, is_new = sums.buffer(name)
        included = factor if self.keep_B is None else factor.masked(self.keep_B)
        group = self.group_of.get(name, 0)
        # Terms of those that are formed in float64 may be beyond the type of the sum, and 0 times that is no number.
        here = included if self.ill_conditioned_B is None else included.masked(~self.ill_conditioned_B)
        add = here.write_clipped_sum_ if is_new else here.add_clipped_sum_
        add(self._coefficients(group, buffer), buffer)
        if self.ill_conditioned_B is None:
            return
        double_sum = self._apart.get(name)
        if double_sum is None:
            double_sum = self._apart[name] = torch.zeros_like(buffer, dtype=torch.float64)
        index_D = self.ill_conditioned_B.nonzero().squeeze(1)
        coef_D = self.coef_GB[group].index_select(0, index_D.to(self.coef_GB[group].device))
        included.selected(index_D).in_double().add_clipped_sum_(coef_D.to(buffer.device).double(), double_sum)
        if not more:
            self._add_waiting(sums, name)

    def into_several(self, sums: GradientStore, joint: Joint) -> None:
        """Add the clipped sums of several parameters of the first group; no sample is ill-conditioned."""
        included = joint if self.keep_B is None else joint.masked(self.keep_B)
        sums.add_several(included.names, included.clipped_sums(self._coefficients(0, included.like)))

    def finish(self, sums: GradientStore) -> None:
        """Add the float64 sums that waited for all uses of a parameter."""
        for name in list(self._apart):
            self._add_waiting(sums, name)

    def _add_waiting(self, sums: GradientStore, name: str) -> None:
        """Add a parameter's float64 sum of ill-conditioned samples to its accumulator."""
        buffer, _ = sums.buffer(name)
        buffer += self._apart.pop(name)


class Sequences(Protocol):
    """Ranks that each have some positions of every sample, and deal out the samples of a batch among them."""

    @property
    def shares(self) -> Any:
        """How the ranks share each batch: a `ghostclip.distributed.sample_ranks.Shares`."""

    def rows(self, batch_size: int) -> int:
        """Return how many of a batch's samples are this rank's."""

    def common_numbers(self, what: str) -> Random:
        """Return a generator that draws the same on all of them; called on all of them."""

    def begin(self, forward: ForwardContext) -> None:
        """Check that all ranks begin a backward through the same layers."""

    def gather(self, factor: Factor) -> Factor:
        """Return the whole gradients of this rank's samples, from parts of the gradients of all samples."""


class Decisions:
    """Applies a clip policy to the norms of each backward, and records what the noise must cover.

    Privacy:
        `norm_GB`, `coef_GB` and the counts of non-finite samples are exact: diagnostics, not private quantities.
        Nothing here raises, warns or logs because of a sample's values.
    """

    # `sequences`: ranks that split sequences; of the samples' places that they deal out, the last may stand for none.
    def __init__(self, policy: ClipPolicy, relation: str, sequences: Sequences | None = None) -> None:
        """Hold the policy and the neighbouring relation; no backward has run yet."""
        relation_factor(relation)
        self._sequences = sequences
        self.policy = policy
        self.relation = relation
        self.norm_GB: list[Tensor] | None = None  # of the last backward; None before the first
        self.coef_GB: list[Tensor] | None = None  # coefficients of the last backward, without the loss's scale
        self.non_finite = 0  # samples of the last backward with a NaN or infinite gradient
        self.non_finite_total = 0  # the same over all backwards
        self.layout = Layout({}, (), ())  # clip groups of the latest backward
        self.plain = False  # whether sums without any bound are autograd's own gradients
        self.device: torch.device | None = None  # where norms lie when no gradient has arrived
        # Of each backward since `forget`: sensitivity, number of samples, note on its inputs.
        self._sensitivities: list[float] = []
        self._rows: list[int] = []
        self._noted: list[Any] = []
        self._opened: tuple[list[str], ClipPolicy, Grouping, float] | None = None  # what `layout` was made for

    def open(self, names: list[str]) -> Layout:
        """Return the clip groups for a backward over these trainable parameters, cached."""
        key = (names, self.policy, self.policy.grouping, self.policy.max_grad_norm)
        if key != self._opened:
            self.layout = self.policy.layout(names)
            self._opened = key
        return self.layout

    def weights(
        self,
        total: GroupNorms,
        forward: ForwardContext,
        scale: float,
        ill_conditioned_B: Tensor | None,
        *,
        rows: int | None = None,
    ) -> ClipWeights:
        """Compute and record norms and clip factors (min(1, C/norm), say); return the weights in the sum."""
        # `total` has norms of gradients that are `scale` times too small. `rows`: number of samples, the first ones,
        # that have norms; the rows after them add nothing.
        norm_GB = _scaled(total.norm_GB(forward.batch_size, self.device), scale)
        layout = self.layout
        largest = None if total.largest is None else total.largest * scale
        coef_GB = self.policy.coefficients(norm_GB, layout.bounds, largest=largest)
        if forward.is_dummy:
            self.norm_GB = [norm_B[:0] for norm_B in norm_GB]
            self.coef_GB = [coef_B[:0] for coef_B in coef_GB]
            self.non_finite = 0
            nothing = [torch.zeros_like(coef_B) for coef_B in coef_GB]
            return ClipWeights(nothing, layout.group_of, torch.zeros_like(norm_GB[0], dtype=torch.bool))
        self.norm_GB, self.coef_GB = norm_GB, coef_GB
        keep_B = self._finite_B(total, forward)
        shown = 1.0 if self.plain and all(map(math.isinf, layout.bounds)) else scale
        coef_GB = _scaled(coef_GB, shown)
        empty = 0 if rows is None else forward.batch_size - rows
        if empty:
            kept_B = finite_samples(norm_GB) if keep_B is None else keep_B
            keep_B = functional.pad(kept_B, (0, empty))
            coef_GB = [functional.pad(coef_B, (0, empty)) for coef_B in coef_GB]
        return ClipWeights(coef_GB, layout.group_of, keep_B, ill_conditioned_B)

    def adopt(self, norm_GB: list[Tensor], coef_GB: list[Tensor]) -> None:
        """Set norms and coefficients that were computed elsewhere by the same policy."""
        self.norm_GB, self.coef_GB, self.non_finite = norm_GB, coef_GB, 0

    def _finite_B(self, total: GroupNorms, forward: ForwardContext) -> Tensor | None:
        """Count the samples that are not finite and return which are; None when all are."""
        assert self.norm_GB is not None
        adaptation = self.policy.adaptation
        self.non_finite = 0
        if total.finite and adaptation is None:
            return None
        finite_B = finite_samples(self.norm_GB)
        if adaptation is not None:
            count = len(finite_B) if self._sequences is None else self._sequences.rows(forward.batch_size)
            adaptation.observe([norm_B[:count] for norm_B in self.norm_GB], self.layout.bounds, finite_B[:count])
        if not total.finite:
            self.non_finite = finite_B.numel() - int(torch.count_nonzero(finite_B))
            self.non_finite_total += self.non_finite
        return finite_B if self.non_finite else None

    def close(self, rows: int, noted: Any) -> None:
        """Record a completed backward: its sensitivity and number of samples."""
        # `noted`: the note on the inputs behind it, None without one.
        self._sensitivities.append(self.policy.sensitivity(self.relation))
        self._rows.append(rows)
        self._noted.append(noted)

    def sensitivity(self) -> float:
        """Return the largest sensitivity of any backward since `forget`; before the first, the one in force."""
        return max(self._sensitivities) if self._sensitivities else self.policy.sensitivity(self.relation)

    @property
    def passes(self) -> int:
        """Backwards completed since `forget`."""
        return len(self._sensitivities)

    @property
    def rows(self) -> tuple[int, ...]:
        """Samples of each backward completed since `forget`, in order."""
        return tuple(self._rows)

    @property
    def noted(self) -> tuple[Any, ...]:
        """The note on the inputs of each backward since `forget`, in order, those of its parts separate, or None."""
        return tuple(self._noted)

    def merge_passes(self, since: int) -> None:
        """Count several backwards over disjoint parts of one batch, all from number ``since`` on, as one."""
        merged = self._sensitivities[since:]
        if merged:
            self._sensitivities[since:] = [max(merged)]
            self._rows[since:] = [sum(self._rows[since:])]

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present state."""
        sensitivities, rows = list(self._sensitivities), list(self._rows)
        total, noted = self.non_finite_total, list(self._noted)
        adaptation = self.policy.adaptation
        count = None if adaptation is None else adaptation.shifted_count

        def restore() -> None:
            self._sensitivities, self._rows, self._noted = list(sensitivities), list(rows), list(noted)
            self.non_finite_total = total
            if adaptation is not None:
                adaptation.shifted_count = count

        return restore

    def forget(self) -> None:
        """Forget the backwards so far: their sums were released or dropped."""
        self._sensitivities.clear()
        self._rows.clear()
        self._noted.clear()
        if self.policy.adaptation is not None:
            self.policy.adaptation.shifted_count = None

    def whole_norms(self) -> Tensor:
        """Return the norm of each sample's whole gradient, shape ``(B,)``."""
        assert self.norm_GB is not None, "asked only after a backward"
        if len(self.norm_GB) == 1:
            return self.norm_GB[0]
        return torch.linalg.vector_norm(columns(self.norm_GB), dim=1)


def _scaled(parts_GB: list[Tensor], scale: float) -> list[Tensor]:
    """Return tensors times a number."""
    return parts_GB if scale == 1 else _torch.scaled_all(parts_GB, scale)


def columns(parts_GB: list[Tensor]) -> Tensor:
    """Return tensors ``(B,)`` stacked to ``(B, G)``, on the first one's device."""
    return torch.stack([part_B.to(parts_GB[0].device) for part_B in parts_GB], dim=1)
