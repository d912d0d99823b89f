"""The facade stands for the model in everything that is not clipping."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import UnsupportedModuleError
from ghostclip.facade import GradSampleModule
from tests.engine.training import small_model


class Named(nn.Module):
    """A model with attributes, a method and a buffer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3).eval()
        self.norm.requires_grad_(False)
        self.config = {"size": 3}

    def forward(self, x, *, twice=False):
        return self.norm(self.body(x)) * (2 if twice else 1)

    def describe(self) -> str:
        return f"size {self.config['size']}"


def facade_of(model: nn.Module) -> GradSampleModule:
    return GradSampleModule(model, clipper=ghostclip.GhostClipper(model, max_grad_norm=1.0))


def test_forward_attributes_and_methods_are_the_models():
    model = Named()
    facade, x = facade_of(model), torch.randn(2, 3)
    assert torch.equal(facade(x, twice=True), 2 * model(x))
    assert facade.config is model.config
    assert facade.describe() == "size 3"
    assert facade.body is model.body
    assert facade.clipper.model is facade._module is model
    assert facade.batch_first is True
    assert facade.loss_reduction == "mean"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = facade.nothing_like_it


def test_layers_of_a_container_are_taken_by_number_and_by_name():
    layers = [nn.Linear(3, 3), nn.Tanh()]
    facade = facade_of(nn.Sequential(*layers))
    assert list(facade) == layers
    assert facade[1] is layers[1]
    assert facade_of(nn.ModuleDict({"body": nn.Linear(3, 3)}))["body"].in_features == 3
    with pytest.raises(TypeError, match="not subscriptable"):
        _ = facade_of(nn.Linear(3, 3))[0]


def test_assignments_reach_the_model():
    model = Named()
    facade = facade_of(model)
    facade.config = {"size": 4}
    facade.extra = nn.Linear(1, 1)
    assert model.config == {"size": 4}
    assert model.extra is facade.extra
    assert "extra" not in facade._modules
    del facade.extra
    assert not hasattr(model, "extra")


def test_state_has_the_models_own_keys():
    model = Named()
    facade = facade_of(model)
    assert list(facade.state_dict()) == list(model.state_dict())
    state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    facade.load_state_dict(state)
    assert bool((model.body.weight == 1).all())
    facade.load_state_dict({f"_module.{key}": torch.zeros_like(value) for key, value in state.items()})
    assert bool((model.body.weight == 0).all())
    with pytest.raises(RuntimeError, match="Missing key"):
        facade.load_state_dict({key: value for key, value in state.items() if key != "body.weight"})
    with pytest.raises(RuntimeError, match="strange"):
        facade.load_state_dict({**state, "strange": torch.zeros(1)})


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_is_the_model_alone(copier):
    facade, x = facade_of(small_model()), torch.randn(4, 5)
    duplicate = copier(facade)
    assert duplicate.clipper is None
    assert torch.equal(duplicate(x), facade(x))
    duplicate(x).sum().backward()
    assert not facade.clipper.has_clipped_sum
    assert all(p.grad is None for p in facade.parameters())
    with pytest.raises(AttributeError, match="batch_first"):
        _ = duplicate.batch_first


def test_standard_module_is_left_as_it_was():
    model = small_model()
    facade = facade_of(model)
    x = torch.randn(4, 5)
    assert facade.to_standard_module() is model
    model(x).sum().backward()
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(x).sum().backward()
    assert torch.equal(model[0].weight.grad, copied[0].weight.grad)


@pytest.mark.integration
def test_transformers_model_keeps_its_own_methods(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    facade = facade_of(transformers.GPT2LMHeadModel(config))
    assert facade.config is config
    generated = facade.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 4)
    facade.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.wte.weight, facade.transformer.wte.weight)


def test_a_copy_says_that_it_is_not_private(caplog):
    wrapped = ghostclip.GradSampleModule(torch.nn.Linear(4, 2))
    x = torch.randn(3, 4)
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        copied(x)
    copied.eval()(x)
    assert not caplog.text
    for _ in range(2):
        copied.train()(x).sum().backward()
    assert caplog.text.count("what trains it is not private") == 1
    wrapped(x).mean().backward()
    assert caplog.text.count("not private") == 1


def test_samples_mix_by_class_unless_it_is_not_asked():
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d"):
        GradSampleModule(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    GradSampleModule(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), strict=False).remove_hooks()


def test_zero_grad_drops_the_gradients_of_samples_too():
    facade = GradSampleModule(small_model())
    facade(torch.randn(4, 5)).square().sum(1).mean().backward()
    weight = facade[0].weight
    assert weight.grad_sample.shape == (4, *weight.shape)
    facade.zero_grad()
    assert weight.grad is weight.grad_sample is None


def test_a_part_of_another_module_loads_the_models_own_keys():
    facade = facade_of(nn.Linear(3, 3))
    outer, state = nn.ModuleDict({"part": facade}), {"part.weight": torch.ones(3, 3), "part.bias": torch.zeros(3)}
    outer.load_state_dict(state)
    assert bool((facade._module.weight == 1).all())


def test_modules_with_parameters_are_listed():
    model = small_model()
    parts = list(facade_of(model).iterate_submodules(model))
    assert parts == [part for part in model if isinstance(part, nn.Linear)]
