"""Every model has the published number of parameters. Weights stay unset: only their shapes matter here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import MnistCNN
from paper_repro.models import images, language, resnet, reviews, vgg
from paper_repro.stages import mlp_task

PUBLISHED = {
    "mnist-cnn": (MnistCNN, 26_010),
    "cifar-cnn": (images.OpacusCifarCNN, 605_226),
    "imdb-lstm": (reviews.ReviewLSTM, 1_081_002 + 400),
    "imdb-embedding": (reviews.ReviewEmbedding, 160_098),
    "small-cifar-cnn": (images.SmallCifarCNN, 550_570),
    "resnet18": (resnet.resnet18, 11_173_962),
    "resnet50": (resnet.resnet50, 23_520_842),
    "cifar-vgg11": (lambda: vgg.cifar_vgg(11), 9_231_114),
    "cifar-vgg16": (lambda: vgg.cifar_vgg(16), 14_728_266),
    "imagenet-vgg11": (vgg.imagenet_vgg11, 132_863_336),
    "bert": (language.bert_last_block, 108_312_579),
    "gpt2": (lambda: language.gpt2(*language.GPT2_SIZES["gpt2"]), 124_439_808),
    "gpt2-untied": (lambda: language.gpt2(*language.GPT2_SIZES["gpt2"], tied=False), 124_439_808 + 50_257 * 768),
    "gpt2-medium": (lambda: language.gpt2(*language.GPT2_SIZES["gpt2-medium"]), 354_823_168),
    "gpt2-large": (lambda: language.gpt2(*language.GPT2_SIZES["gpt2-large"]), 774_030_080),
    "roberta-large": (lambda: language.roberta(24, 1024, 16), 355_361_794),
    "beit-large": (lambda: language.beit(24, 1024, 16), 304_430_568),
    "mlp": (mlp_task("full", 32).make_model, 5120 * 2560 + 2560 + 2560 * 1280 + 1280),
}


@pytest.fixture(autouse=True)
def _without_values(monkeypatch):
    """Models on the meta device, whose initialisers have nothing to fill."""
    for name in ("_no_grad_normal_", "_no_grad_trunc_normal_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_args, **_options: tensor)
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    make, published = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in make().parameters()) == published


def test_of_bert_the_published_part_is_trained():
    model = language.bert_last_block()
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 7_680_771
