"""The Lightning data module under Opacus's import path."""

from ghostclip.data import DPDataLoader
from ghostclip.integrations.lightning import DPLightningDataModule

__all__ = ["DPDataLoader", "DPLightningDataModule"]
