"""Opacus's module tree as a table, and the import finder that makes the modules from it.

`MODULES` says where in ghostclip the names of a module are; `REFUSED` says of names that are not offered why, and what
to do instead. The table of the surface (`python -m benchmarks.opacus_surface`) takes its reasons from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, Final

from ghostclip.errors import NotOfferedError
from ghostclip.facade import NO_OP, SHARDED

PACKAGE: Final = "ghostclip.compat.opacus"

_SAMPLERS = "data: UniformWithReplacementSampler=PoissonSampler; .loading: DistributedUniformWithReplacementSampler"
_REGISTER = "validation.fixers: register_module_fixer register_module_validator"
_ERRORS = "IllegalModuleConfigurationError ShouldReplaceModuleError UnsupportableModuleError UnsupportedModuleError"

MODULES: Final[dict[str, str]] = {
    "accountants.accountant": "^accounting: IAccountant",
    "accountants.analysis": ".accountants.analysis: gdp rdp",
    "accountants.analysis.gdp": ".functions: compute_mu_poisson delta_eps_mu eps_from_mu",
    "accountants.analysis.rdp": ".functions: compute_rdp get_privacy_spent",
    "accountants.gdp": "^accounting: GaussianAccountant",
    "accountants.prv": "^accounting: PRVAccountant",
    "accountants.rdp": "^accounting: RDPAccountant",
    "accountants.registry": "^accounting: create_accountant register_accountant; accounting.calibration: _ACCOUNTANTS",
    "accountants.utils": "accounting.calibration: MAX_SIGMA get_noise_multiplier",
    "data_loader": f"data: DPDataLoader; {_SAMPLERS}; "
    ".loading: CollateFnWithEmpty dtype_safe shape_safe switch_generator wrap_collate_with_empty",
    "distributed": "distributed: DifferentiallyPrivateDistributedDataParallel",
    "grad_sample.functorch": ".training: make_functional",
    "grad_sample.grad_sample_module": "^facade: GradSampleHooks GradSampleModule",
    "grad_sample.grad_sample_module_fast_gradient_clipping": "^.training: "
    "GradSampleHooksFastGradientClipping GradSampleModuleFastGradientClipping",
    "grad_sample.gsm_base": "^facade: AbstractGradSampleHooks=GradSampleHooks "
    "AbstractGradSampleModule=GradSampleModule",
    "grad_sample.gsm_exp_weights": "^facade: GradSampleModuleExpandedWeights=GradSampleModule",
    "grad_sample.utils": "^.training: get_gsm_class get_hooks_class prepare_module wrap_model=prepare_module; "
    "rules.registry: register_grad_sampler register_norm_sampler",
    "layers.dp_multihead_attention": "^.functions: DPMultiheadAttention SequenceBias",
    "layers.dp_rnn": "^.functions: DPGRU DPGRUCell DPLSTM DPLSTMCell DPRNN DPRNNCell RNNLinear",
    "layers.param_rename": "^.functions: RenameParamsMixin",
    "lightning": "data: DPDataLoader; integrations.lightning: DPLightningDataModule",
    "optimizers": ".training: get_optimizer_class",
    "optimizers.adaclipoptimizer": "^.training: AdaClipDPOptimizer",
    "optimizers.ddp_perlayeroptimizer": "^.training: DistributedPerLayerOptimizer=DistributedDPOptimizer "
    "SimpleDistributedPerLayerOptimizer=DistributedDPOptimizer",
    "optimizers.ddpoptimizer": "^.training: DistributedDPOptimizer",
    "optimizers.ddpoptimizer_fast_gradient_clipping": "^.training: "
    "DistributedDPOptimizerFastGradientClipping=DistributedDPOptimizer",
    "optimizers.optimizer": "^optim: DPOptimizer",
    "optimizers.optimizer_fast_gradient_clipping": "^optim: DPOptimizerFastGradientClipping=DPOptimizer",
    "optimizers.perlayeroptimizer": "^.training: DPPerLayerOptimizer",
    "optimizers.utils": ".functions: params",
    "privacy_engine": "optim: DPOptimizer; engine: PrivacyEngine; accounting: create_accountant",
    "schedulers.grad_clip_scheduler": "^.training: ExponentialGradClip LambdaGradClip StepGradClip",
    "schedulers.noise_scheduler": "^.training: ExponentialNoise LambdaNoise StepNoise",
    "scripts.compute_dp_sgd_privacy": ".functions: compute_dp_sgd_privacy main steps_of",
    "utils.adaptive_clipping.adaptive_clipping_utils": "^.training: DPLossFastGradientAdaptiveClipping "
    "DPTensorFastGradientAdaptiveClipping PrivacyEngineAdaptiveClipping",
    "utils.batch_memory_manager": "data.physical_batches: BatchMemoryManager; optim: DPOptimizer; "
    ".loading: BatchSplittingSampler wrap_data_loader",
    "utils.fast_gradient_clipping_utils": ".training: DPLossFastGradientClipping DPTensorFastGradientClipping",
    "utils.fsdp_utils": ".functions: has_params has_trainable_params=requires_grad iterate_submodules",
    "utils.module_utils": ".functions: are_state_dict_equal clone_module get_submodule "
    "has_trainable_params=requires_grad parametrized_modules requires_grad trainable_modules trainable_parameters",
    "utils.packed_sequences": ".functions: compute_seq_lengths",
    "utils.per_sample_gradients_utils": "validation.layer_check: is_batch_empty check_per_sample_gradients_are_correct "
    "compute_microbatch_grad_sample compute_opacus_grad_sample=compute_grad_sample; "
    ".functions: clone_module compute_grad_samples_microbatch_and_opacus get_grad_sample_modes",
    "utils.tensor_utils": ".functions: calc_sample_norms calc_sample_norms_one_layer sum_over_all_but_batch_and_last_n",
    "utils.uniform_sampler": _SAMPLERS,
    "validators": ".validators: batch_norm instance_norm",
    "validators.batch_norm": f"errors: ShouldReplaceModuleError UnsupportableModuleError UnsupportedModuleError; "
    f"validation.fixers: fix=fix_batch_norm validate=validate_batch_norm; {_REGISTER}",
    "validators.errors": f"^errors: {_ERRORS} NotYetSupportedModuleError UnsupportedError",
    "validators.instance_norm": "errors: IllegalModuleConfigurationError UnsupportedModuleError; "
    f"validation.fixers: fix=fix_instance_norm validate=validate_instance_norm; {_REGISTER}",
    "validators.module_validator": "^errors: UnsupportedModuleError; validation.fixers: ModuleValidator",
    "validators.utils": f"^validation.fixers: ModuleValidator; {_REGISTER}",
}
"""Names of Opacus's modules: "home: names; home: names", homes in ghostclip, or with a dot in this package.

