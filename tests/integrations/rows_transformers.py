"""What becomes of the features of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.hugging import padded
from benchmarks.loops.models import gpt2, lm_means, lm_records
from benchmarks.loops.world import CLASSES, VOCABULARY, World
from tests.integrations.table import Row, row
from tests.integrations.trainings import arguments_of, exact, own_losses, refused, releases_of, run

ROWS: list[Row] = []
_HOST = {"tool": "transformers", "hosts": ("transformers", "accelerate")}
_SUMS = "sums against one record at a time, leave-one-out, noise, ε"
_IDS = VOCABULARY + 1


def _train(world: World, make: Callable[[], nn.Module], records: Any, collate: Any, losses: Any, **options: Any) -> Any:
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    trainer_options = options.pop("trainer", {})
    kind = options.pop("kind", DPTrainer)
    arguments = arguments_of(world, options.pop("arguments", DPTrainingArguments), **options)
    model = world.watch(make, losses)
    trainer = kind(model, arguments, train_dataset=records, data_collator=collate, **trainer_options)
    run(world, trainer)
    return trainer


def _causal(world: World, **options: Any) -> Any:
    return _train(world, options.pop("make", gpt2), lm_records(world), padded, lm_means(world), **options)


def _with_own_loss(world: World, make: Callable[[], nn.Module], records: Any, collate: Any, **options: Any) -> Any:
    return _train(world, make, records, collate, own_losses(records, collate), **options)


# Models


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def causal(folder: Path) -> None:
    """Causal language model, records of 2 to 14 tokens"""
    exact(_causal, clips=(0.5, 0.1))


def _bert(kind: str, **options: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=_IDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return getattr(transformers, kind)(config).double()


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def masked(folder: Path) -> None:
    """Masked language model (tied head)"""

    def train(world: World) -> None:
        _with_own_loss(world, lambda: _bert("BertForMaskedLM"), lm_records(world), padded)

    exact(train)


def _classified(world: World, labels: list[Any]) -> list[dict[str, Any]]:
    return [{**record, "labels": label} for record, label in zip(lm_records(world), labels, strict=True)]


def _padded_but(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(records) | {"labels": torch.tensor([record["labels"] for record in records])}


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sequence_classification(folder: Path) -> None:
    """Sequence classification"""

    def train(world: World) -> None:
        records = _classified(world, world.labels.tolist())
        _with_own_loss(
            world, lambda: _bert("BertForSequenceClassification", num_labels=CLASSES), records, _padded_but
        )

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def regression(folder: Path) -> None:
    """Sequence classification with one label (regression)"""

    def train(world: World) -> None:
        records = _classified(world, [[float(value)] for value in world.features[:, 0]])
        _with_own_loss(world, lambda: _bert("BertForSequenceClassification", num_labels=1), records, _padded_but)

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def several_labels(folder: Path) -> None:
    """Sequence classification with several labels at once"""

    def train(world: World) -> None:
        labels = [[1.0, 0.0, float(label == 0)] for label in world.labels]
        _with_own_loss(
            world,
            lambda: _bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
            _classified(world, labels),
            _padded_but,
        )

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def token_classification(folder: Path) -> None:
    """Token classification"""

    def train(world: World) -> None:
        records = [
            {**record, "labels": [token % 3 if place % 3 else -100 for place, token in enumerate(record["labels"])]}
            for record in lm_records(world)
        ]

        def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
            made = padded(batch)
            width = made["input_ids"].shape[1]
            rows = [record["labels"] + [-100] * (width - len(record["labels"])) for record in batch]
            return made | {"labels": torch.tensor(rows)}

        _with_own_loss(world, lambda: _bert("BertForTokenClassification", num_labels=3), records, collate)

    exact(train)


def _questions(world: World, width: int | None) -> None:
    records = [
        {name: record[name] for name in ("input_ids", "attention_mask")}
        | {"start_positions": 0, "end_positions": len(record["input_ids"]) - 1}
        for record in lm_records(world)
    ]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = padded(batch)
        del made["labels"]
        if width is not None:
            made = {name: nn.functional.pad(value, (0, width - value.shape[1])) for name, value in made.items()}
        names = ("start_positions", "end_positions")
        return made | {name: torch.tensor([record[name] for record in batch]) for name in names}

    _with_own_loss(world, lambda: _bert("BertForQuestionAnswering"), records, collate)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def question_answering(folder: Path) -> None:
    """Question answering (start and end positions), padded to one length"""
    exact(lambda world: _questions(world, 14))


@row(ROWS, **_HOST, outcome="refused", note="longest record of a batch")
def padding_that_counts(folder: Path) -> None:
    """Question answering, padded to the longest (its softmax is over padding too)"""
    refused(lambda world: _questions(world, None))


@row(ROWS, **_HOST, outcome="refused", note="longest record of a batch")
def left_padding(folder: Path) -> None:
    """GPT-2 with padding on the left and no position_ids"""

    def left(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = padded(batch)
        ends = made["attention_mask"].sum(1)
        return {
            name: torch.stack([row.roll(len(row) - int(end)) for row, end in zip(value, ends, strict=True)])
            for name, value in made.items()
        }

    refused(lambda world: _train(world, gpt2, lm_records(world), left, None))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sequence_to_sequence(folder: Path) -> None:
    """Seq2SeqTrainer with T5"""

    def make() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=_IDS,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
        return T5ForConditionalGeneration(config).double()

    def train(world: World) -> None:
        from ghostclip.integrations.transformers import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments

        kinds = {"kind": DPSeq2SeqTrainer, "arguments": DPSeq2SeqTrainingArguments}
        _with_own_loss(world, make, lm_records(world), padded, **kinds)

    # T5 computes its norms in 32 bits.
    exact(train, tolerance=1e-6)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def vision(folder: Path) -> None:
    """Image classification with ViT, the default collator"""

    def make() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return ViTForImageClassification(config).double()

    def train(world: World) -> None:
        from transformers import default_data_collator

        images = torch.randn(len(world.labels), 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
        records = [
            {"pixel_values": image, "labels": int(label)} for image, label in zip(images, world.labels, strict=True)
        ]
        _with_own_loss(world, make, records, default_data_collator)

    exact(train)


# Losses


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def own_loss_function(folder: Path) -> None:
    """compute_loss_func that returns one loss a record"""
    from ghostclip.losses import token_losses

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return token_losses(outputs.logits, labels)

    exact(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


@row(ROWS, **_HOST, outcome="refused", note="token")
def loss_over_the_batch(folder: Path) -> None:
    """compute_loss_func that divides by the batch's tokens"""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    refused(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def label_smoothing(folder: Path) -> None:
    """label_smoothing_factor"""
    from transformers.trainer_pt_utils import LabelSmoother

    def train(world: World) -> None:
        records = lm_records(world)

        def losses(model: nn.Module, numbers: list[int]) -> Tensor:
            found = []
            for number in numbers:
                batch = padded([records[number]])
                labels = batch.pop("labels")
                found.append(LabelSmoother(epsilon=0.2)(model(**batch), labels, shift_labels=True))
            return torch.stack(found)

        _train(world, gpt2, records, padded, losses, label_smoothing_factor=0.2)

    # LabelSmoother of the reference adds up in 32 bits.
    exact(train, tolerance=1e-6)


