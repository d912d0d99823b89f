"""Image and video models: transformers, convolutional networks, and both."""

from functools import partial

import torch

from tests.architectures.table import OURS, SAMPLES, Architecture, architecture, pixels

_image = partial(architecture, "vision", inputs=pixels(16))
_larger = partial(architecture, "vision", inputs=pixels(32))
_BATCH_NORM = {
    "refused": "BatchNorm",
    "reason": "batch normalisation in training mode: a sample's output depends on the others of its batch",
}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4}
_PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "mlp_ratios": [2, 2],
    "num_attention_heads": [1, 2],
    "decoder_hidden_size": 8,
}
_STAGES = {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_size": 2}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def _frames(count: int, size: int = 16) -> dict:
    return {"pixel_values": torch.randn(SAMPLES, count, 3, size, size)}


def _video() -> dict:
    return {"pixel_values_videos": _frames(4)["pixel_values"]}


def _masked_frames() -> dict:
    mask = torch.zeros(SAMPLES, 8, dtype=torch.bool)
    mask[:, ::2] = True
    return {**_frames(4), "bool_masked_pos": mask}


def _masked_pixels() -> dict:
    return {**pixels(16)(), "bool_masked_pos": torch.tensor([[True, False, True, False]] * SAMPLES)}


ARCHITECTURES: list[Architecture] = [
    _image("ViTConfig", "ViTForImageClassification"),
    _image(
        "ViTConfig",
        "ViTForMaskedImageModeling",
        given={"encoder_stride": 8},
        inputs=_masked_pixels,
        outputs=("reconstruction",),
    ),
    _image("DeiTConfig", "DeiTForImageClassificationWithTeacher"),
    _image("BeitConfig", "BeitForImageClassification", given={"use_relative_position_bias": True}),
    _image(
        "Data2VecVisionConfig",
        "Data2VecVisionForImageClassification",
        given={"use_shared_relative_position_bias": True},
    ),
    _image("Dinov2Config", "Dinov2ForImageClassification", given={"mlp_ratio": 2}),
    _image("Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", given={"mlp_ratio": 2}),
    # In training mode it scales the positions by a random number, the same for a whole batch.
    _image("DINOv3ViTConfig", "DINOv3ViTModel", given={"pos_embed_rescale": None}, outputs=("pooler_output",)),
    _image(
        "DINOv3ConvNextConfig",
        "DINOv3ConvNextModel",
        given={"hidden_sizes": [8, 16], "depths": [1, 1]},
        outputs=("pooler_output",),
    ),
    _image("IJepaConfig", "IJepaForImageClassification"),
    _image("ViTMSNConfig", "ViTMSNForImageClassification"),
    _image("CLIPConfig", "CLIPForImageClassification"),
    _image("SiglipConfig", "SiglipForImageClassification"),
    _image("SwinConfig", "SwinForImageClassification", given=_SWIN),
    _image("Swinv2Config", "Swinv2ForImageClassification", given={**_SWIN, "pretrained_window_sizes": [0, 0]}),
    _image("DonutSwinConfig", "DonutSwinForImageClassification", given=_SWIN),
    _image(
        "Swin2SRConfig",
        "Swin2SRForImageSuperResolution",
        given={"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "image_size": 8, "patch_size": 1},
        inputs=pixels(8),
        outputs=("reconstruction",),
    ),
    _image("ConvNextConfig", "ConvNextForImageClassification", given=_STAGES),
    _image("ConvNextV2Config", "ConvNextV2ForImageClassification", given=_STAGES),
    _image(
        "FocalNetConfig",
        "FocalNetForImageClassification",
        given={
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    _larger(
        "HieraConfig",
        "HieraForImageClassification",
        given={
            "embed_dim": 8,
            "image_size": [32, 32],
            "patch_size": [7, 7],
            "depths": [1, 1],
            "num_heads": [1, 2],
            "num_query_pool": 1,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
        },
    ),
    _larger("PvtV2Config", "PvtV2ForImageClassification", given={**_PYRAMID, "image_size": 32}),
    _larger(
        "PvtConfig",
        "PvtForImageClassification",
        given={
            **_PYRAMID,
            "image_size": 32,
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "sequence_reduction_ratios": [2, 1],
        },
    ),
    _larger("SegformerConfig", "SegformerForImageClassification", given=_PYRAMID),
    _larger(
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        given={
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
        },
    ),
    _larger(
        "BitConfig",
        "BitForImageClassification",
        given={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
    ),
    _image("ImageGPTConfig", "ImageGPTForImageClassification", inputs=lambda: {"input_ids": torch.randint(29, (3, 9))}),
    _image(
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        given={
            "image_size": 16,
            "patch_size": 4,
            "mask_ratio": 0.0,
            "decoder_hidden_size": 8,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 12,
        },
        inputs=lambda: {**pixels(16)(), "noise": torch.rand(SAMPLES, 16)},
    ),
    _image(
        "TimesformerConfig",
        "TimesformerForVideoClassification",
        given={"num_frames": 4, "attention_type": "joint_space_time"},
        inputs=lambda: _frames(4),
        refused="lie in another order",
        reason=f"{OURS}: sample b's class token is taken from row b of all samples' frames",
    ),
    _image("VideoMAEConfig", "VideoMAEForVideoClassification", given={"num_frames": 4}, inputs=lambda: _frames(4)),
    _image(
        "VideoMAEConfig",
        "VideoMAEForPreTraining",
        given={
            "num_frames": 4,
            "decoder_hidden_size": 8,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 12,
        },
        inputs=_masked_frames,
    ),
    _image(
        "VivitConfig",
        "VivitForVideoClassification",
        given={"num_frames": 4, "tubelet_size": [2, 8, 8]},
        inputs=lambda: _frames(4),
    ),
    _image(
        "VJEPA2Config",
        "VJEPA2ForVideoClassification",
        given={
            "crop_size": 16,
            "frames_per_clip": 4,
            "hidden_size": 24,
            "mlp_ratio": 2.0,
            "num_pooler_layers": 1,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
        },
        inputs=_video,
    ),
    _larger("ResNetConfig", "ResNetForImageClassification", given=_RESNET, **_BATCH_NORM),
    _larger("ResNetConfig", "ResNetForImageClassification", given=_RESNET, name="ResNet in eval mode", train=False),
    _larger(
        "RegNetConfig",
        "RegNetForImageClassification",
        given={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        name="RegNet in eval mode",
        train=False,
    ),
    _larger(
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        given={"depth_multiplier": 0.25, "image_size": 32},
        **_BATCH_NORM,
    ),
    _larger(
        "LevitConfig",
        "LevitForImageClassification",
        given={
            "image_size": 32,
            "patch_size": 16,
            "hidden_sizes": [16, 24],
            "num_attention_heads": [1, 2],
            "depths": [1, 1],
            "key_dim": [4, 4],
            "down_ops": [["Subsample", 4, 2, 4, 2, 2], [""]],
            "mlp_ratio": [2, 2],
            "attention_ratio": [2, 2],
        },
        **_BATCH_NORM,
    ),
    _larger(
        "CvtConfig",
        "CvtForImageClassification",
        given={
            "patch_sizes": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "embed_dim": [8, 16],
            "num_heads": [1, 2],
            "depth": [1, 2],
            "mlp_ratio": [2.0, 2.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
        },
        name="CvT in eval mode",
        train=False,
        # torch's own gradient of an evaluated BatchNorm is wrong here for a batch of one (torch 2.13, by differences).
        reference="batched_graph",
    ),
    _larger(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        given={
            "image_size": 32,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "kernel_sizes": [3, 5],
            "in_channels": [32, 8],
            "out_channels": [8, 16],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
            "hidden_dim": 1280,
        },
        name="EfficientNet in eval mode",
        train=False,
    ),
    _larger(
        "MobileViTConfig",
        "MobileViTForImageClassification",
        given={
            "image_size": 32,
            "hidden_sizes": [8, 12, 16],
            "neck_hidden_sizes": [4, 8, 8, 12, 12, 16, 16],
            "patch_size": 2,
        },
        name="MobileViT in eval mode",
        train=False,
    ),
]
