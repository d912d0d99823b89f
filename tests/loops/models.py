"""Small models in float64, and the loss of each record alone for those that have one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.loops.world import CLASSES, FEATURES, LENGTH, VOCABULARY, Losses, World

functional = nn.functional


def mlp() -> nn.Module:
    """Return a classifier of features."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def dropping() -> nn.Module:
    """Return a classifier with dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, CLASSES)).double()


def tagger() -> nn.Module:
    """Return a model that predicts something of every token."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()


def encoder() -> nn.Module:
    """Return an encoder of features, for losses that compare records."""
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def cross_entropy(world: World) -> Losses:
    """Return the cross-entropy of each record alone."""
    features, labels = world.features, world.labels

    def losses(model: nn.Module, records: list[int]) -> Tensor:
        return functional.cross_entropy(model(features[records]), labels[records], reduction="none")

    return losses


def shared(losses: Losses, among: int) -> Losses:
    """Return losses as a host leaves them that divides each batch's by the number of batches that it adds up."""
    return lambda model, records: losses(model, records) / among


def tag_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross-entropy of every token, (B, T): is it a frequent one?"""
    scores = model(ids)
    return functional.cross_entropy(scores.transpose(1, 2), (ids > 6).long(), reduction="none")


def tag_means(world: World) -> Losses:
    """Return each record's mean over its own positions."""
    ids, mask = world.ids, world.mask

    def losses(model: nn.Module, records: list[int]) -> Tensor:
        own = mask[records]
        return (tag_losses(model, ids[records]) * own).sum(1) / own.sum(1)

    return losses


def gpt2() -> nn.Module:
    """Return a causal language model of transformers, untied and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY + 1,
        n_positions=8 * LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config).double()


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Return tokens as labels, padding left out."""
    return ids.masked_fill(~mask, -100)


def lm_means(world: World) -> Losses:
    """Return each record's mean over its own predicted tokens."""
    ids, mask = world.ids, world.mask

    def losses(model: nn.Module, records: list[int]) -> Tensor:
        scores = model(input_ids=ids[records], attention_mask=mask[records].long()).logits[:, :-1]
        targets = labels_of(ids[records], mask[records])[:, 1:]
        each = functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return each.sum(1) / (targets != -100).sum(1).clamp(min=1)

    return losses


def lm_records(world: World) -> list[dict[str, Any]]:
    """Return records as data sets of transformers hold them, unpadded."""
    return [
        {"input_ids": row[own].tolist(), "attention_mask": [1] * int(own.sum()), "labels": row[own].tolist()}
        for row, own in zip(world.ids, world.mask, strict=True)
    ]
