"""Batch norm: refused in training mode, replaced by group norm (or instance norm).

Shape letters: N samples, C channels, `...` positions.
"""

import copy
from math import gcd
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip import _torch
from ghostclip.errors import (
    InvalidOptionError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator

_MAX_GROUPS: Final = 32
# A group of one channel has nothing but itself to be normalised by where there are no positions: its output is zero.
_MIN_CHANNELS: Final = 8
_INSTANCE_NORMS: Final = (
    (nn.BatchNorm1d, nn.InstanceNorm1d),
    (nn.BatchNorm2d, nn.InstanceNorm2d),
    (nn.BatchNorm3d, nn.InstanceNorm3d),
)


# By name too, since scripts look the entry of a class up.
_KINDS: Final = (_torch.AnyBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_POSITIONS: Final = ((3, 3), (3,), (3, 3, 3), ())
"""Shapes of positions that one of the batch norms takes."""


class GroupNormThen(nn.GroupNorm):
    """Group norm, then its children in their order: what a batch norm with an activation inside becomes."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's signature
        """Normalise, then call the children.

        Args:
            input: Shape ``(N, C, ...)``.

        Returns:
            The same shape, unless a child changes it.
        """
        return _then(self, super().forward(input))


@register_module_validator(_KINDS)
def validate(module: _torch.AnyBatchNorm) -> list[UnsupportedModuleError]:
    """Refuse a batch norm in training mode.

    Args:
        module: The batch norm.

    Returns:
        One error, or none in evaluation mode, where samples do not depend on each other.
    """
    if not module.training:
        return []
    if _without_channels(module):
        remedy = "Call the model once, so that its channels are known, then replace it by GroupNorm"
        remedy += " (ModuleValidator.fix does)"
    elif not _is_plain(module) and not _is_norm_then_children(module):
        remedy = (
            "Its forward is its own, and more than a batch norm followed by the modules in it: replace it by hand, or "
            "register a fixer (register_module_fixer)"
        )
    else:
        remedy = "Replace it by GroupNorm (ModuleValidator.fix does)"
    message = (
        "in training mode every sample's output depends on the whole batch, so that there are no per-sample gradients. "
        f"{remedy}, or put the layer in eval mode."
    )
    return [ShouldReplaceModuleError(message)]


@register_module_fixer(_KINDS, any_forward=True)
def fix(module: _torch.AnyBatchNorm, *, replace_bn_with_in: bool = False, num_groups: int | None = None) -> nn.Module:
    """Replace a batch norm that is in training mode.

    Reference: group norm, Wu and He 2018 (arXiv 1803.08494).

    Args:
        module: The batch norm.
        replace_bn_with_in: By instance norm instead of group norm.
        num_groups: Groups; must divide the channels. By default gcd(32, channels), as Opacus has it, but of at least 8
            channels each for ``BatchNorm1d``: a group of one channel without positions is normalised to zero.

    Returns:
        A group norm with as many parameters and the modules inside the batch norm, or an instance norm; ``module``
        itself in evaluation mode, and where its forward is its own and more than that.

    Raises:
        InvalidOptionError: ``num_groups`` does not divide the channels.
        UnsupportableModuleError: There is no instance norm of its kind.
    """
    plain = _is_plain(module)
    if not module.training or not (plain or _is_norm_then_children(module)):
        return module
    channels = module.num_features
    if replace_bn_with_in:
        kind = next((norm for batch_norm, norm in _INSTANCE_NORMS if isinstance(module, batch_norm)), None)
        if kind is None or not plain:
            name = type(module).__name__
            raise UnsupportableModuleError(f"{name}: no instance norm is of its kind. Leave replace_bn_with_in out.")
        return kind(channels, eps=module.eps, affine=module.affine)
    flat = isinstance(module, nn.BatchNorm1d)
    default = _groups_without_space(channels) if flat else gcd(_MAX_GROUPS, channels)
    groups = default if num_groups is None else num_groups
    if groups < 1 or channels % groups:
        raise InvalidOptionError(f"num_groups={groups} does not divide the {channels} channels of a batch norm.")
    if plain:
        return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    norm = GroupNormThen(groups, channels, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        norm.add_module(name, child)
    return norm


def _groups_without_space(channels: int) -> int:
    """Return the most groups that divide the channels: at most 32, of at least 8 channels each, else one."""
    most = max(1, min(_MAX_GROUPS, channels // _MIN_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def _then(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module's children one after another."""
    for child in module.children():
        x = child(x)
    return x


def _without_channels(module: _torch.AnyBatchNorm) -> bool:
    """Return whether a lazy batch norm has seen no input yet."""
    return isinstance(module, _torch.AnyLazyNorm) and module.num_features == 0


def _is_plain(module: _torch.AnyBatchNorm) -> bool:
    """Return whether a batch norm's forward is torch's."""
    return type(module).forward in (_torch.AnyBatchNorm.forward, nn.SyncBatchNorm.forward)


def _is_norm_then_children(module: _torch.AnyBatchNorm) -> bool:
    """Return whether a batch norm with a forward of its own computes a batch norm, then what its children make of it.

    A copy is tried on random numbers with fixed statistics, its children in training mode, so that dropout counts.
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return False
    trial = copy.deepcopy(module).cpu().double().train()
    trial.training = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in (*trial.parameters(), *trial.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
        return any(_agree(trial, torch.randn(4, module.num_features, *shape).double()) for shape in _POSITIONS)


def _agree(trial: _torch.AnyBatchNorm, x: Tensor) -> bool:
    """Return whether a forward gives what the norm and the children give; False where it does not take the shape."""
    norm = functional.batch_norm(
        x,
        trial.running_mean,
        trial.running_var,
        trial.weight,
        trial.bias,
        training=not trial.track_running_stats,
        eps=trial.eps,
    )
    try:
        torch.manual_seed(0)
        found = trial.forward(x.clone())
        torch.manual_seed(0)
        return bool(torch.allclose(found, _then(trial, norm)))
    except Exception:  # noqa: BLE001 - whatever a forward that is not known raises means the same
        return False
