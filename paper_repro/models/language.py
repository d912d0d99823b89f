"""Models of `transformers`, built from a configuration with random weights, each behind ids in, logits out.

Dropout is 0, so that one sample alone has the gradient that it has in a batch, which the check stands on. Positions and
segments are given for every sample: left to the models they have no batch axis, and Opacus refuses or miscounts them.

Shape suffixes: B samples, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _positions(ids_BT: Tensor) -> Tensor:
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).repeat(ids_BT.shape[0], 1)


class Logits(nn.Module):
    """A model of `transformers` on ids.

    Args:
        model: Any of them that gives `logits`.
        segments: Whether it takes token types.
        first_position: The number of the first position.
    """

    def __init__(self, model: nn.Module, *, segments: bool, first_position: int = 0) -> None:
        super().__init__()
        self.model = model
        self.segments = segments
        self.first_position = first_position

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits: of each sample, or of each position."""
        given: dict[str, Any] = {"position_ids": _positions(ids_BT) + self.first_position}
        if self.segments:
            given["token_type_ids"] = torch.zeros_like(ids_BT)
        return self.model(input_ids=ids_BT, **given).logits


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2_SIZES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20)}


def bert_last_block(*, small: bool = False) -> nn.Module:
    """BERT base (cased) for three classes, of which the last encoder layer, the pooler and the classifier are trained.

    Args:
        small: Two layers of width 64 in place of twelve of width 768.

    Returns:
        The model: 108,312,579 parameters, 7,680,771 of them trainable.
    """
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = BertConfig(vocab_size=500 if small else 28_996, num_labels=3, **NO_DROPOUT, **(sizes if small else {}))
    model = BertForSequenceClassification(config).requires_grad_(False)
    for part in (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier):
        part.requires_grad_(True)
    return Logits(model, segments=True)


def gpt2(layers: int, width: int, heads: int, *, vocabulary: int = 50_257, tied: bool = True) -> nn.Module:
    """GPT-2 with a language-model head.

    Args:
        layers: Number of blocks.
        width: Features of a position.
        heads: Attention heads.
        vocabulary: Rows of the token table.
        tied: Whether the head is the token table, as published.

    Returns:
        The model; with 12, 768, 12: 124,439,808 parameters.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Logits(GPT2LMHeadModel(config), segments=False)


def roberta(layers: int, width: int, heads: int, *, vocabulary: int = 50_265) -> nn.Module:
    """RoBERTa for two classes.

    Args:
        layers: Number of layers.
        width: Features of a position; the inner ones are four times as many.
        heads: Attention heads.
        vocabulary: Rows of the token table.

    Returns:
        The model; with 24, 1024, 16: 355,361,794 parameters.
    """
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        num_labels=2,
        classifier_dropout=0.0,
        **NO_DROPOUT,
    )
    return Logits(RobertaForSequenceClassification(config), segments=True, first_position=2)


class ImageLogits(nn.Module):
    """A model of `transformers` on images.

    Args:
        model: Any of them that gives `logits`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each sample."""
        return self.model(pixel_values=x).logits


def beit(layers: int, width: int, heads: int, *, image: int = 224, classes: int = 1000) -> nn.Module:
    """BEiT on patches of 16 x 16.

    Args:
        layers: Number of layers.
        width: Features of a position; the inner ones are four times as many.
        heads: Attention heads.
        image: Height and width of an image.
        classes: Number of classes.

    Returns:
        The model; with 24, 1024, 16: BEiT-large.
    """
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        use_relative_position_bias=True,
        drop_path_rate=0.0,
        num_labels=classes,
        **NO_DROPOUT,
    )
    return ImageLogits(BeitForImageClassification(config))
