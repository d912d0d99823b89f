"""Why a name of Opacus is not the same here: the one list of reasons.

Every name that differs in form, or has no counterpart, must match one entry; a test asserts it, and that no entry is
idle. Names that are refused when they are imported bring their reason with them (`ghostclip.compat.opacus.surface`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from ghostclip.compat.opacus.surface import REFUSED

_NAMED = "options are named, so that a misspelt one is an error; Opacus's `**kwargs` swallow it"
_FACTORY = "a name for the one private optimizer, with another clip policy or noise source"
_INSIDE = "part of Opacus's inside; the clipper does this, and nothing is hung on modules"
_DEFAULT_ACCOUNTANT = 'the default accountant is the tighter of two valid bounds; accountant="prv" and "rdp" exist too'


class Reason(NamedTuple):
    """Why names that match a pattern differ."""

    pattern: str
    """Shell pattern of dotted names, without the package."""
    refused: bool
    """Whether there is no counterpart."""
    why: str


REASONS: Final[tuple[Reason, ...]] = (
    *(Reason(name, True, why) for name, why in REFUSED.items()),
    Reason("accountants.accountant.T_state_dict", True, "a type variable of Opacus's own annotations"),
    Reason("accountants.accountant.IAccountant.get_epsilon", False, _NAMED),
    Reason("accountants.gdp.GaussianAccountant.get_epsilon", False, "an estimate, so `estimate=True` must be said"),
    Reason("accountants.prv.PRVAccountant.get_epsilon", False, "certified to 0.1 %; there is no error to choose"),
    Reason("accountants.rdp.RDPAccountant.DEFAULT_ALPHAS", True, "`accounting.DEFAULT_ORDERS`, a wider range"),
    Reason("accountants.rdp.RDPAccountant.get_epsilon", False, _NAMED),
    Reason("accountants.*register_accountant", False, "`force` is given by name"),
    Reason("accountants.utils.get_noise_multiplier", False, f"{_DEFAULT_ACCOUNTANT}; {_NAMED}"),
    Reason("*PrivacyEngine", False, _DEFAULT_ACCOUNTANT),
    Reason("*PrivacyEngineAdaptiveClipping", False, _DEFAULT_ACCOUNTANT),
    Reason(
        "privacy_engine.PrivacyEngine.make_private*",
        False,
        'the default strategy is "auto" (book-keeping), which needs no criterion and gives the same sums with less '
        f"work; {_NAMED}",
    ),
    Reason("data_loader.DPDataLoader", False, f"torch's own options are named; {_NAMED}"),
    Reason("grad_sample.*prepare_module", False, _NAMED),
    Reason("grad_sample.*wrap_model", False, _NAMED),
    Reason("grad_sample.*.capture_*_hook", True, _INSIDE),
    Reason("grad_sample.*.rearrange_grad_samples", True, _INSIDE),
    Reason("grad_sample.*.log_module_gradient_sample_mode", True, "`clipper.coverage()` says it of each parameter"),
    Reason(
        "grad_sample.*.add_hooks", False, "refused when called: a clipper is attached once, when the model is wrapped"
    ),
    Reason("grad_sample.gsm_base.AbstractGradSampleModule.zero_grad", False, "gradients always become None"),
    Reason("layers.dp_multihead_attention.DPMultiheadAttention.unsqueeze_0_2", True, "not needed: torch's own module"),
    Reason("layers.dp_multihead_attention.DPMultiheadAttention.*", False, "torch's own signature"),
    Reason("layers.param_rename.RenameParamsMixin.load_state_dict", True, "torch's own, on the module mixed in"),
    Reason("lightning", False, "cannot be compared where Lightning is not installed; DPLightningDataModule is offered"),
    Reason("optimizers.*.update_max_grad_norm", True, "part of the step: the noisy count is released with the sum"),
    Reason("optimizers.*.reduce_gradients", True, "part of the noise source: sums of ranks meet before the noise"),
    Reason("optimizers.*DPOptimizer.zero_grad", False, "gradients always become None"),
    Reason("optimizers.*FastGradientClipping.zero_grad", False, "gradients always become None"),
    Reason("optimizers.*DPOptimizer", False, f"{_FACTORY}; {_NAMED}"),
    Reason("optimizers.*PerLayerOptimizer", False, f"{_FACTORY}; {_NAMED}"),
    Reason("optimizers.*DPOptimizerFastGradientClipping", False, f"{_FACTORY}; {_NAMED}"),
    Reason("schedulers.*.get_max_grad_norm", True, "`next_value(current)`"),
    Reason("schedulers.*.get_noise_multiplier", True, "`next_value(current)`"),
    Reason(
        "utils.per_sample_gradients_utils.check_per_sample_gradients_are_correct",
        False,
        "every strategy is checked by default, within what rounding explains in the dtype",
    ),
    Reason("validators.batch_norm.fix", False, _NAMED),
    Reason("validators.fix", True, "whichever was imported last in Opacus; `ModuleValidator.fix`"),
    Reason("validators.validate", True, "whichever was imported last in Opacus; `ModuleValidator.validate`"),
    Reason("version", True, "`ghostclip.__version__`"),
)


def reason_for(path: str, *, refused: bool) -> Reason | None:
    """Find why a name differs.

    Args:
        path: Dotted, without the package.
        refused: Whether it has no counterpart.

    Returns:
        The first entry that matches, or None.
    """
    matches = (reason for reason in REASONS if reason.refused is refused and fnmatchcase(path, reason.pattern))
    return next(matches, None)
