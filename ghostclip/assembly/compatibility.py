"""Whether a model, an optimizer and a loader can be made private, and what makes a model so."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip.assembly.private import check_objects
from ghostclip.data.accepted import checked_batch_size, dataset_length
from ghostclip.errors import GhostClipError
from ghostclip.optim.checks import refuse_repeated_evaluation
from ghostclip.validation.fixers import ModuleValidator


class Compatibility:
    """The part of an engine that judges without changing anything."""

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader[Any] | None) -> None:
        """Check what `make_private` would refuse, as far as it can be seen without data.

        `ghostclip.validate(model, batch)` also runs the model.

        Args:
            module: The model.
            optimizer: Its optimizer, or None.
            data_loader: Its loader, or None.

        Raises:
            UnsupportedModuleError: If modules mix samples.
            GhostClipError: If the optimizer or the loader is refused.
        """
        if optimizer is None:
            ModuleValidator.validate(module, strict=True)
        else:
            refuse_repeated_evaluation(optimizer)
            check_objects(module, optimizer)
        if data_loader is not None:
            dataset_length(data_loader.dataset)
            checked_batch_size(data_loader)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader[Any] | None
    ) -> bool:
        """Say whether `validate` finds nothing.

        Args:
            module: The model.
            optimizer: Its optimizer, or None.
            data_loader: Its loader, or None.

        Returns:
            Whether it does not.
        """
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except GhostClipError:
            return False
        return True

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a model without modules that mix samples; make the optimizer after this.

        Args:
            module: The model.

        Returns:
            A copy in which what can be replaced is replaced.

        Raises:
            UnsupportedModuleError: If something cannot be replaced.
        """
        fixed = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed
