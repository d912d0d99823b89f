"""Runs a clipper on a case, and compares what it produced with the reference.

Shape suffix: B samples.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.cases import Case, by_name
from tests.cases.table import CPU
from tests.exactness import tolerances
from tests.reference import (
    Batch,
    Reference,
    batch_size,
    clip_and_sum,
    per_sample_gradients,
    take,
    trainable,
    whole_norm,
)

STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
MakeClipper = Callable[[nn.Module, float], object]


@dataclass(frozen=True)
class Outcome:
    """What one backward of a clipper left behind, in float64.

    Attributes:
        clipped: {parameter name: what p.grad gained}.
        norms_B: the clipper's norms.
        coef_B: the clipper's coefficients.
        batch_size: the clipper's batch size.
    """

    clipped: dict[str, Tensor]
    norms_B: Tensor
    coef_B: Tensor
    batch_size: int


def engine(strategy: str, *, loss_reduction: str = "mean", batch_first: bool = True) -> MakeClipper:
    """Return a function that attaches ghostclip with this strategy."""

    def attach(model: nn.Module, max_grad_norm: float) -> object:
        import ghostclip

        return ghostclip.GhostClipper(
            model,
            max_grad_norm=max_grad_norm,
            strategy=strategy,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )

    return attach


@functools.lru_cache(maxsize=512)
def expected(name: str, device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Reference:
    """Return the reference of the case called `name`, see `Case.reference_dtype`; one clipping norm C for its runs."""
    case = by_name(name).on(device)
    model = case.reference_model() if dtype == torch.float64 else case.model(dtype)
    batch = case.data(dtype)
    with case.numerics(dtype):
        return clip_and_sum(per_sample_gradients(model, batch, case.losses, axes=case.axes, mode=case.reference))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a float64 copy of every trainable parameter's gradient, zero where there is none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else _dense(p.grad).double().clone()
        for name, p in trainable(model).items()
    }


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


def backward(
    case: Case, model: nn.Module, clipper: object, batch: Batch, dtype: torch.dtype, *, silent: int | None = None
) -> Outcome:
    """Run forward and the clipper's backward once, with the batch's per-sample losses.

    Args:
        case: the case that the model and the batch belong to.
        model: the model that the clipper is attached to.
        clipper: GhostClipper, or a clipper of the harness.
        batch: named inputs.
        dtype: dtype of the run, for `Case.numerics`.
        silent: a sample whose loss is multiplied by 0.

    Returns:
        What the gradients gained by this backward, and the clipper's norms and coefficients.
    """
    before = gradients(model)
    with case.numerics(dtype):
        losses_B = case.losses(model, batch)
        if silent is not None:
            losses_B = losses_B * (torch.arange(len(losses_B), device=losses_B.device) != silent)
        clipper.backward(losses_B)
    after = gradients(model)
    return Outcome(
        {name: after[name] - before[name] for name in after},
        clipper.per_sample_norms.detach().double(),
        clipper.clip_coefficients.detach().double(),
        clipper.batch_size,
    )


def run(case: Case, make: MakeClipper, dtype: torch.dtype, batch: Batch | None = None) -> Outcome:
    """Attach a fresh clipper to a fresh model, run one backward, and detach."""
    model = case.model(dtype)
    clipper = make(model, expected(case.name, case.device, case.reference_dtype(dtype)).max_grad_norm)
    outcome = backward(case, model, clipper, case.data(dtype) if batch is None else batch, dtype)
    clipper.remove()
    return outcome


def relative_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Return the relative error of the whole vector."""
    difference = whole_norm({name: got[name] - want[name] for name in want})
    return (difference / whole_norm(want)).item()


def parameter_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Return every parameter's relative error, see `tolerances.PARAMETER_FLOOR`."""
    floor = tolerances.PARAMETER_FLOOR * whole_norm(want)
    return {name: ((got[name] - want[name]).norm() / torch.maximum(want[name].norm(), floor)).item() for name in want}


def check_sum(outcome: Outcome, reference: Reference, dtype: torch.dtype) -> None:
    """Assert that the clipped sum is right, as one vector and for every parameter."""
    tolerance = tolerances.RELATIVE[dtype]
    errors = parameter_errors(outcome.clipped, reference.clipped)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"clipped sums with a relative error above {tolerance:g}: {wrong}"
    whole = relative_error(outcome.clipped, reference.clipped)
    assert whole <= tolerance, f"the whole clipped sum has relative error {whole:.3g}"


def check_norms(outcome: Outcome, reference: Reference, dtype: torch.dtype) -> None:
    """Assert that norms, coefficients and the batch size are right."""
    tolerance = tolerances.RELATIVE[dtype]
    assert outcome.batch_size == len(reference.norms_B)
    floor = 1e-6 * reference.norms_B.max().item()
    torch.testing.assert_close(outcome.norms_B, reference.norms_B, rtol=tolerance, atol=tolerance * floor)
    torch.testing.assert_close(outcome.coef_B, reference.coef_B, rtol=tolerance, atol=0.0)


def moved(
    case: Case, make: MakeClipper, dtype: torch.dtype, *, samples: int = 4, silenced: bool = False
) -> Iterator[float]:
    """Yield for up to `samples` samples by how much leaving the sample out moves the sum, over C.

    If `silenced`, then also by how much multiplying its loss by 0 does. One clipper sees all the batches in turn, so
    that whatever it keeps from one step would show in the next.
    """
    model, batch = case.model(dtype), case.data(dtype)
    bound = expected(case.name, case.device).max_grad_norm
    clipper = make(model, bound)
    size = batch_size(batch, case.axes)
    whole = backward(case, model, clipper, batch, dtype).clipped

    def by(rest: Mapping[str, Tensor | float]) -> float:
        model.zero_grad(set_to_none=True)
        return whole_norm({name: whole[name] - rest[name] for name in whole}).item() / bound

    for sample in range(min(size, samples)):
        model.zero_grad(set_to_none=True)
        if silenced:
            yield by(backward(case, model, clipper, batch, dtype, silent=sample).clipped)
        others = take(batch, [index for index in range(size) if index != sample], case.axes) if size > 1 else None
        yield by(backward(case, model, clipper, others, dtype).clipped if others else dict.fromkeys(whole, 0.0))
    clipper.remove()


def check_sensitivity(case: Case, make: MakeClipper, dtype: torch.dtype, *, samples: int = 4) -> None:
    """Assert for up to `samples` samples that the sums with and without the sample differ by at most C."""
    limit = 1 + tolerances.SENSITIVITY_OF_DIFFERENCE[dtype]
    for number, share in enumerate(moved(case, make, dtype, samples=samples)):
        assert share <= limit, f"sample {number} moves the clipped sum by {share:.6f} C"
