"""A private step waits for the device once: the host reads one value, which says whether all norms are certain."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip import DeclaredSampling, GhostClipper, PrivacyEngine
from ghostclip.errors import InvalidOptionError, TamperedGradientError
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

    def __init__(self, name: str, strategy: str, *, device_only: bool = False) -> None:
        logging.disable(logging.WARNING)
        torch.manual_seed(0)
        make, size = MODELS[name]
        self.model = make()
        self.x = torch.randint(19, size) if len(size) == 2 and name != "mlp" else torch.randn(size)
        self.clipper = GhostClipper(self.model, max_grad_norm=0.1, strategy=strategy, device_only=device_only)
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


@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_the_device_alone_reads_nothing(name, strategy):
    """The sums are those of a step that reads, where all samples are certain."""
    training, other = _Training(name, strategy, device_only=True), _Training(name, strategy)
    other.model.load_state_dict(training.model.state_dict())
    for each in (training, other):
        each.clipper.backward(_losses(each.model, each.x))
    for parameter, own in zip(
        training.clipper.trainable_parameters(), other.clipper.trainable_parameters(), strict=True
    ):
        got, expected = training.clipper.summed_gradient(parameter), other.clipper.summed_gradient(own)
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-8)
    training.clipper.reset()
    with host_reads(refused=True):
        training.step()


def test_uncertain_samples_are_left_out_without_a_read():
    """Samples that are not finite, or whose gradients cancel beyond float32, add nothing, and are counted."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    x, weight = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    x[1, 0, 0] = float("nan")
    # Two positions that oppose each other but for a few last digits.
    x[3, 1], weight[3, 1] = x[3, 0] * (1 + 1e-6), -weight[3, 0]
    kept = [0, 2, 4]

    def sums(device_only: bool, rows: list[int]) -> tuple[GhostClipper, Tensor]:
        model.zero_grad()
        clipper = GhostClipper(model, max_grad_norm=0.5, strategy="bookkeeping", device_only=device_only, probe=False)
        losses = (model(x[rows]) * weight[rows]).sum((1, 2))
        with host_reads(refused=device_only):
            clipper.backward(losses)
        clipper.remove()
        return clipper, model.weight.grad.clone()

    clipper, got = sums(True, list(range(5)))
    _, expected = sums(False, kept)
    assert clipper.clip_coefficients[[1, 3]].tolist() == [0.0, 0.0]
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7)
    assert clipper.non_finite_samples == clipper.non_finite_total == 2


@pytest.mark.parametrize("options", [{"strategy": "ghost"}, {"strategy": "fast"}])
def test_what_must_read_is_refused(options):
    with pytest.raises(InvalidOptionError, match="device_only"):
        GhostClipper(nn.Linear(2, 2), max_grad_norm=1.0, device_only=True, **options)


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


def _private(data: torch.utils.data.TensorDataset, *, declared: bool, **options: str) -> tuple:
    torch.manual_seed(0)
    model = MODELS["mlp"][0]()
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    own = DeclaredSampling(sample_rate=0.02, expected_batch_size=8, num_units=400, data_loader=loader)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=own if declared else loader,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        device_only=True,
        **options,
    )


@pytest.mark.parametrize("mode", ["auto", "hooks"])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_an_engine_of_the_device_alone_reads_nothing(mode, declared, monkeypatch):
    """What `make_private` returns, once proved."""
    monkeypatch.setattr(logging.getLogger("ghostclip"), "disabled", True)
    data = torch.utils.data.TensorDataset(torch.randn(400, 5))
    model, optimizer, loader = _private(data, declared=declared, grad_sample_mode=mode)
    for number, (x,) in zip(range(PROVED + 2), loader, strict=False):
        with host_reads(refused=number >= PROVED):
            optimizer.zero_grad()
            _losses(model, x).mean().backward()
        with host_reads(refused=number >= PROVED) as found:
            optimizer.step()
        assert not found, str(found)
    assert number == PROVED + 1


def test_an_engine_refuses_what_must_read_and_leaves_nothing_attached():
    model = nn.Linear(2, 2)
    data = torch.utils.data.TensorDataset(torch.randn(8, 2))
    options = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "noise_multiplier": 1.0}
    options |= {"data_loader": torch.utils.data.DataLoader(data, batch_size=4), "max_grad_norm": 1.0}
    for refused in ({"grad_sample_mode": "ghost"}, {"clipping": "adaptive"}, {"memory_budget": 0.5}):
        with pytest.raises(InvalidOptionError, match="device_only"):
            PrivacyEngine().make_private(**options, **refused, device_only=True)
    GhostClipper(model, max_grad_norm=1.0).remove()
