"""Scripts written for Opacus run with the import changed, and train to the same account."""

from __future__ import annotations

import pytest

pytest.importorskip("opacus")

# What differs between the two is the first line; the rest is the training loop of Opacus's own guides.
PLAIN = """
from {package} import PrivacyEngine
from {package}.utils.batch_memory_manager import BatchMemoryManager

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
train_loader = DataLoader(dataset, batch_size=12, shuffle=True)

privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    epochs=2,
    target_epsilon=5.0,
    target_delta=1e-5,
    max_grad_norm=1.2,
)
model.train()
losses = []
for epoch in range(2):
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=5, optimizer=optimizer
    ) as memory_safe_data_loader:
        for data, target in memory_safe_data_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
epsilon = privacy_engine.get_epsilon(delta=1e-5)
steps = sum(entry[2] for entry in privacy_engine.accountant.history)
state = model.state_dict()
"""

GHOST = """
from {package} import PrivacyEngine

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(reduction="mean")

privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, criterion, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(dataset, batch_size=12),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    criterion=criterion,
    grad_sample_mode="ghost",
    poisson_sampling=True,
)
losses = []
for epoch in range(2):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
epsilon = privacy_engine.get_epsilon(1e-5)
steps = sum(entry[2] for entry in privacy_engine.accountant.history)
state = model.state_dict()
"""


def run(script: str, package: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(script.format(package=package), f"<script for {package}>", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:::opacus")
@pytest.mark.filterwarnings("ignore:Secure RNG")
@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("script", [PLAIN, GHOST], ids=["hooks", "ghost"])
def test_script_runs_with_the_import_changed(script):
    ours, theirs = run(script, "ghostclip.compat.opacus"), run(script, "opacus")
    assert ours["steps"] == theirs["steps"] == 16
    assert ours["epsilon"] == pytest.approx(theirs["epsilon"], rel=0.05)
    assert {f"_module.{key}" for key in ours["state"]} == set(theirs["state"])
    assert len(ours["losses"]) >= 16
