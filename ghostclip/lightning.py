"""A Lightning data module whose training batches are Poisson samples; the class is made when it is first asked for."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ghostclip.data_loader import DPDataLoader
from ghostclip.errors import NotOfferedError

_DELEGATED = (
    "prepare_data",
    "setup",
    "teardown",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)


def __getattr__(name: str) -> Any:
    """Make `DPLightningDataModule` when it is first asked for.

    Args:
        name: The attribute asked of the module.

    Returns:
        The class.

    Raises:
        AttributeError: If the module has no such name.
        NotOfferedError: If Lightning is not installed.
    """
    if name != "DPLightningDataModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed = next((package for package in ("pytorch_lightning", "lightning") if find_spec(package)), None)
    if installed is None:
        raise NotOfferedError("ghostclip.lightning.DPLightningDataModule needs Lightning: pip install lightning.")
    library = import_module(installed if installed == "pytorch_lightning" else "lightning.pytorch")
    return _derived(library.LightningDataModule)


@lru_cache(maxsize=1)
def _derived(base: Any) -> Any:
    """Return the class, derived from Lightning's own.

    Args:
        base: `LightningDataModule`.

    Returns:
        The class.
    """

    def init(self: Any, datamodule: Any, generator: torch.Generator | None = None) -> None:
        base.__init__(self)
        self.datamodule = datamodule
        self.generator = generator

    def train_dataloader(self: Any) -> DPDataLoader:
        return DPDataLoader.from_data_loader(self.datamodule.train_dataloader(), generator=self.generator)

    def delegated(name: str) -> Any:
        return lambda self, *args: getattr(self.datamodule, name)(*args)

    body = {"__init__": init, "train_dataloader": train_dataloader, "__doc__": _derived.__doc__, "__module__": __name__}
    return type("DPLightningDataModule", (base,), {**body, **{name: delegated(name) for name in _DELEGATED}})
