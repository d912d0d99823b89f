"""Batch norm: refused in training mode, replaced by group norm (or instance norm)."""

from math import gcd
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ghostclip.errors import InvalidOptionError
from ghostclip.validators.errors import ShouldReplaceModuleError, UnsupportableModuleError, UnsupportedModuleError
from ghostclip.validators.utils import register_module_fixer, register_module_validator

_MAX_GROUPS: Final = 32
# A group of one channel has nothing but itself to be normalised by where there are no positions: its output is zero.
_MIN_CHANNELS: Final = 8
_INSTANCE_NORMS: Final = (
    (nn.BatchNorm1d, nn.InstanceNorm1d),
    (nn.BatchNorm2d, nn.InstanceNorm2d),
    (nn.BatchNorm3d, nn.InstanceNorm3d),
)


@register_module_validator(_BatchNorm)
def validate(module: _BatchNorm) -> list[UnsupportedModuleError]:
    """Refuse a batch norm in training mode.

    Args:
        module: The batch norm.

    Returns:
        One error, or none in evaluation mode, where samples do not depend on each other.
    """
    if not module.training:
        return []
    message = (
        f"in training mode every sample's output depends on the whole batch, so that its {module.num_features} "
        "channels have no per-sample gradients. Replace it by GroupNorm (ModuleValidator.fix does), or put the layer "
        "in eval mode."
    )
    return [ShouldReplaceModuleError(message)]


# Synchronised batch norm has a forward of its own, which the group norm replaces as well.
@register_module_fixer([_BatchNorm, nn.SyncBatchNorm])
def fix(module: _BatchNorm, *, replace_bn_with_in: bool = False, num_groups: int | None = None) -> nn.Module:
    """Replace a batch norm that is in training mode.

    Reference: group norm, Wu and He 2018 (arXiv 1803.08494).

    Args:
        module: The batch norm.
        replace_bn_with_in: By instance norm instead of group norm.
        num_groups: Groups; must divide the channels. By default gcd(32, channels), as Opacus has it, but of at least 8
            channels each for ``BatchNorm1d``: a group of one channel without positions is normalised to zero.

    Returns:
        A group norm with as many parameters, or an instance norm; ``module`` itself in evaluation mode.

    Raises:
        InvalidOptionError: ``num_groups`` does not divide the channels.
        UnsupportableModuleError: There is no instance norm of its kind.
    """
    if not module.training:
        return module
    channels = module.num_features
    if replace_bn_with_in:
        kind = next((norm for batch_norm, norm in _INSTANCE_NORMS if isinstance(module, batch_norm)), None)
        if kind is None:
            name = type(module).__name__
            raise UnsupportableModuleError(f"{name}: no instance norm is of its kind. Leave replace_bn_with_in out.")
        return kind(channels, eps=module.eps, affine=module.affine)
    flat = isinstance(module, nn.BatchNorm1d)
    default = _groups_without_space(channels) if flat else gcd(_MAX_GROUPS, channels)
    groups = default if num_groups is None else num_groups
    if groups < 1 or channels % groups:
        raise InvalidOptionError(f"num_groups={groups} does not divide the {channels} channels of a batch norm.")
    return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)


def _groups_without_space(channels: int) -> int:
    """Return the most groups that divide the channels: at most 32, of at least 8 channels each, else one."""
    most = max(1, min(_MAX_GROUPS, channels // _MIN_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)
