"""What becomes of the features of transformers' Trainer."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.losses import token_losses
from tests.integrations.table import Row, row
from tests.integrations.trainings import MIXED, arguments_of, exact, own_losses, refused, releases_of, run, silent
from tests.loops.hugging import padded, quiet
from tests.loops.models import gpt2, lm_means, lm_records, shared
from tests.loops.world import CLASSES, VOCABULARY, World

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
    """Causal language model, records of 2 to 14 tokens."""
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
    """Masked language model (tied head)."""

    def train(world: World) -> None:
        _with_own_loss(world, lambda: _bert("BertForMaskedLM"), lm_records(world), padded)

    exact(train)


def _classified(world: World, labels: list[Any]) -> list[dict[str, Any]]:
    return [{**record, "labels": label} for record, label in zip(lm_records(world), labels, strict=True)]


def _padded_but(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(records) | {"labels": torch.tensor([record["labels"] for record in records])}


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sequence_classification(folder: Path) -> None:
    """Sequence classification."""

    def train(world: World) -> None:
        records = _classified(world, world.labels.tolist())
        _with_own_loss(world, lambda: _bert("BertForSequenceClassification", num_labels=CLASSES), records, _padded_but)

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def regression(folder: Path) -> None:
    """Sequence classification with one label (regression)."""

    def train(world: World) -> None:
        records = _classified(world, [[float(value)] for value in world.features[:, 0]])
        _with_own_loss(world, lambda: _bert("BertForSequenceClassification", num_labels=1), records, _padded_but)

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def several_labels(folder: Path) -> None:
    """Sequence classification with several labels at once."""

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
    """Token classification."""

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
    """Question answering (start and end positions), padded to one length."""
    exact(lambda world: _questions(world, 14))


@row(ROWS, **_HOST, outcome="refused", note="longest record of a batch")
def padding_that_counts(folder: Path) -> None:
    """Question answering, padded to the longest (its softmax is over padding too)."""
    refused(lambda world: _questions(world, None))


@row(ROWS, **_HOST, outcome="refused", note="longest record of a batch")
def left_padding(folder: Path) -> None:
    """GPT-2 with padding on the left and no position_ids."""

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
    """Seq2SeqTrainer with T5."""

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
    """Image classification with ViT, the default collator."""

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
    """compute_loss_func that returns one loss a record."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return token_losses(outputs.logits, labels)

    exact(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


@row(ROWS, **_HOST, outcome="refused", note="token")
def loss_over_the_batch(folder: Path) -> None:
    """compute_loss_func that divides by the batch's tokens."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    refused(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


@row(ROWS, **_HOST, outcome="refused", note="num_items_in_batch: that is None.*one loss per record")
def loss_over_the_number_of_items(folder: Path) -> None:
    """compute_loss_func that divides by num_items_in_batch."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return token_losses(outputs.logits, labels).sum() / num_items_in_batch

    refused(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


@row(ROWS, **_HOST, outcome="refused", note="no gradient leads from one to the other")
def loss_weighted_over_the_batch(folder: Path) -> None:
    """compute_loss_func with weights normalised over the batch."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses_B = token_losses(outputs.logits, labels)
        return losses_B * losses_B.detach().softmax(0)

    refused(lambda world: _causal(world, trainer={"compute_loss_func": loss}))


def _own_step(world: World, mix: Callable[[Any], Any] = lambda part: part, *, ours: bool = False) -> None:
    """Train with a `training_step` of one's own, which may mix records, and may call ours."""
    from ghostclip.integrations.transformers import DPTrainer

    class _Own(DPTrainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs = mix(self._prepare_inputs(inputs))
            if ours:
                return super().training_step(model, inputs, num_items_in_batch)
            model.train()
            with self.compute_loss_context_manager():
                loss = nn.functional.cross_entropy(
                    model(inputs_embeds=inputs["inputs_embeds"]).logits, inputs["labels"]
                )
            self.accelerator.backward(loss)
            return loss.detach()

    def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {name: torch.stack([record[name] for record in records]) for name in records[0]}

    records = [
        {"inputs_embeds": x.view(-1, 1).repeat(1, 8), "labels": y}
        for x, y in zip(world.features, world.labels, strict=True)
    ]
    make = partial(_bert, "BertForSequenceClassification", num_labels=CLASSES)
    _with_own_loss(world, make, records, collate, kind=_Own)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def own_training_step(folder: Path) -> None:
    """A training_step of one's own, with its own loss and backward."""
    exact(_own_step)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def training_step_around_ours(folder: Path) -> None:
    """A training_step of one's own that looks at its inputs and calls super()."""
    exact(partial(_own_step, ours=True))


def _mixed(part: Any) -> Any:
    return {**part, "inputs_embeds": 0.7 * part["inputs_embeds"] + 0.3 * part["inputs_embeds"].flip(0)}


@row(ROWS, **_HOST, outcome="refused", note=MIXED)
def training_step_that_mixes(folder: Path) -> None:
    """Mixup in a training_step of one's own that calls super()."""
    refused(partial(_own_step, mix=_mixed, ours=True))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def label_smoothing(folder: Path) -> None:
    """label_smoothing_factor."""
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
    """datasets.Dataset with columns that the model does not take."""
    from datasets import Dataset

    def train(world: World) -> None:
        records = Dataset.from_list([{**record, "text": "x"} for record in lm_records(world)])
        _train(world, gpt2, records, padded, lm_means(world))

    exact(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def workers(folder: Path) -> None:
    """dataloader_num_workers=1."""
    exact(lambda world: _causal(world, dataloader_num_workers=1, dataloader_prefetch_factor=2))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def found_physical_batch(folder: Path) -> None:
    r"""physical_batch="auto\"."""
    exact(lambda world: _causal(world, physical_batch="auto"))


@row(ROWS, **_HOST, outcome="exact", note="each release against that of a larger device")
def out_of_memory(folder: Path) -> None:
    """Memory runs out in the middle of a batch."""

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
    """bf16=True."""
    exact(lambda world: _causal(world, make=lambda: gpt2().float(), bf16=True), tolerance=0.03)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def gradient_checkpointing(folder: Path) -> None:
    """gradient_checkpointing=True, not reentrant."""
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    exact(lambda world: _causal(world, **given))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def reentrant_checkpointing(folder: Path) -> None:
    """gradient_checkpointing=True, reentrant."""
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    exact(lambda world: _causal(world, **given))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def hooks(folder: Path) -> None:
    r"""grad_sample_mode="hooks\"."""
    exact(lambda world: _causal(world, grad_sample_mode="hooks"))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def graph(folder: Path) -> None:
    r"""grad_sample_mode="graph\"."""
    # Graphs run operation by operation: compiling takes longer than a test may.
    with patch("ghostclip.graph.step.GraphOptions", partial(ghostclip.GraphOptions, backend="aten", most=1)):
        exact(lambda world: _causal(world, grad_sample_mode="graph"))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sgd(folder: Path) -> None:
    """optim="sgd" and a cosine schedule with warm-up."""
    exact(lambda world: _causal(world, optim="sgd", lr_scheduler_type="cosine", warmup_steps=1))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS, ranks=2, slow=True)
def two_processes(folder: Path) -> None:
    """Two processes (torchrun, gloo)."""
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


_refusal("fp16=True", "bf16", fp16=True)
_refusal("No noise_multiplier and no target_epsilon", "give one of the two", noise_multiplier=None)
_refusal("No target_delta", "target_delta", target_delta=None)
_refusal("A misspelt clipping", "clipping='flatt'", clipping="flatt")


@row(ROWS, **_HOST, outcome="refused", note="DPTrainingArguments")
def plain_arguments(folder: Path) -> None:
    """DPTrainer with plain TrainingArguments."""
    from transformers import TrainingArguments

    from ghostclip.integrations.transformers import DPTrainer

    def train(world: World) -> None:
        arguments = TrainingArguments(output_dir=world.folder, use_cpu=True, report_to=[], disable_tqdm=True)
        DPTrainer(world.watch(gpt2), arguments, train_dataset=lm_records(world), data_collator=padded).train()

    refused(train)


@row(ROWS, **_HOST, outcome="refused", note="known length")
def streaming(folder: Path) -> None:
    """Streaming data set without a size."""
    from datasets import Dataset

    def train(world: World) -> None:
        records = Dataset.from_list(lm_records(world)).to_iterable_dataset()
        _train(world, gpt2, records, padded, None)

    refused(train)


@row(ROWS, **_HOST, outcome="refused", note="same probability")
def weighted_sampler(folder: Path) -> None:
    """Weighted sampler (_get_train_sampler overridden)."""
    from ghostclip.integrations.transformers import DPTrainer

    class Weighted(DPTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)

    refused(lambda world: _causal(world, kind=Weighted))


@row(ROWS, **_HOST, outcome="refused", note="same probability")
def own_loader(folder: Path) -> None:
    """Loader of one's own (get_train_dataloader overridden)."""
    from ghostclip.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=6, collate_fn=padded)

    refused(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note="padding-free")
def flattening(folder: Path) -> None:
    """DataCollatorWithFlattening (padding-free)."""
    from transformers import DataCollatorWithFlattening

    def train(world: World) -> None:
        _train(world, gpt2, lm_records(world), DataCollatorWithFlattening(return_tensors="pt"), None)

    refused(train)


@row(ROWS, **_HOST, outcome="refused", note="data_collator.*mixup")
def mixup(folder: Path) -> None:
    """Collator that mixes records (mixup)."""

    def mixed(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = padded(batch)
        share = torch.rand(())
        soft = nn.functional.one_hot(made["input_ids"], _IDS).double()
        made["inputs_embeds"] = (share * soft + (1 - share) * soft.roll(1, 0))[..., :8]
        del made["input_ids"]
        return made

    refused(lambda world: _train(world, gpt2, lm_records(world), mixed, None))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def random_masks(folder: Path) -> None:
    """DataCollatorForLanguageModeling, which masks at random (not mixed up with mixup)."""
    from transformers import DataCollatorForLanguageModeling

    from tests.loops.trl_loops import _tokenizer

    def train(world: World) -> None:
        tokenizer = _tokenizer()
        tokenizer.add_special_tokens({"mask_token": "w1"})
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, return_tensors="pt")
        records = [{name: record[name] for name in ("input_ids", "attention_mask")} for record in lm_records(world)]
        _train(world, lambda: _bert("BertForMaskedLM"), records, collate, None)

    exact(train, unseen="masks are drawn anew in each run")


@row(ROWS, **_HOST, outcome="refused", note="pass the model itself")
def wrapped_already(folder: Path) -> None:
    """A model that make_private has wrapped already."""
    from ghostclip import GradSampleModule

    refused(lambda world: _train(world, lambda: GradSampleModule(gpt2()), lm_records(world), padded, None))


@row(ROWS, **_HOST, outcome="refused", note="trial on the same records")
def search(folder: Path) -> None:
    """hyperparameter_search."""
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    def train(world: World) -> None:
        arguments = arguments_of(world, DPTrainingArguments)
        DPTrainer(model_init=gpt2, args=arguments, train_dataset=[{}]).hyperparameter_search()

    refused(train)


def _mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=_IDS,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=32,
        **options,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return MixtralForCausalLM(config).double()


@row(ROWS, **_HOST, outcome="refused", note="balances the experts")
def balancing(folder: Path) -> None:
    """Mixture of experts with its balancing loss (output_router_logits=True)."""
    make = lambda: _mixtral(output_router_logits=True)  # noqa: E731
    refused(lambda world: _train(world, make, lm_records(world), padded, None))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def experts(folder: Path) -> None:
    """Mixture of experts without it."""

    def train(world: World) -> None:
        _with_own_loss(world, _mixtral, lm_records(world), padded)

    # Mixtral computes norms and routing in 32 bits.
    exact(train, tolerance=1e-5)


@row(ROWS, **_HOST, outcome="refused", note="n_gpu=2")
def data_parallel(folder: Path) -> None:
    """Several GPUs in one process (nn.DataParallel)."""
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    def train(world: World) -> None:
        arguments = arguments_of(world, DPTrainingArguments)
        trainer = DPTrainer(world.watch(gpt2), arguments, train_dataset=lm_records(world), data_collator=padded)
        trainer.args._n_gpu = 2
        run(world, trainer)

    refused(train)


@row(ROWS, **_HOST, outcome="refused", note="'labels'")
def no_labels(folder: Path) -> None:
    """Batches without labels."""

    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = padded(batch)
        del made["labels"]
        return made

    refused(lambda world: _train(world, gpt2, lm_records(world), collate, None))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def own_trainer(folder: Path) -> None:
    """A Trainer of one's own below DPTrainer, with another optimizer and callbacks."""
    from transformers import Trainer, TrainerCallback

    from ghostclip.integrations.transformers import DPTrainer

    class Theirs(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.01)
            return self.optimizer

    class Seen(TrainerCallback):
        pass

    class Both(DPTrainer, Theirs):
        pass

    exact(lambda world: _causal(world, kind=Both, trainer={"callbacks": [Seen()]}))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def own_create_optimizer(folder: Path) -> None:
    """create_optimizer overridden, without super."""
    from ghostclip.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD([{"params": list(self.model.parameters()), "lr": 0.01}])
            return self.optimizer

    exact(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def compiled(folder: Path) -> None:
    """torch_compile=True."""
    exact(lambda world: _causal(world, torch_compile=True, torch_compile_backend="eager"))


# What stays as ever


def _run(
    folder: Path,
    *,
    dies_at: int = 0,
    resume: bool | None = None,
    seed: int = 3,
    make: Callable[[], nn.Module] = lambda: gpt2().float(),
    collate: Callable[[Any], Any] = padded,
    **options: Any,
) -> Any:
    """Train a model with dropout, with noise, and return its trainer."""
    from transformers import TrainerCallback

    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    class KilledError(RuntimeError):
        pass

    class Killer(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if dies_at and state.global_step == dies_at:
                raise KilledError

    world = World(sigma=1.0, clip=0.5, folder=str(folder))
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "reproducible_seed": seed}
    arguments = arguments_of(world, DPTrainingArguments, **(given | options))
    torch.manual_seed(1)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    records = lm_records(world)
    trainer = DPTrainer(
        model, arguments, train_dataset=records, eval_dataset=records, data_collator=collate, callbacks=[Killer()]
    )
    silent(trainer)
    with contextlib.suppress(KilledError):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _history(trainer: Any) -> list[dict[str, float]]:
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
    return [{name: value for name, value in logs.items() if name not in timed} for logs in trainer.state.log_history]


def _resumed(folder: Path, step: int, **options: Any) -> None:
    whole = _run(folder / "whole", **options)
    _run(folder / "cut", dies_at=step, **options)
    # The other seed is the proof that keys come from the checkpoint.
    resumed = _run(folder / "cut", resume=True, seed=4, **options)
    assert resumed.state.global_step == whole.state.global_step == 6
    for (name, p), (_, q) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs after a resume at step {step}"
    assert _history(whole)[:-1] == _history(resumed)[:-1], "logs differ"
    assert whole.privacy_engine.get_epsilon(1e-3) == resumed.privacy_engine.get_epsilon(1e-3)
    assert len(resumed.privacy_engine.accountant) == 6


@row(
    ROWS,
    **_HOST,
    outcome="exact",
    note="weights, logs and ε bit-equal to the undisturbed training, dropout and noise on",
)
def resumed_in_an_epoch(folder: Path) -> None:
    """Killed in an epoch and resumed (resume_from_checkpoint=True)."""
    _resumed(folder, 2)


@row(
    ROWS,
    **_HOST,
    outcome="exact",
    note="weights, logs and ε bit-equal to the undisturbed training, dropout and noise on",
)
def resumed_between_epochs(folder: Path) -> None:
    """Killed between epochs and resumed."""
    _resumed(folder, 4)


@row(ROWS, **_HOST, outcome="exact", note="weights, logs and ε bit-equal to the undisturbed training, random masks too")
def resumed_with_masks(folder: Path) -> None:
    """A collator that masks at random, killed in an epoch and resumed."""

    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = padded(batch)
        made["labels"] = made["labels"].masked_fill(torch.rand(made["labels"].shape) < 0.5, -100)
        return made

    _resumed(folder, 2, make=lambda: _bert("BertForMaskedLM").float(), collate=collate)


@row(ROWS, **_HOST, outcome="refused", note="noise|sample|mechanism")
def resumed_as_another(folder: Path) -> None:
    """Resumed with another noise."""
    _run(folder, dies_at=2)
    _run(folder, resume=True, noise_multiplier=0.5)


@row(ROWS, **_HOST, outcome="exact", note="ε at each log against dp-accounting; steps and schedule against releases")
def epsilon_in_logs(folder: Path) -> None:
    """ε beside the loss in logs, trainer_state.json and metrics; target_epsilon kept."""
    import json

    from tests.loops.judge import epsilon_of

    trainer = _run(folder, noise_multiplier=None, target_epsilon=3.0, max_steps=-1, num_train_epochs=1.5)
    assert trainer.state.global_step == 6 == len(trainer.privacy_engine.accountant)
    state = json.loads((folder / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [logs for logs in state["log_history"] if "loss" in logs]
    assert [logs["step"] for logs in logged] == [1, 2, 3, 4, 5, 6]
    sigma = trainer.private_run.optimizer.noise_multiplier
    for logs in logged:
        due = epsilon_of(0.25, sigma, logs["step"])
        assert due * 0.99 <= logs["epsilon"] <= due * 1.01, f"{logs['epsilon']} where {due} is due"
        assert "grad_norm" not in logs
    assert 2.9 < logged[-1]["epsilon"] <= 3.0
    assert trainer.state.log_history[-1]["epsilon"] == logged[-1]["epsilon"]
    assert logged[-1]["learning_rate"] < logged[0]["learning_rate"], "the schedule ran over the releases"


@row(ROWS, **_HOST, outcome="exact", note="eval_loss as of a plain Trainer; config.json; predictions; the model loads")
def evaluated_and_saved(folder: Path) -> None:
    """Evaluation, load_best_model_at_end, predict, save_pretrained."""
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    trainer = _run(folder, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True)
    assert trainer.state.best_model_checkpoint is not None
    metrics = trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    loaded = GPT2LMHeadModel.from_pretrained(folder / "saved")
    for (name, p), (_, q) in zip(trainer.model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    arguments = TrainingArguments(str(folder / "plain"), use_cpu=True, report_to=[], disable_tqdm=True)
    plain = Trainer(loaded, arguments, eval_dataset=trainer.eval_dataset, data_collator=padded)
    assert abs(plain.evaluate()["eval_loss"] - metrics["eval_loss"]) < 1e-6
    assert trainer.predict(trainer.eval_dataset[:2]).predictions is not None
    best = min(logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs)
    assert abs(best - metrics["eval_loss"]) < 1e-6


@row(ROWS, **_HOST, outcome="refused", note="budget|epsilon|ε")
def trained_twice(folder: Path) -> None:
    """train() a second time beyond target_epsilon."""
    trainer = _run(folder, noise_multiplier=None, target_epsilon=3.0, save_strategy="no")
    trainer.train()


@row(ROWS, **_HOST, outcome="exact", note="tokens as of the records drawn")
def tokens_counted(folder: Path) -> None:
    """include_num_input_tokens_seen."""
    trainer = _run(folder, include_num_input_tokens_seen="non_padding", save_strategy="no")
    assert 6 * 2 < trainer.state.num_input_tokens_seen < 6 * 24 * 14
    assert trainer.state.total_flos > 0


@row(ROWS, **_HOST, outcome="exact", note=_SUMS + "; two records were tried first, for what one cannot show")
def one_at_once(folder: Path) -> None:
    """per_device_train_batch_size=1, gradient_accumulation_steps=6."""
    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}

    def train(world: World) -> None:
        trainer = _causal(world, **given)
        assert "fewer than two" not in trainer.privacy_engine.summary(1e-3)

    exact(train)


@row(ROWS, **_HOST, outcome="refused", note="depends on")
def mixing_one_at_once(folder: Path) -> None:
    """A model that looks at the whole batch, one record at once."""

    def make() -> nn.Module:
        model = gpt2()
        model.transformer.wte.register_forward_hook(lambda module, args, output: output - output.mean(0, keepdim=True))
        return model

    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    refused(lambda world: _causal(world, make=make, **given))


@row(ROWS, **_HOST, outcome="refused", note="no account")
def resumed_without_account(folder: Path) -> None:
    """Resumed from a checkpoint of save_only_model=True."""
    _run(folder, dies_at=2, save_only_model=True)
    _run(folder, resume=True)


@row(ROWS, **_HOST, outcome="refused", note="without an account")
def resumed_from_public(folder: Path) -> None:
    """Resumed from a checkpoint of a plain Trainer."""
    from transformers import Trainer, TrainingArguments

    quiet()
    records = lm_records(World())
    arguments = TrainingArguments(
        str(folder / "run"), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, save_steps=2
    )
    trainer = Trainer(gpt2().float(), arguments, train_dataset=records, data_collator=padded)
    silent(trainer)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    _run(folder, resume=True)


@row(ROWS, **_HOST, outcome="exact", note="as with a model that is given")
def made_by_trainer(folder: Path) -> None:
    """model_init."""
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    world = World(sigma=1.0, clip=0.5, folder=str(folder))
    trainer = DPTrainer(
        model_init=lambda: gpt2().float(),
        args=arguments_of(world, DPTrainingArguments),
        train_dataset=lm_records(world),
        data_collator=padded,
    )
    run(world, trainer)
    assert len(trainer.privacy_engine.accountant) == 3


@row(ROWS, **_HOST, outcome="exact", note="ROUGE-like evaluation by generation runs beside private steps")
def generated(folder: Path) -> None:
    """Seq2SeqTrainer with predict_with_generate."""
    from transformers import T5Config, T5ForConditionalGeneration

    from ghostclip.integrations.transformers import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments

    world = World(sigma=1.0, clip=0.5, folder=str(folder))
    config = T5Config(
        vocab_size=_IDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, pad_token_id=0, decoder_start_token_id=0
    )
    records = lm_records(world)
    given = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 2}
    seen: list[Any] = []

    def count(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"tokens": float(prediction.predictions.size)}

    trainer = DPSeq2SeqTrainer(
        T5ForConditionalGeneration(config),
        arguments_of(world, DPSeq2SeqTrainingArguments, **given),
        train_dataset=records,
        eval_dataset=records[:4],
        data_collator=padded,
        compute_metrics=count,
    )
    run(world, trainer)
    assert seen, "nothing was generated"
    assert any("eval_tokens" in logs for logs in trainer.state.log_history)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def override_of_the_loss(folder: Path) -> None:
    """compute_loss overridden, with a loss that is a mean over records."""
    from ghostclip.integrations.transformers import DPTrainer
    from ghostclip.losses import token_losses

    class Own(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = token_losses(outputs.logits, labels).mean()
            return (loss, outputs) if return_outputs else loss

    exact(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note="loss")
def override_that_adds(folder: Path) -> None:
    """compute_loss overridden, with a term of the whole batch added to DPTrainer's."""
    from ghostclip.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **given)
            loss = loss + 0.1 * outputs.logits.mean((0, 1)).square().sum()
            return (loss, outputs) if return_outputs else loss

    refused(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note="another gradient than the losses of its two halves")
def override_that_weighs(folder: Path) -> None:
    """compute_loss overridden, with weights of the records that are normalised over the batch."""
    from ghostclip.integrations.transformers import DPTrainer
    from ghostclip.losses import token_losses

    class Own(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            losses = token_losses(outputs.logits, labels)
            loss = (losses * losses.detach().softmax(0)).sum()
            return (loss, outputs) if return_outputs else loss

    refused(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note=MIXED)
def override_that_mixes(folder: Path) -> None:
    """compute_loss overridden, with embeddings of the records that are mixed (mixup)."""
    from ghostclip.integrations.transformers import DPTrainer
    from ghostclip.losses import token_losses

    class Own(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            with torch.no_grad():
                embedded = model.get_input_embeddings()(inputs["input_ids"])
            mixed = 0.6 * embedded + 0.4 * embedded.flip(0)
            outputs = model(inputs_embeds=mixed, attention_mask=inputs["attention_mask"])
            return token_losses(outputs.logits, inputs["labels"]).mean()

    refused(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note="kept of an earlier batch")
def override_that_keeps(folder: Path) -> None:
    """compute_loss overridden, with a running mean of the batches' targets."""
    from ghostclip.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        mean: Any = 0.0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0, 0]
            targets = inputs["input_ids"][:, 0].float()
            losses = (logits - targets + self.mean).square()
            self.mean = 0.9 * self.mean + 0.1 * targets.mean()
            return losses.mean()

    refused(lambda world: _causal(world, kind=Own))


@row(ROWS, **_HOST, outcome="refused", note="BatchNorm|batch_norm|normalization|mixes")
def batch_norm(folder: Path) -> None:
    """ResNet with BatchNorm."""

    def make() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            num_channels=1, embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=CLASSES
        )
        return ResNetForImageClassification(config).double()

    def train(world: World) -> None:
        from transformers import default_data_collator

        images = torch.randn(24, 1, 32, 32).double()
        records = [{"pixel_values": image, "labels": 1} for image in images]
        _train(world, make, records, default_data_collator, None)

    refused(train)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def override_in_place(folder: Path) -> None:
    """compute_loss overridden, with DPTrainer's loss scaled in place."""
    from ghostclip.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs=False, **given)
            loss *= 0.5
            return loss

    def train(world: World) -> None:
        _train(world, gpt2, lm_records(world), padded, shared(lm_means(world), 2), kind=Own)

    # A bound that clips nobody: of clipped gradients the scale is not seen.
    exact(train, clips=(50.0,))


_refusal("max_grad_norm=0 (Trainer's way to switch its clipping off)", "max_grad_norm", max_grad_norm=0.0)
_refusal("A noise_multiplier below 0", "noise_multiplier", noise_multiplier=-1.0)


@row(ROWS, **_HOST, outcome="refused", note="private already")
def private_optimizer(folder: Path) -> None:
    """An optimizer that make_private has made."""
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    def train(world: World) -> None:
        model, records = world.watch(gpt2), lm_records(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = world.loader(records, collate_fn=padded)
        _, optimizer, _ = world.private(model, optimizer, loader, wrap_model=False)
        arguments = arguments_of(world, DPTrainingArguments)
        given = {"train_dataset": records, "data_collator": padded, "optimizers": (optimizer, None)}
        run(world, DPTrainer(model, arguments, **given))

    refused(train)


def _set_later(name: str, value: Any, note: str) -> None:
    """A refusal of an option whose library is not here: set when Trainer has looked at it."""

    def drive(folder: Path) -> None:
        from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

        def train(world: World) -> None:
            arguments = arguments_of(world, DPTrainingArguments)
            trainer = DPTrainer(world.watch(gpt2), arguments, train_dataset=lm_records(world), data_collator=padded)
            setattr(trainer.args, name, value)
            run(world, trainer)

        refused(train)

    drive.__doc__ = f"{name}={value!r}."
    row(ROWS, **_HOST, outcome="refused", note=note)(drive)


_set_later("deepspeed", {"zero_optimization": {"stage": 2}}, "torchrun")
_set_later("fsdp", "full_shard", "torchrun")
_set_later("parallelism_config", "cp_size=2", "torchrun")
_set_later("optim", "galore_adamw_layerwise", "during the backward")
_set_later("dataloader_in_order", False, "in order")


class _Own(nn.Module):
    """A model of one's own, whose loss is a mean over records or compares them."""

    def __init__(self, *, contrastive: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.contrastive = contrastive

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.inner(features)
        if self.contrastive:
            return {"loss": nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))}
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def _own_model(world: World, *, contrastive: bool) -> None:
    from transformers import default_data_collator

    records = [{"features": x, "labels": int(y)} for x, y in zip(world.features, world.labels, strict=True)]

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        return torch.stack([model(world.features[[n]], world.labels[[n]])["loss"] for n in numbers])

    _train(world, lambda: _Own(contrastive=contrastive).double(), records, default_data_collator, losses)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def own_model(folder: Path) -> None:
    """A model of one's own that returns a mean loss."""
    exact(lambda world: _own_model(world, contrastive=False))


@row(ROWS, **_HOST, outcome="refused", note="contrastive|other samples")
def contrastive(folder: Path) -> None:
    """A contrastive loss."""
    refused(lambda world: _own_model(world, contrastive=True))


@row(ROWS, **_HOST, outcome="exact", note="ε is on the bar")
def progress_bar(folder: Path) -> None:
    """ε on the progress bar."""
    from transformers import ProgressCallback

    trainer = _run(folder, disable_tqdm=True, save_strategy="no", max_steps=1)
    shown: list[str] = []

    class Bar:
        def set_postfix(self, *, epsilon: str, refresh: bool) -> None:
            shown.append(epsilon)

    trainer.add_callback(ProgressCallback())
    trainer.callback_handler.callbacks[-1].training_bar = Bar()
    trainer.callback_handler.callbacks[-1].on_log = lambda *args, **options: None
    trainer.log({"loss": 1.0})
    assert shown == [f"{trainer.privacy_engine.get_epsilon(1e-3):.2f}"]
