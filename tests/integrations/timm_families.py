"""A small model of each family of timm, one for a file of `timm.models`: what is replaced, and is it exact then?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ghostclip
from ghostclip import ModuleValidator
from tests.integrations.timm_stand_in import timm

SAMPLES, CLASSES = 3, 5
TOLERANCE = 1e-8
"""Largest relative error of an exact sum in float64, of models that compute all of it in float64."""


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        name: Module of `timm.models`.
        model: One of its smallest models.
        options: Further arguments of `timm.create_model` that make it smaller still.
        size: Height and width of its images.
        quick: Whether it is small enough for a quick test.
        num_groups: As for `ModuleValidator.fix`: batch norms on maps of one position (in squeeze-and-excitation) have
            nothing to normalise in the default's groups of one channel.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    size: int = 64
    quick: bool = False
    num_groups: int | None = None


_SHORT = {"depth": 2, "embed_dim": 48, "num_heads": 3}
FAMILIES = (
    Family("beit", "beit_base_patch16_224", {"img_size": 64, **_SHORT}),
    Family("byoanet", "eca_botnext26ts_256", {"img_size": 128}, 128),
    Family("byobnet", "test_byobnet"),
    Family("cait", "cait_xxs24_224", {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    Family("coat", "coat_lite_tiny", {"img_size": 64}),
    Family("convit", "convit_tiny", {"img_size": 64, "depth": 2, "local_up_to_layer": 1}),
    Family("convmixer", "convmixer_768_32"),
    Family("convnext", "test_convnext"),
    Family("cpubone", "cpubone_nano"),
    Family("crossvit", "crossvit_tiny_240", {"img_size": 240, "depth": [[1, 1, 0], [1, 1, 0], [1, 1, 0]]}, 240),
    Family("cspnet", "cs3darknet_focus_s"),
    Family("cspnext", "cspnext_tiny"),
    Family("davit", "davit_tiny", {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 96, 192)}),
    Family("deit", "deit_tiny_patch16_224", {"img_size": 64, **_SHORT}),
    Family("densenet", "densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    Family("dla", "dla46_c"),
    Family("dpn", "dpn48b"),
    Family("edgenext", "edgenext_xx_small"),
    Family("efficientformer", "efficientformer_l1", size=224),
    Family("efficientformer_v2", "efficientformerv2_s0", {"img_size": 64}),
    Family("efficientnet", "test_efficientnet", quick=True),
    Family("efficientvim", "efficientvim_m1"),
    Family("efficientvit_mit", "efficientvit_b0"),
    Family("efficientvit_msra", "efficientvit_m0", {"img_size": 64}, num_groups=1),
    Family("eva", "eva02_tiny_patch14_224", {"img_size": 56, **_SHORT}, 56),
    Family("fasternet", "fasternet_t0"),
    Family("fastvit", "fastvit_t8"),
    Family("focalnet", "focalnet_tiny_srf"),
    Family("gcvit", "gcvit_xxtiny", {"img_size": 64, "window_size": (2, 2, 2, 2)}),
    Family("ghostnet", "ghostnet_050"),
    Family("hardcorenas", "hardcorenas_a"),
    Family("hgnet", "hgnetv2_b0"),
    Family("hiera", "hiera_tiny_224", {"img_size": 64, "embed_dim": 24, "stages": (1, 1, 1, 1)}),
    Family("hrnet", "hrnet_w18_small"),
    Family("iformer", "iformer_t"),
    Family("inception_next", "inception_next_atto"),
    Family("lcnetv2", "lcnetv2_small"),
    Family("levit", "levit_128s", {"img_size": 224}, 224),
    Family("lowformer", "lowformer_b0"),
    Family("mambaout", "test_mambaout"),
    Family("maxxvit", "test_coatnet", {"img_size": 64}),
    Family("metaformer", "poolformerv2_s12"),
    Family("mlp_mixer", "gmixer_12_224", {"img_size": 64}),
    Family("mobilenetv3", "lcnet_035"),
    Family("mobilevit", "mobilevit_xxs"),
    Family("mvitv2", "mvitv2_tiny", {"img_size": 64}),
    Family("nest", "nest_tiny", {"img_size": 64}),
    Family("nextvit", "nextvit_small"),
    Family("nfnet", "test_nfnet"),
    Family("pit", "pit_ti_224", {"img_size": 64}),
    Family("pvt_v2", "pvt_v2_b0"),
    Family("regnet", "regnetx_002"),
    Family("repghost", "repghostnet_050"),
    Family("repvit", "repvit_m0_9"),
    Family("res2net", "res2net50_26w_4s", {"layers": (1, 1, 1, 1)}),
    Family("resnest", "resnest14d", num_groups=1),
    Family("resnet", "test_resnet", quick=True),
    Family("resnetv2", "resnetv2_50", {"layers": (1, 1, 1, 1), "channels": (32, 64, 96, 128)}),
    Family("rexnet", "rexnet_100", {"width_mult": 0.5}, num_groups=1),
    Family("selecsls", "selecsls42"),
    Family("senet", "legacy_seresnet18"),
    Family("sequencer", "sequencer2d_s", {"img_size": 56, "layers": (1, 1, 1, 1), "embed_dims": (24, 48, 48, 48)}, 56),
    Family("shvit", "shvit_s1", size=128),
    Family("sknet", "skresnet18", num_groups=1),
    Family("starnet", "starnet_s050"),
    Family("swiftformer", "swiftformer_xs", size=224),
    Family("swin_transformer", "swin_tiny_patch4_window7_224",
           {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 6)}),
    Family("swin_transformer_v2", "swinv2_tiny_window8_256",
           {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 6)}),
    Family("swin_transformer_v2_cr", "swinv2_cr_tiny_224",
           {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 6)}),
    Family("tiny_vit", "tiny_vit_5m_224", {"depths": (1, 1, 2, 1)}),
    Family("tnt", "tnt_s_legacy_patch16_224", {"img_size": 64, "depth": 2}),
    Family("tresnet", "tresnet_m", {"layers": (1, 1, 1, 1)}),
    Family("twins", "twins_svt_small", {"img_size": 64, "depths": (1, 1, 1, 1), "wss": (2, 2, 2, 2)}),
    Family("visformer", "visformer_tiny", {"img_size": 64}),
    Family("vision_transformer", "test_vit", {"img_size": 64}, quick=True),
    Family("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224", {"img_size": 64, "depth": 2}),
    Family("vision_transformer_relpos", "test_vit_relpos", {"img_size": 64}),
    Family("vision_transformer_sam", "samvit_base_patch16_224",
           {"img_size": 64, "global_attn_indexes": (1,), "window_size": 2, **_SHORT}),
    Family("volo", "volo_d1_224", {"img_size": 64}),
    Family("vovnet", "ese_vovnet19b_slim"),
    Family("xception_aligned", "xception41p", size=96),
    Family("xcit", "xcit_nano_12_p16_224", {"img_size": 64, "depth": 2}),
)  # fmt: skip


@dataclass
class Found:
    """What became of a family.

    Attributes:
        family: Its name.
        model: The model's name.
        parameters: Their number.
        replaced: Modules that `fix` replaced, by class.
        num_groups: Its option; None for the default.
        outcome: "exact", "refused" or "wrong".
        said: Of a refusal or a fault what was said.
        error: Of the clipped sum, relative; None where nothing was compared.
        norm_error: Largest relative error of a sample's norm.
        move: Farthest that leaving out one sample moves the sum, over C.
    """

    family: str
    model: str
    parameters: int = 0
    replaced: dict[str, int] = field(default_factory=dict)
    num_groups: int | None = None
    outcome: str = "exact"
    said: str = ""
    error: float | None = None
    norm_error: float | None = None
    move: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def made(family: Family) -> nn.Module:
    """Return a family's model, as timm makes it, without stochastic depth."""
    torch.manual_seed(0)
    return timm().create_model(family.model, num_classes=CLASSES, **family.options).double().train()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    # Distilled models return the outputs of two heads while they are trained.
    heads = output if isinstance(output, (tuple, list)) else [output]
    return torch.stack([functional.cross_entropy(head, batch[1], reduction="none") for head in heads]).mean(0)


def measure(family: Family) -> Found:
    """Fix a family's model and compare it with one sample at a time."""
    model = made(family)
    found = Found(family.name, family.model, sum(p.numel() for p in model.parameters()), num_groups=family.num_groups)
    fixed = ModuleValidator.fix(model, num_groups=family.num_groups)
    pairs = zip(_by_name(model), _by_name(fixed), strict=True)
    found.replaced = dict(Counter(type(old).__name__ for old, new in pairs if type(old) is not type(new)))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, family.size, family.size, generator=generator, dtype=torch.float64)
    batch = images, torch.arange(SAMPLES) % CLASSES
    report = ghostclip.validate(fixed, batch, _loss, tolerance=TOLERANCE)
    if report.results:
        result = report.results[0]
        found.error, found.norm_error, found.move = result.error, result.norm_error, result.sensitivity
    if not report.ok:
        found.outcome = "wrong" if report.results else "refused"
        found.said = "; ".join(map(str, report.problems))
    return found


def _by_name(model: nn.Module) -> list[nn.Module]:
    """Modules without those inside others that `fix` replaces as a whole."""
    return [part for _, part in sorted(model.named_modules(), key=lambda pair: pair[0])]
