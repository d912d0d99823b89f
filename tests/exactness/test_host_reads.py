"""A private step waits for the device once: the host reads one value, which says whether all norms are certain."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip import GhostClipper
from ghostclip.errors import TamperedGradientError
from ghostclip.kernels import runtime
from ghostclip.optim import DPOptimizer
from tests.host_reads import host_reads

STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
# Every check of the first forwards is over by then.
PROVED = 5


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=8, n_head=2, vocab_size=19, n_positions=8, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
        )
    )


class _Tagger(nn.Module):
    """An LSTM on embedded ids."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.lstm, self.head = nn.Embedding(19, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(ids))[0])


def _cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 3))


MODELS = {
    "gpt2": (_gpt2, (4, 6)),
    "lstm": (_Tagger, (4, 6)),
    "embeddings": (lambda: nn.Sequential(nn.Embedding(19, 6), nn.Flatten(), nn.Linear(36, 3)), (4, 6)),
    "cnn": (_cnn, (4, 3, 8, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), (4, 5)),
}


def _losses(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out = getattr(out, "logits", out)
    return (
        out.square().flatten(1).mean(1) if out.dim() == 2 else functional.log_softmax(out, 2)[..., 0].square().mean(1)
    )


class _Training:
    """A private training whose checks are over."""

    def __init__(self, name: str, strategy: str) -> None:
        logging.disable(logging.WARNING)
        torch.manual_seed(0)
        make, size = MODELS[name]
        self.model = make()
        self.x = torch.randint(19, size) if len(size) == 2 and name != "mlp" else torch.randn(size)
        self.clipper = GhostClipper(self.model, max_grad_norm=0.1, strategy=strategy)
        inner = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.optimizer = DPOptimizer(inner, noise_multiplier=1.0, expected_batch_size=4, clipper=self.clipper)
        for _ in range(PROVED):
            self.step()
        logging.disable(logging.NOTSET)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.clipper.backward(_losses(self.model, self.x))
        self.optimizer.step()


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch):
    """Whatever asks whether a read waits is told that it does, as on a GPU."""
    monkeypatch.setattr(runtime, "wait", lambda tensor: True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_step_reads_one_value(name, strategy):
    training = _Training(name, strategy)
    with host_reads() as found:
        training.step()
    assert len(found) == 1, f"{len(found)} reads\n{found}"


@pytest.mark.parametrize("strategy", ["ghost", "fast"])
def test_a_second_backward_that_differs_releases_nothing(strategy):
    """Its answer is read with the next value that is read; until then the sums are nothing."""
    torch.manual_seed(0)
    draws = iter([1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0])

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * next(draws)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clipper = GhostClipper(model, max_grad_norm=0.5, strategy=strategy, probe=False)

    def backward() -> None:
        clipper.backward(Noisy.apply(model(torch.randn(4, 3))).square().sum(1))

    backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    clipper.reset()
    backward()
    assert all(not p.grad.any() for p in model.parameters())
    with pytest.raises(TamperedGradientError, match="second backward"):
        backward()
