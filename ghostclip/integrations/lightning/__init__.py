"""Lightning: a callback that makes a Trainer's training private, and a data module of Poisson batches.

`PrivacyCallback` is all that a script needs. Who calls `PrivacyEngine` in `configure_optimizers`, as Opacus's guide has
it, needs `DPLightningDataModule` for the loader. Fabric needs neither: `make_private`, then `fabric.setup`.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`, whose classes do not know each other. The
classes here take their bases from what is in use, and importing them imports neither.
"""

from ghostclip.integrations.lightning.callback import PrivacyCallback
from ghostclip.integrations.lightning.datamodule import DPLightningDataModule

__all__ = ["DPLightningDataModule", "PrivacyCallback"]
