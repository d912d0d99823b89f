"""Runs a clipper on an architecture: how far from one sample at a time, and how far one sample moves the sum.

Shape suffix: B samples.
"""

from dataclasses import dataclass

import torch

from tests.architectures.table import SAMPLES
from tests.cases import Case
from tests.exactness.runs import backward, engine, relative_error
from tests.reference import Reference, batch_size, clip_and_sum, per_sample_gradients, take, whole_norm


@dataclass(frozen=True)
class Measured:
    """What one strategy did on one architecture, in float64.

    Attributes:
        error: Relative error of the whole clipped sum.
        norm_error: Largest relative error of the samples' norms.
        moved: Largest distance between the sums with and without one sample, over C; 0 for a model of random masks.
        coverage: The clipper's table after its last backward.
    """

    error: float
    norm_error: float
    moved: float
    coverage: object


def reference(case: Case) -> Reference:
    """Compute the case's float64 reference, one sample at a time."""
    model, batch = case.reference_model(), case.data(torch.float64)
    with case.numerics(torch.float64):
        return clip_and_sum(per_sample_gradients(model, batch, case.losses, axes=case.axes, mode=case.reference))


def none() -> Reference:
    """Stand in for the reference of a case that is refused, and may run on no sample alone."""
    return Reference([], torch.ones(SAMPLES), torch.ones(SAMPLES), {}, 1.0)


def measure(case: Case, strategy: str, want: Reference) -> Measured:
    """Run one clipper on the whole batch, then on the batch without each sample in turn.

    Args:
        case: The architecture.
        strategy: The clipper's.
        want: The case's reference.

    Returns:
        What it did.
    """
    model, batch = case.model(torch.float64), case.data(torch.float64)
    clipper = engine(strategy, batch_first=case.batch_first)(model, want.max_grad_norm)
    whole = backward(case, model, clipper, batch, torch.float64)
    moved = []
    # Masks drawn for another batch size are other masks, so that leaving a sample out changes the others' gradients.
    for sample in range(0 if "random" in case.tags else batch_size(batch, case.axes)):
        model.zero_grad(set_to_none=True)
        others = [index for index in range(len(want.norms_B)) if index != sample]
        rest = backward(case, model, clipper, take(batch, others, case.axes), torch.float64).clipped
        moved.append(whole_norm({name: whole.clipped[name] - rest[name] for name in rest}).item())
    coverage = clipper.coverage()
    clipper.remove()
    return Measured(
        relative_error(whole.clipped, want.clipped),
        ((whole.norms_B - want.norms_B).abs() / want.norms_B).max().item(),
        max(moved, default=0.0) / want.max_grad_norm,
        coverage,
    )
