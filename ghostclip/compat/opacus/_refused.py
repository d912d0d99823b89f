"""Names that scripts for Opacus may import and that are not offered here: why, and what to do instead.

A refused name says so where it is imported. The table of the surface (`python -m benchmarks.opacus_surface`) reads the
reasons from here.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final, NoReturn

from ghostclip.errors import NotOfferedError
from ghostclip.facade.modes import NO_OP, SHARDED

_RULES = (
    "rules belong to the torch function that uses a parameter, not to a module class. Per-sample gradients are in "
    'p.grad_sample with grad_sample_mode="hooks"; for a layer of your own @register_grad_sampler'
)
_PRV = "a grid-based computation; ghostclip.accounting.PLDAccountant bounds ε from both sides"
_INSIDE = "part of Opacus's inside; the clipper does this, and nothing is hung on modules"
_RECURRENT = "torch's own recurrent layers are clipped as they are; use DPLSTM, DPGRU and DPRNN, which are their names"
_NO_REPLACEMENT = "there is nothing to replace: torch's own layer is clipped as it is. Leave the call out"
_UNFOLDED = "unfolding is the convolution rule's; use torch.nn.functional.unfold"
_CHECKED = "the check does this inside; use check_per_sample_gradients_are_correct, or module_utils"

_CHECKS = ("ModelWithLoss*", "check_torch_*", "clone_module", "compute_*_and_opacus", "compute_*_or_seq", "unpack_*")

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
    "grad_sample.GradSampleModuleFastGradientClippingFSDP": SHARDED,
    "grad_sample.GradSampleHooksFastGradientClippingFSDP": SHARDED,
    "grad_sample.GradSampleModuleFastGradientClippingTP": SHARDED,
    "grad_sample.GradSampleHooksFastGradientClippingTP": SHARDED,
    "grad_sample.GradSampleModuleNoOp": NO_OP,
    "grad_sample.GradSampleHooksNoOp": NO_OP,
    "optimizers.FSDPOptimizerFastGradientClipping": SHARDED,
    "utils.fsdp_utils.FSDP2Wrapper": SHARDED,
}

PATTERNS: Final[tuple[tuple[str, str], ...]] = (
    ("accountants.analysis.prv*", _PRV),
    ("grad_sample.*compute_*", _RULES),
    *((f"grad_sample.{name}", _RULES) for name in ("*_norm", "conv*", "dp_*", "embedding*", "linear")),
    ("grad_sample.functorch.prepare_layer", _RULES),
    ("grad_sample.*create_*_sample", _INSIDE),
    ("grad_sample.*promote_current_grad_sample", _INSIDE),
    ("grad_sample.gsm_base.OPACUS_PARAM_MONKEYPATCH_ATTRS", _INSIDE),
    ("grad_sample.gsm_no_op*", NO_OP),
    ("grad_sample.*_fsdp*", SHARDED),
    ("grad_sample.*_tp*", SHARDED),
    *((f"layers.dp_rnn.{name}", _RECURRENT) for name in ("DP*Base*", "*.has_cell_state", "RNN_CELL_*", "apply_*")),
    ("layers.param_rename.filter_out_old_keys", _INSIDE),
    ("optimizers.fsdpoptimizer*", SHARDED),
    ("utils.tensor_utils.unfold*", _UNFOLDED),
    ("utils.tensor_utils.filter_dilated_rows", _UNFOLDED),
    *((f"utils.per_sample_gradients_utils.{name}", _CHECKED) for name in _CHECKS),
    *((f"validators.{name}*", _NO_REPLACEMENT) for name in ("gru", "lstm", "multihead_attention")),
)
"""Names that are refused by shell pattern, as `REFUSED`; and the modules that Opacus has them in."""


def reason_for(name: str) -> str | None:
    """Return why a name is refused.

    Args:
        name: Dotted, without the package.

    Returns:
        The reason, or None for any other name.
    """
    return REFUSED.get(name) or next((why for pattern, why in PATTERNS if fnmatchcase(name, pattern)), None)


def refusing(module: str) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which says of a refused name why it is refused.

    Args:
        module: The module's `__name__`.

    Returns:
        A function that raises for every name.
    """
    place = module.removeprefix(f"{__package__}.")

    def missing(name: str) -> NoReturn:
        reason = None if name.startswith("_") else reason_for(f"{place}.{name}")
        if reason is not None:
            raise NotOfferedError(f"{module}.{name} is not offered: {reason}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
