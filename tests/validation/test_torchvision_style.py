"""Networks as torchvision writes them, batch norms and all: refused as they are, exact once they are fixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from ghostclip import ModuleValidator
from ghostclip.errors import ShouldReplaceModuleError
from tests.integrations.timm_stand_in import FrozenBatchNorm2d

CLASSES = 3


def _conv(inner, outer, *, stride=1, groups=1, kernel=3):
    return nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)


class _BasicBlock(nn.Module):
    """One in-place ReLU that is used twice, and a projection beside."""

    def __init__(self, inner, outer, stride, norm):
        super().__init__()
        self.conv1, self.bn1, self.relu = _conv(inner, outer, stride=stride), norm(outer), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = _conv(outer, outer), norm(outer)
        self.downsample = nn.Sequential(_conv(inner, outer, stride=stride, kernel=1), norm(outer))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class _SqueezeExcitation(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return self.fc2(functional.relu(self.fc1(functional.adaptive_avg_pool2d(x, 1)))).sigmoid() * x


class _InvertedResidual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(_conv(channels, 16, kernel=1), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)),
            nn.Sequential(_conv(16, 16, groups=16), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)),
            _SqueezeExcitation(16),
            nn.Sequential(_conv(16, channels, kernel=1), nn.BatchNorm2d(channels)),
        )

    def forward(self, x):
        return x + self.block(x)


class _DenseLayer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(inner), nn.ReLU(inplace=True), _conv(inner, 4)

    def forward(self, x):
        return torch.cat([x, self.conv1(self.relu1(self.norm1(x)))], 1)


class _WithAuxiliaryHead(nn.Module):
    """Two heads while it is trained, as GoogLeNet and Inception have."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 8), nn.BatchNorm2d(8, eps=0.001), nn.ReLU(inplace=True))
        self.branches = nn.ModuleList(nn.Sequential(_conv(8, 8), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        self.fc, self.aux = nn.Linear(16, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        joined = torch.cat([branch(x) for branch in self.branches], 1)
        return self.fc(joined.mean((2, 3))), self.aux(x.mean((2, 3)))


def _headed(*layers, channels):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, CLASSES))


NETWORKS = {
    "resnet": lambda: _headed(_conv(3, 8), _BasicBlock(8, 16, 2, nn.BatchNorm2d), channels=16),
    "mobilenet": lambda: _headed(_conv(3, 8, stride=2), nn.BatchNorm2d(8), _InvertedResidual(8), channels=8),
    "densenet": lambda: _headed(_conv(3, 8), _DenseLayer(8), _DenseLayer(12), nn.BatchNorm2d(16), channels=16),
    "vgg": lambda: _headed(_conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), channels=8),
    "inception": _WithAuxiliaryHead,
    "frozen": lambda: _headed(_conv(3, 8), _BasicBlock(8, 16, 2, FrozenBatchNorm2d), channels=16),
}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    heads = output if isinstance(output, tuple) else (output,)
    return sum(
        functional.cross_entropy(head, batch[1]) * weight for head, weight in zip(heads, (1.0, 0.3), strict=False)
    )


@pytest.mark.parametrize("name", list(NETWORKS))
def test_exact_once_fixed(name):
    model = NETWORKS[name]()
    has_batch_norm = name != "frozen"
    refusals = ModuleValidator.validate(model)
    assert bool(refusals) == has_batch_norm
    assert all(isinstance(error, ShouldReplaceModuleError) for error in refusals)
    fixed = ModuleValidator.fix(model)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in fixed.modules())
    batch = torch.randn(4, 3, 12, 12), torch.arange(4) % CLASSES
    found = ghostclip.check(fixed, batch, _loss)
    assert found.ok, str(found)
    assert found.precision == "float64"
    assert found.report.results[0].error < 1e-12
    assert found.report.results[0].sensitivity <= 1 + 1e-9
