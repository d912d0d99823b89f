"""States that a loop carries from batch to batch: refused, as records of one draw would move the release of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import DrawError

N, B, T, V, H = 24, 6, 4, 9, 7
pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")


class _Language(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding, self.recurrent, self.head = nn.Embedding(V, 5), nn.GRU(5, H, layers), nn.Linear(H, V)

    def forward(self, tokens, state):
        outputs, state = self.recurrent(self.embedding(tokens), state)
        return self.head(outputs), state


def _zeros(state: Tensor) -> Tensor:
    return torch.zeros_like(state)


def _train(next_state, *, layers=1, chunks=1):
    """Train a language model on shuffled batches of one size, as word_language_model does; return the releases."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(V, (N, T + 1)))
    model = _Language(layers)
    private, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=B, collate_fn=lambda rows: torch.stack([row[0] for row in rows], 1)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batch_first=False,
        poisson_sampling=False,
    )
    state = torch.zeros(layers, B, H)
    for tokens in loader:
        state = next_state(state)
        losses = 0.0
        for inputs, targets in zip(tokens[:-1].chunk(chunks), tokens[1:].chunk(chunks), strict=True):
            logits, state = private(inputs, state)
            losses = losses + functional.cross_entropy(logits.movedim(2, 1), targets, reduction="none").mean(0).mean()
        losses.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.releases


CARRIED = {
    "detached": Tensor.detach,
    "data": lambda state: state.data,
    "a view": lambda state: state.detach()[:, :B].contiguous(),
    "one layer for all": lambda state: state[-1:].detach().expand(*state.shape),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", CARRIED)
def test_a_state_of_an_earlier_batch_is_refused(name, layers):
    with pytest.raises(DrawError, match=r"what it had returned for draw 0 .* while draw 1 is to be .* zeros"):
        _train(CARRIED[name], layers=layers)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_new_state_for_each_batch_is_accepted(chunks):
    """Within a batch the state may go on."""
    assert _train(_zeros, chunks=chunks) == N // B


def test_a_state_that_is_emptied_in_place_is_a_new_one():
    assert _train(lambda state: state.detach().zero_()) == N // B
