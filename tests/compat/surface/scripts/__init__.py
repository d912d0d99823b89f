"""Training code as users of Opacus write it; each script is run as it is and with `opacus` changed to `ghostclip`.

A script sees what `PREAMBLE` makes and leaves what is compared in `shown`: "epsilon" may be lower here (the account is
tighter), everything else is the same up to the noise of the training.
"""

from tests.compat.surface.scripts.engines import ENGINES
from tests.compat.surface.scripts.layers import LAYERS
from tests.compat.surface.scripts.parts import PARTS

PREAMBLE = """
import copy, io
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
dataset = TensorDataset(inputs, labels)
loader = DataLoader(dataset, batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()


def train(model, optimizer, loader, criterion=criterion):
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
    return steps
"""

WHY = {
    "make_private, batches as they are": "batches of a fixed size are no Poisson samples: a pass counts as one full "
    "participation of every record",
    "accountants by name": "`len` counts releases here, entries of `history` with Opacus",
    "the privacy program": "Opacus keeps its program outside of what pip installs",
    "batch on the second axis": "the linear layer after the mean has its batch first, which Opacus's hooks do not see",
}
"""Why a script shows something else, for those that do."""

SCRIPTS = {**ENGINES, **PARTS, **LAYERS}

__all__ = ["PREAMBLE", "SCRIPTS", "WHY"]
