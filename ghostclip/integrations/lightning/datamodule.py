"""A Lightning data module whose training batches are Poisson samples.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`, whose classes do not know each other. So
the class here takes its base from the data module that it is given, and this file imports neither.
"""

from __future__ import annotations

from typing import Any

import torch

from ghostclip.data import DPDataLoader
from ghostclip.integrations.lightning.bases import base_of, joined


class DPLightningDataModule:
    """Stands for a data module whose training loader samples as the accountant assumes; the rest is the module's own.

    An instance is also one of the `LightningDataModule` that the given module derives from.

    Attributes:
        datamodule: The module.
        generator: As given.

    Args:
        datamodule: Any Lightning data module; its training loader becomes a `DPDataLoader`.
        generator: Makes the sampling reproducible, and so not private against who knows it.

    Raises:
        InvalidOptionError: If it is no Lightning data module.
    """

    def __new__(cls, datamodule: Any, generator: torch.Generator | None = None) -> DPLightningDataModule:
        """Make an instance of the class that also derives from Lightning's."""
        del generator
        base = base_of(datamodule)
        kind: Any = cls
        if not issubclass(cls, base):
            kind = joined(kind, (base,))
        made: DPLightningDataModule = object.__new__(kind)
        return made

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.datamodule = datamodule
        self.generator = generator

    def prepare_data(self) -> None:
        """Let the module prepare its data."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Let the module set up.

        Args:
            stage: As Lightning gives it.
        """
        self.datamodule.setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        """Let the module clean up.

        Args:
            stage: As Lightning gives it.
        """
        self.datamodule.teardown(stage)

    def train_dataloader(self) -> DPDataLoader:
        """Return the module's training loader with private sampling.

        Returns:
            The loader.
        """
        return DPDataLoader.from_data_loader(self.datamodule.train_dataloader(), generator=self.generator)

    def val_dataloader(self) -> Any:
        """Return the module's own."""
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        """Return the module's own."""
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        """Return the module's own."""
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Let the module move a batch.

        Args:
            batch: The batch.
            device: Where to.
            dataloader_idx: Which loader it is from.

        Returns:
            The batch, there.
        """
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the module change a batch before it is moved.

        Args:
            batch: The batch.
            dataloader_idx: Which loader it is from.

        Returns:
            The batch.
        """
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Let the module change a batch after it was moved.

        Args:
            batch: The batch.
            dataloader_idx: Which loader it is from.

        Returns:
            The batch.
        """
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return what the module wants in a checkpoint."""
        return self.datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the module what it had put into a checkpoint.

        Args:
            state_dict: Its state.
        """
        self.datamodule.load_state_dict(state_dict)
