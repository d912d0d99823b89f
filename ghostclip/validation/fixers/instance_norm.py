"""Instance norm: its running statistics are sums over samples, so they are switched off."""

from typing import Final

from torch import nn

from ghostclip import _torch
from ghostclip.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

_KINDS: Final = (_torch.AnyInstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@register_module_validator(_KINDS)
def validate(module: _torch.AnyInstanceNorm) -> list[UnsupportedModuleError]:
    """Refuse an instance norm that updates running statistics.

    Args:
        module: The instance norm.

    Returns:
        One error, or none.
    """
    if not (module.track_running_stats and module.training):
        return []
    message = (
        "track_running_stats=True keeps averages over samples in buffers that are neither clipped nor noised. Set "
        "track_running_stats=False (ModuleValidator.fix does)."
    )
    return [IllegalModuleConfigurationError(message)]


@register_module_fixer(_KINDS)
def fix(module: _torch.AnyInstanceNorm) -> nn.Module:
    """Replace an instance norm by one without running statistics.

    Args:
        module: The instance norm.

    Returns:
        Another one with the same weights; ``module`` itself where nothing is wrong.
    """
    if not validate(module):
        return module
    kind = type(module)
    return kind(module.num_features, eps=module.eps, affine=module.affine)
