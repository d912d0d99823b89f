"""Names that scripts for Opacus may import and that are not offered here: why, and what to do instead.

A refused name says so where it is imported. The table of the surface (`python -m benchmarks.opacus_surface`) reads the
reasons from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from ghostclip.errors import NotOfferedError

_SHARDED = (
    "parameters that are sharded over devices (FSDP, tensor parallel) cannot be clipped yet. Train data-parallel, "
    "where every rank holds the model, see ghostclip.distributed"
)
_NO_OP = (
    "it trains without clipping while the account goes on. Use the plain model and optimizer to compare with "
    "training without privacy"
)
_ADAPTIVE = (
    "the private optimizer moves the bound from a noisy count that is accounted; a criterion that moved it would count "
    'without being charged. Use clipping="adaptive", in any strategy'
)

REFUSED: Final[dict[str, str]] = {
    "accountants.analysis.gdp.compute_eps_poisson": (
        "an ε from the central limit theorem can lie far below the true one. Use an accountant; to compare, "
        "ghostclip.accounting.GaussianAccountant(estimate=True)"
    ),
    "accountants.analysis.gdp.compute_eps_uniform": (
        "an ε from the central limit theorem can lie far below the true one, and batches of a fixed size are not "
        "Poisson samples. Use an accountant"
    ),
    "accountants.analysis.gdp.compute_mu_uniform": (
        "batches of a fixed size are not Poisson samples, and the central limit theorem bounds nothing. Use an "
        "accountant"
    ),
    "distributed.average_gradients": (
        "ranks add up their clipped sums inside the private optimizer's step, before the noise; averaging afterwards "
        "would release every rank's part by itself. Leave the call out"
    ),
    "grad_sample.GradSampleModuleFastGradientClippingFSDP": _SHARDED,
    "grad_sample.GradSampleHooksFastGradientClippingFSDP": _SHARDED,
    "grad_sample.GradSampleModuleFastGradientClippingTP": _SHARDED,
    "grad_sample.GradSampleHooksFastGradientClippingTP": _SHARDED,
    "grad_sample.GradSampleModuleNoOp": _NO_OP,
    "grad_sample.GradSampleHooksNoOp": _NO_OP,
    "optimizers.FSDPOptimizerFastGradientClipping": _SHARDED,
    "utils.fsdp_utils.FSDP2Wrapper": _SHARDED,
    "utils.adaptive_clipping.DPLossFastGradientAdaptiveClipping": _ADAPTIVE,
    "utils.adaptive_clipping.DPTensorFastGradientAdaptiveClipping": _ADAPTIVE,
    "utils.batch_memory_manager.BatchSplittingSampler": (
        "every physical batch carries a token that says where it belongs, so that a loop which is left early cannot "
        "confuse the optimizer. Use BatchMemoryManager or wrap_data_loader"
    ),
}

REFUSED_MODES: Final[dict[str, str]] = {"ghost_fsdp": _SHARDED, "ghost_tp": _SHARDED, "no_op": _NO_OP}
"""Values of `grad_sample_mode` that are refused by name."""


def refusing(module: str) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which says of a refused name why it is refused.

    Args:
        module: The module's `__name__`.

    Returns:
        A function that raises for every name.
    """
    place = module.partition(".")[2]

    def missing(name: str) -> NoReturn:
        reason = REFUSED.get(f"{place}.{name}")
        if reason is not None:
            raise NotOfferedError(f"{module}.{name} is not offered: {reason}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