# Options of Trainer


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def datasets_columns(folder: Path) -> None:
    """datasets.Dataset with columns that the model does not take"""
    from datasets import Dataset

    def train(world: World) -> None:
        records = Dataset.from_list([{**record, "text": "x"} for record in lm_records(world)])
        _train(world, gpt2, records, padded, lm_means(world))

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def workers(folder: Path) -> None:
    """dataloader_num_workers=1"""
    exact(lambda world: _causal(world, dataloader_num_workers=1, dataloader_prefetch_factor=2))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def found_physical_batch(folder: Path) -> None:
    """physical_batch="auto\""""
    exact(lambda world: _causal(world, physical_batch="auto"))


@row(ROWS, **_HOST, outcome="exact", note="each release against that of a larger device")
def out_of_memory(folder: Path) -> None:
    """Memory runs out in the middle of a batch"""

    def make() -> nn.Module:
        model = gpt2()
        model.register_forward_pre_hook(_full, with_kwargs=True)
        return model

    # The oracle takes each backward of a half for one more pass; so this is compared with a larger device.
    plain, halved = releases_of(_causal), releases_of(lambda world: _causal(world, make=make))
    assert len(plain) == len(halved) == 3
    for one, other in zip(plain, halved, strict=True):
        assert all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in one)


def _full(module: nn.Module, args: Any, options: Any) -> None:
    """Let a device hold two records in training."""
    if module.training and len(options["input_ids"]) > 2:
        raise torch.OutOfMemoryError("out of memory")


@row(ROWS, **_HOST, outcome="exact", note=_SUMS + "; rounding of bfloat16 allowed")
def bf16(folder: Path) -> None:
    """bf16=True"""
    exact(lambda world: _causal(world, make=lambda: gpt2().float(), bf16=True), tolerance=0.03)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def gradient_checkpointing(folder: Path) -> None:
    """gradient_checkpointing=True, not reentrant"""
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    exact(lambda world: _causal(world, **given))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def reentrant_checkpointing(folder: Path) -> None:
    """gradient_checkpointing=True, reentrant"""
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    exact(lambda world: _causal(world, **given))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def hooks(folder: Path) -> None:
    """grad_sample_mode="hooks\""""
    exact(lambda world: _causal(world, grad_sample_mode="hooks"))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sgd(folder: Path) -> None:
    """optim="sgd" and a cosine schedule with warm-up"""
    exact(lambda world: _causal(world, optim="sgd", lr_scheduler_type="cosine", warmup_steps=1))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS, ranks=2)
def two_processes(folder: Path) -> None:
    """Two processes (torchrun, gloo)"""
    exact(_causal, ranks=2)


def _refusal(feature: str, note: str, **options: Any) -> None:
    def drive(folder: Path) -> None:
        refused(lambda world: _causal(world, **options))

    drive.__doc__ = feature
    row(ROWS, **_HOST, outcome="refused", note=note)(drive)


_refusal('train_sampling_strategy="group_by_length"', "order and length", train_sampling_strategy="group_by_length")
_refusal("neftune_noise_alpha", "longest record", neftune_noise_alpha=5.0)
_refusal("auto_find_batch_size=True", "physical_batch", auto_find_batch_size=True)
_refusal("use_liger_kernel=True", "autograd functions", use_liger_kernel=True)
_refusal('optim="lomo"', "during the backward", optim="lomo")
_refusal("ignore_data_skip=True", "skipped", ignore_data_skip=True)
_refusal("More records in a batch than there are", "24 records", per_device_train_batch_size=20)