`A=B` is B under Opacus's name A. With ^ in front the package around the module has the names too.
"""

_CLT = "an ε from the central limit theorem can lie far below the true one"
_FIXED = "batches of a fixed size are not Poisson samples"
_CHECK, _GDP = "utils.per_sample_gradients_utils", "accountants.analysis.gdp"
_REASONS = f"""
grad_sample.*FSDP grad_sample.*TP grad_sample.*_fsdp* grad_sample.*_tp* -> {SHARDED}
optimizers.FSDP* optimizers.fsdpoptimizer* utils.fsdp_utils.FSDP2Wrapper -> {SHARDED}
grad_sample.*NoOp grad_sample.gsm_no_op* -> {NO_OP}
{_GDP}.compute_eps_poisson -> {_CLT}. Use an accountant; to compare, \
ghostclip.accounting.GaussianAccountant(estimate=True)
{_GDP}.compute_eps_uniform -> {_CLT}, and {_FIXED}. Use an accountant
{_GDP}.compute_mu_uniform -> {_FIXED}, and the central limit theorem bounds nothing. Use an accountant
accountants.analysis.prv* -> a grid-based computation; ghostclip.accounting.PLDAccountant bounds ε from both sides
distributed.average_gradients -> ranks add up their clipped sums inside the private optimizer's step, before the \
noise; averaging afterwards would release every rank's part by itself. Leave the call out
grad_sample.*compute_* grad_sample.*_norm grad_sample.conv* grad_sample.dp_* grad_sample.embedding* \
grad_sample.linear grad_sample.functorch.prepare_layer -> rules belong to the torch function that uses a parameter, \
not to a module class. Per-sample gradients are in p.grad_sample with grad_sample_mode="hooks"; for a layer of your \
own @register_grad_sampler
grad_sample.*create_*_sample grad_sample.*promote_current_grad_sample layers.param_rename.filter_out_old_keys \
grad_sample.gsm_base.OPACUS_PARAM_MONKEYPATCH_ATTRS -> part of Opacus's inside; the clipper does this, and nothing is \
hung on modules
layers.dp_rnn.DP*Base* layers.dp_rnn.*.has_cell_state layers.dp_rnn.RNN_CELL_* layers.dp_rnn.apply_* -> torch's own \
recurrent layers are clipped as they are; use DPLSTM, DPGRU and DPRNN, which are their names
utils.tensor_utils.unfold* utils.tensor_utils.filter_dilated_rows -> unfolding is the convolution rule's; use \
torch.nn.functional.unfold
{_CHECK}.ModelWithLoss* {_CHECK}.check_torch_* {_CHECK}.compute_*_or_seq {_CHECK}.unpack_* -> the check does this \
inside; use check_per_sample_gradients_are_correct, or module_utils
validators.gru* validators.lstm* validators.multihead_attention* -> there is nothing to replace: torch's own layer is \
clipped as it is. Leave the call out
"""
_SPLIT = (line.partition(" -> ") for line in _REASONS.strip().splitlines())
REFUSED: Final = {pattern: why for patterns, _, why in _SPLIT for pattern in patterns.split()}
"""Why names and modules of Opacus are refused, by shell pattern of the dotted name without the package."""


def submodules(name: str) -> set[str]:
    """Return the names of a module's submodules; of the package's own for an empty name."""
    start = f"{name}." if name else ""
    return {other.removeprefix(start).partition(".")[0] for other in MODULES if other.startswith(start)}


def missing(module: str, name: str) -> Any:
    """Return a submodule at its first use, as `__getattr__` of a module; of a name that is refused say why."""
    inside = module.removeprefix(PACKAGE).removeprefix(".")
    if name in submodules(inside):
        return importlib.import_module(f"{module}.{name}")
    reason = _why_refused(f"{inside}.{name}")
    if reason is not None and not name.startswith("_"):
        raise NotOfferedError(f"{module}.{name} is not offered: {reason}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _why_refused(dotted: str) -> str | None:
    return next((why for pattern, why in REFUSED.items() if fnmatchcase(dotted, pattern)), None)


class SurfaceFinder(MetaPathFinder, Loader):
    """Import finder and loader of the modules in `MODULES`, of the packages around them, and of those in `REFUSED`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return how to make a module of the table; None for a module that is in neither table."""
        name = fullname.removeprefix(f"{PACKAGE}.")
        is_package = bool(submodules(name))
        known = name != fullname and (name in MODULES or is_package or _why_refused(name) is not None)
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package) if known else None

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its names; of one that is refused say why."""
        name, namespace = module.__name__.removeprefix(f"{PACKAGE}."), vars(module)
        if name not in MODULES and not submodules(name):
            raise NotOfferedError(f"{module.__name__} is not offered: {_why_refused(name)}.")
        namespace.update(
            __getattr__=partial(missing, module.__name__), __dir__=lambda: sorted({*namespace, *submodules(name)})
        )
        rows = [row for other, row in MODULES.items() if row[0] == "^" and other.rpartition(".")[0] == name]
        names: dict[str, Any] = {}
        for part in [part for row in (MODULES.get(name), *rows) if row for part in row.lstrip("^").split("; ")]:
            home, _, listed = part.partition(": ")
            source = importlib.import_module(home if home.startswith(".") else f"ghostclip.{home}", PACKAGE)
            names |= {entry.partition("=")[0]: getattr(source, entry.rpartition("=")[2]) for entry in listed.split()}
        namespace.update(names, __all__=sorted(names), __doc__=f"Opacus's `{name}`: {', '.join(names)}.")

    def get_code(self, fullname: str) -> CodeType:
        """Return what `python -m` runs: the module's `main`."""
        return compile(f"import sys\nfrom {fullname} import main\nsys.exit(main())\n", __file__, "exec")
