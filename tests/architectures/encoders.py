"""Text encoders, and models of an encoder and a decoder."""

from collections.abc import Mapping
from functools import partial

import torch

from tests.architectures.table import SAMPLES, Architecture, architecture, text, text_pair

_MASKED = [
    "Albert",
    "Camembert",
    "Data2VecText",
    "DistilBert",
    "Electra",
    "Ernie",
    "Esm",
    "EuroBert",
    "FNet",
    "LayoutLM",
    "Longformer",
    "MPNet",
    "Nystromformer",
    "ModernBert",
    "MegatronBert",
    "NomicBert",
    "RemBert",
    "RoFormer",
    "Roberta",
    "RobertaPreLayerNorm",
    "SqueezeBert",
    "XLMRoberta",
    "XLMRobertaXL",
    "ConvBert",
    "Deberta",
    "DebertaV2",
    "MobileBert",
    "Funnel",
    "BigBird",
    "Yoso",
    "Mra",
    "Xmod",
    "Luke",
]
_PAIRS = [
    "Bart",
    "BigBirdPegasus",
    "Blenderbot",
    "BlenderbotSmall",
    "LED",
    "LongT5",
    "M2M100",
    "MBart",
    "MT5",
    "Mvp",
    "Pegasus",
    "PegasusX",
    "PLBart",
    "ProphetNet",
    "T5",
    "T5Gemma",
    "UMT5",
]
_T5 = {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 12}
_GIVEN: Mapping[str, Mapping[str, object]] = {
    "Albert": {"num_hidden_layers": 2},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
    },
    "Deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Longformer": {"attention_window": 4},
    "LED": {"attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    "MobileBert": {"true_hidden_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 2},
    "RemBert": {"input_embedding_size": 12, "output_embedding_size": 12},
    "Luke": {"entity_vocab_size": 5, "entity_emb_size": 8},
    "Xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "Funnel": {"block_sizes": [1, 1], "d_inner": 24, "d_head": 8, "num_decoder_layers": 1},
    "BigBird": {"attention_type": "original_full"},
    "BigBirdPegasus": {"attention_type": "original_full"},
    "Nystromformer": {"num_landmarks": 7, "segment_means_seq_len": 7},
    "ProphetNet": {
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
    },
    "LongT5": {**_T5, "local_radius": 3},
    "T5": _T5,
    "MT5": _T5,
    "UMT5": _T5,
    "T5Gemma": {
        "encoder": {
            "vocab_size": 29,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        "decoder": {
            "vocab_size": 29,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
    },
}
_encoder = partial(architecture, "encoder", inputs=text)
_pair = partial(architecture, "encoder-decoder", inputs=text_pair)


def _canine() -> dict:
    return {
        "input_ids": torch.randint(4, 29, (SAMPLES, 8)),
        "attention_mask": torch.ones(SAMPLES, 8, dtype=torch.int64),
    }


ARCHITECTURES: list[Architecture] = [
    *(_encoder(f"{name}Config", f"{name}ForMaskedLM", given=_GIVEN.get(name)) for name in _MASKED),
    _encoder("BertConfig", "BertForMaskedLM"),
    _encoder(
        "IBertConfig",
        "IBertForMaskedLM",
        refused="updates the buffer",
        reason="its quantisers store the range of the samples' activations in the model, without noise",
    ),
    _encoder("BertConfig", "BertForSequenceClassification"),
    _encoder("DPRConfig", "DPRQuestionEncoder", outputs=("pooler_output",)),
    _encoder("MarkupLMConfig", "MarkupLMForTokenClassification", given={"xpath_unit_hidden_size": 4}),
    _encoder(
        "CanineConfig",
        "CanineForTokenClassification",
        given={
            "downsampling_rate": 2,
            "local_transformer_stride": 4,
            "upsampling_kernel_size": 2,
            "num_hash_buckets": 8,
            "num_hash_functions": 2,
        },
        inputs=_canine,
    ),
    *(_pair(f"{name}Config", f"{name}ForConditionalGeneration", given=_GIVEN.get(name)) for name in _PAIRS),
    _pair("MarianConfig", "MarianMTModel"),
    _pair(
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        given={"encoder_sparse_step": 1, "decoder_sparse_step": 1, "router_jitter_noise": 0.0, "expert_capacity": 4},
        refused="outputs of other samples changed",
        reason="an expert's capacity is shared by the tokens of all samples, whose rows it takes together",
    ),
    _pair(
        "FSMTConfig",
        "FSMTForConditionalGeneration",
        given={"src_vocab_size": 29, "tgt_vocab_size": 29, "langs": ["en", "de"]},
    ),
]
