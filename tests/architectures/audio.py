"""Speech and sound: from waves, from spectra, and to both."""

from functools import partial

import torch
from torch import Tensor, nn

from tests.architectures.table import SAMPLES, Architecture, architecture, ids, padded
from tests.cases.table import probe_loss
from tests.reference import Batch

_WAVE = {
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def _wave() -> dict:
    mask = torch.ones(SAMPLES, 160, dtype=torch.int64)
    mask[1, 120:] = 0
    return {"input_values": torch.randn(SAMPLES, 160), "attention_mask": mask}


def _spectrum() -> dict:
    return {"input_features": torch.randn(SAMPLES, 8, 20), "decoder_input_ids": ids(5)}


def _frames() -> dict:
    return {"input_features": torch.randn(SAMPLES, 12, 8), "attention_mask": padded(12), "decoder_input_ids": ids(5)}


def _codes() -> dict:
    return {"input_ids": torch.randint(3, 29, (SAMPLES, 2, 6))}


def _books_folded(model: nn.Module, batch: Batch) -> Tensor:
    """Fold a sample's books of codes into the batch axis, as the model takes them."""
    logits = model(input_ids=batch["input_ids"].flatten(0, 1)).logits
    return probe_loss(logits.unflatten(0, (-1, 2)))


_audio = partial(architecture, "audio", inputs=_wave, given=_WAVE)

ARCHITECTURES: list[Architecture] = [
    _audio(
        "Wav2Vec2Config", "Wav2Vec2ForCTC", given={**_WAVE, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
    ),
    _audio("HubertConfig", "HubertForCTC"),
    _audio(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        given={"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12},
        inputs=_spectrum,
    ),
    _audio(
        "ASTConfig",
        "ASTForAudioClassification",
        given={"num_mel_bins": 8, "max_length": 16, "patch_size": 4, "frequency_stride": 2, "time_stride": 2},
        inputs=lambda: {"input_values": torch.randn(SAMPLES, 16, 8)},
    ),
    _audio("WavLMConfig", "WavLMForCTC", given={**_WAVE, "num_buckets": 8, "max_bucket_distance": 16}),
    _audio(
        "MusicgenDecoderConfig",
        "MusicgenForCausalLM",
        given={"num_codebooks": 2},
        inputs=_codes,
        loss=_books_folded,
        refused="6 samples that the model's first input holds",
        reason="its input folds a sample's books of codes into the batch axis; a module that takes samples may hold it",
    ),
    _audio(
        "Speech2TextConfig",
        "Speech2TextForConditionalGeneration",
        given={
            "input_feat_per_channel": 8,
            "conv_channels": 8,
            "conv_kernel_sizes": [3, 3],
            "max_source_positions": 24,
            "max_target_positions": 12,
        },
        inputs=_frames,
    ),
    _audio("SEWConfig", "SEWForCTC", given={**_WAVE, "squeeze_factor": 2}),
    _audio("UniSpeechSatConfig", "UniSpeechSatForCTC"),
    _audio("Data2VecAudioConfig", "Data2VecAudioForCTC"),
    _audio("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", given={**_WAVE, "classifier_proj_size": 8}),
    _audio(
        "Wav2Vec2ConformerConfig",
        "Wav2Vec2ConformerForCTC",
        given={**_WAVE, "conv_depthwise_kernel_size": 3},
        name="Wav2Vec2Conformer in eval mode",
        train=False,
        reference="batched_graph",
    ),
    _audio(
        "Wav2Vec2BertConfig",
        "Wav2Vec2BertForCTC",
        given={"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "apply_spec_augment": False},
        inputs=lambda: {"input_features": torch.randn(SAMPLES, 9, 8), "attention_mask": padded(9)},
    ),
    _audio(
        "MoonshineConfig",
        "MoonshineForConditionalGeneration",
        given={
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "encoder_num_key_value_heads": 2,
            "decoder_num_key_value_heads": 2,
        },
        inputs=lambda: {"input_values": torch.randn(SAMPLES, 1600), "decoder_input_ids": ids(5)},
    ),
    _audio(
        "BarkSemanticConfig",
        "BarkSemanticModel",
        given={
            "input_vocab_size": 29,
            "output_vocab_size": 29,
            "block_size": 16,
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
        },
        inputs=lambda: {"input_ids": ids()},
    ),
    _audio(
        "SpeechT5Config",
        "SpeechT5ForSpeechToText",
        given={**_WAVE, "max_speech_positions": 40, "max_text_positions": 12, "encoder_max_relative_position": 4},
        inputs=lambda: {**_wave(), "decoder_input_ids": ids(5)},
    ),
]
