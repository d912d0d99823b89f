"""Parameters that come, go or change hands after a model was made private: trained exactly, or refused with names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import UncoveredParameterError
from tests.reference import clip_and_sum, per_sample_gradients

# The updates must tell what was clipped: there is no noise.
pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:.*not in the optimizer")

BOUND = 0.1


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.body, self.head, self.last = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3)
        self.config = {}

    def forward(self, x):
        return self.last(self.head(torch.tanh(self.body(self.embedding(x).mean(1)))))


def _private(engine, model, parameters=None, loader=None):
    data = TensorDataset(torch.randint(0, 10, (6, 4)), torch.randint(0, 3, (6,)))
    held = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(held, lr=1.0),
        data_loader=loader or DataLoader(data, batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
    )


def _losses(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _step(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        _losses(model, {"x": x, "y": y}).mean().backward()
        optimizer.step()


def _assert_exact_step(model, bare, optimizer, loader):
    """One full batch moves every trainable parameter by its clipped sum over the batch size."""
    x, y = loader.dataset.tensors
    trainable = {name: p for name, p in bare.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trainable.items()}
    _step(model, optimizer, loader)
    moved = {name: 6 * (before[name] - p.detach()) for name, p in trainable.items()}
    with torch.no_grad():
        for name, p in trainable.items():
            p.copy_(before[name])
    model.remove_hooks()
    wanted = clip_and_sum(per_sample_gradients(bare, {"x": x, "y": y}, _losses, axes={}), BOUND).clipped
    for name, value in moved.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-6, msg=name)
        assert value.any(), name


def _exchange(model):
    model.head = nn.Linear(6, 3)


def _resize(model):
    model.embedding = nn.Embedding(12, 6)


def _tie(model):
    model.last.bias = model.head.bias


def _add(model):
    model.head = nn.Sequential(model.head, nn.Linear(3, 3))


def _unfreeze(model):
    model.body.requires_grad_(True)


NAMES = {_exchange: "head.weight, head.bias", _resize: "embedding.weight", _tie: "last.bias", _add: "head.1.weight"}
NAMES[_unfreeze] = "body.weight, body.bias"


def _changed(change, *, steps):
    engine, model = ghostclip.PrivacyEngine(), _Model()
    model.body.requires_grad_(change is not _unfreeze)
    private, optimizer, loader = _private(engine, model)
    for _ in range(steps):
        _step(private, optimizer, loader)
    change(private._module)
    return engine, private, optimizer, loader


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("change", NAMES)
def test_change_is_refused_by_name_and_the_remedy_works(change, steps):
    engine, private, optimizer, loader = _changed(change, steps=steps)
    for _ in range(2):
        with pytest.raises(UncoveredParameterError, match=NAMES[change]):
            _step(private, optimizer, loader)
    assert optimizer.releases == len(engine.accountant) == steps
    private.remove_hooks()
    again, optimizer, loader = _private(engine, private, loader=loader)
    _assert_exact_step(again, private._module, optimizer, loader)
    assert len(engine.accountant) == steps + 1


@pytest.mark.parametrize("change", [_add, _unfreeze])
def test_what_the_optimizer_takes_in_time_is_trained(change):
    _, private, optimizer, loader = _changed(change, steps=0)
    held = {id(p) for p in optimizer.params}
    optimizer.add_param_group({"params": [p for p in private.parameters() if p.requires_grad and id(p) not in held]})
    _assert_exact_step(private, private._module, optimizer, loader)


def test_new_parameters_after_a_release_are_refused():
    _, private, optimizer, loader = _changed(_add, steps=1)
    optimizer.add_param_group({"params": list(private._module.head[1].parameters())})
    with pytest.raises(UncoveredParameterError, match=r"after its first release \(head.1.weight"):
        _step(private, optimizer, loader)


def test_a_layer_that_the_optimizer_holds_may_be_unfrozen_late():
    engine, model = ghostclip.PrivacyEngine(), _Model()
    model.body.requires_grad_(False)
    private, optimizer, loader = _private(engine, model, list(model.parameters()))
    _step(private, optimizer, loader)
    model.body.requires_grad_(True)
    _assert_exact_step(private, model, optimizer, loader)


def test_a_new_part_is_proved_like_a_new_model():
    """Evidence on the model as it was says nothing about a part that mixes samples."""

    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    _, private, optimizer, loader = _changed(lambda model: setattr(model, "head", Centred(6, 3)), steps=3)
    with pytest.raises(ghostclip.errors.SampleMixingError):
        _step(private, optimizer, loader)


@pytest.mark.integration
class TestAdapters:
    """Real LoRA, in both orders."""

    @staticmethod
    def _adapted(model):
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["body", "head"], r=2))
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_B" in name:
                    p.normal_()
        return adapted, [p for p in adapted.parameters() if p.requires_grad]

    def test_before(self):
        adapted, parameters = self._adapted(_Model())
        private, optimizer, loader = _private(ghostclip.PrivacyEngine(), adapted, parameters)
        _assert_exact_step(private, adapted, optimizer, loader)

    @pytest.mark.parametrize("inner", [False, True])
    def test_after_is_refused(self, inner):
        private, optimizer, loader = _private(ghostclip.PrivacyEngine(), _Model())
        adapted, _ = self._adapted(private._module if inner else private)
        with pytest.raises(UncoveredParameterError, match=r"4 trainable .*body.lora_A.default.weight.*add_param_group"):
            _step(adapted, optimizer, loader)

    @pytest.mark.parametrize("inner", [False, True])
    def test_after_and_handed_over(self, inner):
        private, optimizer, loader = _private(ghostclip.PrivacyEngine(), _Model())
        adapted, parameters = self._adapted(private._module if inner else private)
        optimizer.add_param_group({"params": parameters})
        adapted.remove_hooks = private.remove_hooks
        _assert_exact_step(adapted, private._module, optimizer, loader)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_told_to_be_out_of_the_way(register):
    """Autograd forms no gradient that they could be called with."""
    model = nn.Linear(5, 3)
    getattr(model.weight, register)(lambda _: None)
    with pytest.warns(UserWarning, match=r"^1 parameter\(s\) have hooks of their own \(weight\), which are not called"):
        _private(ghostclip.PrivacyEngine(), model)
