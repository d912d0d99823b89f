"""What is refused by its class, what takes its place, and what stays as it is."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import (
    GhostClipError,
    IllegalModuleConfigurationError,
    InvalidOptionError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)
from ghostclip.validation.fixers import ModuleValidator, register_module_fixer, register_module_validator


class _Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


def _resnet():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), _Residual(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)
    )


NORMS = [
    (nn.BatchNorm1d(16), (4, 16)),
    (nn.BatchNorm1d(16), (4, 16, 7)),
    (nn.BatchNorm2d(40), (4, 40, 3, 3)),
    (nn.BatchNorm3d(3), (4, 3, 2, 2, 2)),
    (nn.SyncBatchNorm(8), (4, 8, 3)),
    (nn.BatchNorm2d(7, affine=False), (4, 7, 3, 3)),
]


@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=str)
def test_batch_norm_becomes_group_norm_that_can_be_trained(norm, shape):
    fixed = ModuleValidator.fix(nn.Sequential(norm))[0]
    assert isinstance(fixed, nn.GroupNorm)
    assert fixed.num_channels == norm.num_features
    assert sum(p.numel() for p in fixed.parameters()) == sum(p.numel() for p in norm.parameters())
    assert fixed.eps == norm.eps
    x = torch.randn(*shape)
    out = fixed(x)
    # A group of a single value would be normalised to nothing.
    assert out.std() > 0.5
    alone = fixed(x[:1])
    torch.testing.assert_close(out[:1], alone)


def test_names_and_weights_that_fit_stay_and_the_model_is_left_alone():
    model = _resnet()
    with torch.no_grad():
        model[1].weight.uniform_(1, 2)
    fixed = ModuleValidator.fix(model)
    kinds = [nn.Conv2d, nn.GroupNorm, _Residual, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    assert [type(part) for part in fixed] == kinds
    assert isinstance(model[2].norm, nn.BatchNorm2d)
    assert fixed[1].weight is not model[1].weight
    for (name, own), (other, wanted) in zip(fixed.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(own, wanted)


def test_fixed_model_trains_and_the_original_is_refused():
    x = torch.randn(4, 3, 9, 9)
    model = _resnet()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0):
        with pytest.raises(GhostClipError, match="BatchNorm2d"):
            model(x)
    fixed = ModuleValidator.fix_and_validate(model)
    with ghostclip.GhostClipper(fixed, max_grad_norm=1.0) as clipper:
        clipper.backward(fixed(x).square().mean(1))
    assert all(p.grad is not None for p in fixed.parameters())


def test_errors_name_path_and_remedy():
    errors = ModuleValidator.validate(_resnet())
    assert [type(error) for error in errors] == [ShouldReplaceModuleError] * 2
    assert str(errors[1]).startswith("2.norm (BatchNorm2d): ")
    assert "GroupNorm" in str(errors[1])
    with pytest.raises(UnsupportedModuleError, match=r"2\.norm") as found:
        ModuleValidator.validate(_resnet(), strict=True)
    assert isinstance(found.value, GhostClipError)
    assert isinstance(found.value, ValueError)
    assert not ModuleValidator.is_valid(_resnet())


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(3, 4),
        nn.GRU(3, 4),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.InstanceNorm1d(3, affine=True),
        nn.InstanceNorm1d(3, track_running_stats=True).eval(),
        nn.BatchNorm1d(3).eval(),
        nn.Embedding(4, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_needs_no_replacement_stays(module):
    assert ModuleValidator.is_valid(module)
    fixed = ModuleValidator.fix(module)
    assert type(fixed) is type(module)
    assert [type(part) for part in fixed.modules()] == [type(part) for part in module.modules()]
    assert fixed.training == module.training
    assert fixed.state_dict().keys() == module.state_dict().keys()


WRONG = {
    "lazy": (nn.LazyBatchNorm1d, {}, UnsupportedModuleError, "call it once on a batch"),
    "both": (lambda: nn.BatchNorm1d(8), {"replace_bn_with_in": True, "num_groups": 2}, InvalidOptionError, "Give one"),
    "groups": (lambda: nn.BatchNorm1d(8), {"num_groups": 3}, InvalidOptionError, "does not divide the 8 channels"),
    "no group": (lambda: nn.BatchNorm1d(8), {"num_groups": 0}, InvalidOptionError, "num_groups=0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_replaced_as_asked_is_refused(name):
    make, options, error, text = WRONG[name]
    assert "GroupNorm" in str(ModuleValidator.validate(make())[0])
    with pytest.raises(error, match=text):
        ModuleValidator.fix(make(), **options)


def test_running_statistics_are_switched_off():
    norm = nn.InstanceNorm2d(5, affine=True, track_running_stats=True)
    with torch.no_grad():
        norm.weight.uniform_(1, 2)
    (error,) = ModuleValidator.validate(nn.Sequential(norm))
    assert isinstance(error, IllegalModuleConfigurationError)
    assert "track_running_stats" in str(error)
    fixed = ModuleValidator.fix_and_validate(nn.Sequential(norm))[0]
    assert not fixed.track_running_stats
    assert not list(fixed.buffers())
    assert torch.equal(fixed.weight, norm.weight)
    x = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(fixed(x), norm(x))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_scaling_by_frequency_is_switched_off(kind):
    model = nn.Sequential(kind(6, 3, scale_grad_by_freq=True))
    assert isinstance(ModuleValidator.validate(model)[0], IllegalModuleConfigurationError)
    fixed = ModuleValidator.fix_and_validate(model)
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert model[0].scale_grad_by_freq


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_renormalising_rows_is_switched_off(kind):
    model = nn.Sequential(kind(6, 3, max_norm=0.5))
    assert isinstance(ModuleValidator.validate(model)[0], IllegalModuleConfigurationError)
    assert ModuleValidator.fix_and_validate(model)[0].max_norm is None
    assert model[0].max_norm == 0.5


def test_instance_norm_in_place_of_batch_norm():
    fixed = ModuleValidator.fix(nn.BatchNorm2d(6), replace_bn_with_in=True)
    assert isinstance(fixed, nn.InstanceNorm2d)
    assert fixed.weight.numel() == 6
    with pytest.raises(UnsupportableModuleError, match="SyncBatchNorm"):
        ModuleValidator.fix(nn.SyncBatchNorm(6), replace_bn_with_in=True)


class _NormAndActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class _Renamed(nn.BatchNorm2d):
    pass


def test_a_derived_class_is_refused_and_replaced_only_if_it_computes_the_same():
    model = nn.Sequential(_NormAndActivation(8), _Renamed(8))
    assert len(ModuleValidator.validate(model)) == 2
    fixed = ModuleValidator.fix(model)
    assert isinstance(fixed[0], _NormAndActivation)
    assert isinstance(fixed[1], nn.GroupNorm)
    with pytest.raises(UnsupportedModuleError, match="_NormAndActivation"):
        ModuleValidator.fix_and_validate(model)


class _Own(ModuleValidator):
    VALIDATORS: ClassVar[dict] = {}
    FIXERS: ClassVar[dict] = {}


def test_registering_your_own():
    class Layer(nn.Linear):
        pass

    @register_module_validator(Layer, _Own)
    def validate(module):
        return [ShouldReplaceModuleError(f"in_features is {module.in_features}")]

    @register_module_fixer([Layer], _Own)
    def fix(module, **options):
        return nn.Linear(module.in_features, module.out_features)

    model = nn.Sequential(Layer(3, 2))
    assert str(_Own.validate(model)[0]) == "0 (Layer): in_features is 3"
    fixed = _Own.fix(model, num_groups=2)
    assert type(fixed[0]) is nn.Linear
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert ModuleValidator.is_valid(model)


class _NormAct(nn.BatchNorm2d):
    """A batch norm with dropout and an activation inside, as timm has it."""

    def __init__(self, channels, *, drop=0.0, inplace=True, **options):
        super().__init__(channels, **options)
        self.drop = nn.Dropout(drop)
        self.act = nn.SiLU(inplace=inplace)

    def forward(self, x):
        fixed = self.running_mean is not None and not self.training
        statistics = (self.running_mean, self.running_var) if fixed else (None, None)
        x = nn.functional.batch_norm(x, *statistics, self.weight, self.bias, training=not fixed, eps=self.eps)
        return self.act(self.drop(x))


FUSED = [_NormAct(16), _NormAct(16, drop=0.5), _NormAct(16, affine=False), _NormAct(16, track_running_stats=False)]


@pytest.mark.parametrize("norm", FUSED, ids=str)
def test_batch_norm_with_an_activation_inside(norm):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), norm)
    with torch.no_grad():
        for p in norm.parameters():
            p.uniform_(0.5, 1.5)
    fixed = ModuleValidator.fix_and_validate(model)
    keys = [key for key, _ in model.named_parameters()]
    assert [key for key, _ in fixed.named_parameters()] == keys
    assert [name for name, _ in fixed[1].named_children()] == [name for name, _ in norm.named_children()]
    x = torch.randn(2, 3, 5, 5)
    fixed.eval()
    groups = nn.functional.group_norm(fixed[0](x), 16, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(fixed(x), norm.act(groups))
    with ghostclip.GhostClipper(fixed.train(), max_grad_norm=1.0) as clipper:
        clipper.backward(fixed(x).flatten(1).square().mean(1))
    assert all(p.grad is not None for p in fixed.parameters())
