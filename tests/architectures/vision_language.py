"""Models of images and text together: read as one sequence, by cross attention, or compared with each other."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.architectures.table import SAMPLES, Architecture, architecture, ids, padded, pixels, text
from tests.cases.table import probe_loss
from tests.reference import Batch

_TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
_LLAMA = {"model_type": "llama", **_TEXT}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_IMAGE = 31
_COMPARED = {
    "refused": "samples",
    "reason": "the logits compare every image with every text of the batch: each row holds the other samples",
}


def _with_images(images: int, size: int = 16) -> Callable[[], Batch]:
    """Return a function that makes texts with `images` places for an image's tokens, and an image each."""

    def make() -> Batch:
        tokens = ids(images + 4)
        tokens[:, 1 : 1 + images] = _IMAGE
        mask = padded(images + 4)
        return {"input_ids": tokens, "attention_mask": mask, **pixels(size)()}

    return make


def _each_with_images(model: nn.Module, batch: Batch) -> Tensor:
    """Give every sample a list of one image."""
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pixel_values=batch["pixel_values"][:, None],
    )
    return probe_loss(output.logits)


def _patches_of_all(model: nn.Module, batch: Batch) -> Tensor:
    """Hand over the patches of all samples as one list, as models for images of any size take them."""
    patches = batch["patches"]
    grid = torch.tensor([[1, 2, 2]]).expand(len(patches), 3)
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pixel_values=patches.flatten(0, 1),
        image_grid_thw=grid,
        mm_token_type_ids=(batch["input_ids"] == _IMAGE).int(),
    )
    return probe_loss(output.logits)


def _patches() -> Batch:
    made = _with_images(1)()
    del made["pixel_values"]
    return {**made, "patches": torch.randn(SAMPLES, 4, 3 * 2 * 4 * 4)}


def _tower(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    """Return a loss on one tower's features alone."""

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        given = {key: value for key, value in batch.items() if key != "weight"}
        features = getattr(model, name)(**given)
        return probe_loss(features if isinstance(features, Tensor) else features.pooler_output)

    return losses


def _pair() -> Batch:
    return {**text(), **pixels(16)()}


_reads = partial(architecture, "vision-language")
_compares = partial(architecture, "contrastive", inputs=_pair, outputs=("logits_per_image",))
_DUAL = {"projection_dim": 8}

ARCHITECTURES: list[Architecture] = [
    _reads(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        given={"text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": _IMAGE, "image_seq_length": 4},
        inputs=_with_images(4),
    ),
    _reads(
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        given={
            "text_config": {**_TEXT, "model_type": "gemma"},
            "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
            "image_token_index": _IMAGE,
            "projection_dim": 16,
        },
        # Without these it sees the future in a batch where no sample is padded.
        inputs=lambda: {**_with_images(4)(), "token_type_ids": torch.zeros(SAMPLES, 8, dtype=torch.int64)},
    ),
    _reads(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        given={
            "text_config": {
                **_TEXT,
                "model_type": "qwen2_vl_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
                "mlp_ratio": 2,
            },
            "image_token_id": _IMAGE,
            "video_token_id": 30,
        },
        inputs=_patches,
        loss=_patches_of_all,
    ),
    _reads(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        given={
            "text_config": _LLAMA,
            "vision_config": {k: v for k, v in _CLIP.items() if k != "model_type"},
            "image_token_id": _IMAGE,
            "scale_factor": 2,
        },
        inputs=_with_images(1),
        loss=_each_with_images,
    ),
    _reads(
        "GitConfig",
        "GitForCausalLM",
        given={
            "vision_config": {k: v for k, v in _CLIP.items() if k != "model_type"},
            "num_image_with_embedding": None,
        },
        inputs=lambda: {**text(), **pixels(16)()},
    ),
    _reads(
        "BlipConfig",
        "BlipForConditionalGeneration",
        given={"text_config": {"encoder_hidden_size": 16, "hidden_size": 16}, "projection_dim": 8},
        inputs=_pair,
    ),
    _reads(
        "Blip2Config",
        "Blip2ForConditionalGeneration",
        given={
            "text_config": {**_TEXT, "model_type": "llama"},
            "qformer_config": {"encoder_hidden_size": 16, "cross_attention_frequency": 1},
            "num_query_tokens": 4,
            "image_token_index": _IMAGE,
        },
        inputs=_with_images(4),
    ),
    _reads(
        "ViltConfig",
        "ViltForTokenClassification",
        given={"modality_type_vocab_size": 2, "max_image_length": -1},
        inputs=_pair,
    ),
    _reads(
        "VisualBertConfig",
        "VisualBertForQuestionAnswering",
        given={"visual_embedding_dim": 8},
        inputs=lambda: {**text(), "visual_embeds": torch.randn(SAMPLES, 4, 8)},
    ),
    _compares("CLIPConfig", "CLIPModel", given=_DUAL, **_COMPARED),
    _compares(
        "CLIPConfig",
        "CLIPModel",
        given=_DUAL,
        name="CLIP, images alone",
        inputs=pixels(16),
        loss=_tower("get_image_features"),
    ),
    _compares(
        "CLIPConfig", "CLIPModel", given=_DUAL, name="CLIP, texts alone", inputs=text, loss=_tower("get_text_features")
    ),
    _compares(
        "CLIPVisionConfig", "CLIPVisionModelWithProjection", given=_DUAL, inputs=pixels(16), outputs=("image_embeds",)
    ),
    _compares("CLIPTextConfig", "CLIPTextModelWithProjection", given=_DUAL, inputs=text, outputs=("text_embeds",)),
    _compares("SiglipConfig", "SiglipModel", **_COMPARED),
    _compares("SiglipVisionConfig", "SiglipVisionModel", inputs=pixels(16), outputs=("pooler_output",)),
    _compares("SiglipTextConfig", "SiglipTextModel", inputs=text, outputs=("pooler_output",)),
    _compares("AltCLIPConfig", "AltCLIPModel", given=_DUAL, **_COMPARED),
    _compares("ChineseCLIPConfig", "ChineseCLIPModel", given=_DUAL, **_COMPARED),
]
