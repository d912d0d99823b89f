"""Loops of transformers' Trainer, with a tiny GPT-2 in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.loops.loop import Loop
from tests.loops.models import functional, gpt2, labels_of, lm_means, lm_records, shared
from tests.loops.rows import row
from tests.loops.world import BATCH, World

LOOPS: list[Loop] = []
_HOST = {"hosts": ("transformers", "accelerate"), "clips": (0.5,)}


def padded(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad records to the longest, as DataCollatorForLanguageModeling does."""
    width = max(len(record["input_ids"]) for record in records)
    ids = torch.tensor([record["input_ids"] + [0] * (width - len(record["input_ids"])) for record in records])
    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in records])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels_of(ids, mask.bool())}


def _arguments(world: World, **options: Any) -> Any:
    from transformers import TrainingArguments

    quiet()
    given = {"per_device_train_batch_size": BATCH, "max_steps": 3}
    return TrainingArguments(**(in_a_world(world) | given | options))


def in_a_world(world: World) -> dict[str, Any]:
    """Return what any Trainer in a world is told: where to write, a rate of 0.1, its seed, nothing on the screen."""
    return {
        "output_dir": str(Path(world.folder) / "run"),
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "seed": world.seed,
        "logging_steps": 1,
    }


def quiet() -> None:
    """Keep transformers' and datasets' progress out of what is printed."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _silent(trainer: Any) -> Any:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def _unlogged(kind: type) -> Any:
    """A Trainer whose author has switched off what reads gradients before the step."""

    class Unlogged(kind):  # type: ignore[misc, valid-type]
        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
            return grad_norm

    return Unlogged


def _private(world: World, *, losses: Any = None, **options: Any) -> tuple[Any, Any, DataLoader]:
    bare = world.watch(gpt2, losses)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.1, weight_decay=0.0)
    loader = world.loader(lm_records(world), collate_fn=padded)
    _, optimizer, loader = world.private(bare, optimizer, loader, wrap_model=False, **options)
    return bare, optimizer, loader


def _with_loader(kind: type, loader: Any) -> type:
    class Own(kind):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            return loader

    return Own


def _own_loss() -> type:
    """A Trainer with the private loader and a loss that is each record's own mean."""
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: Any = None, **_: Any) -> Any:
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            targets = inputs["labels"][:, 1:]
            each = functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
            loss = (each.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()
            return (loss, {"logits": scores}) if return_outputs else loss

    return Own


@row(LOOPS, **_HOST, match="draw|loader|token")
def _trainer_as_it_is(world: World) -> None:
    """Trainer with the private model and optimizer and its own loader, nothing else changed."""
    from transformers import Trainer

    model, optimizer, _ = _private(world)
    records = lm_records(world)
    trainer = Trainer(
        model, _arguments(world), train_dataset=records, data_collator=padded, optimizers=(optimizer, None)
    )
    _silent(trainer).train()


@row(LOOPS, **_HOST, match="token|length|sample")
def _trainer_with_the_private_loader(world: World) -> None:
    """Trainer whose get_train_dataloader returns the private loader; loss over the batch's tokens."""
    from transformers import Trainer

    model, optimizer, loader = _private(world)
    own = _with_loader(Trainer, loader)
    _silent(own(model, _arguments(world), optimizers=(optimizer, None))).train()


@row(LOOPS, **_HOST, expect="exact", releases=3)
def _trainer_with_own_loss(world: World) -> None:
    """Trainer with the private loader and a loss of each record's own tokens."""
    model, optimizer, loader = _private(world, losses=lm_means(world))
    own = _with_loader(_own_loss(), loader)
    _silent(own(model, _arguments(world, max_grad_norm=0.0), optimizers=(optimizer, None))).train()


@row(LOOPS, **(_HOST | {"clips": (2.0,)}))
def _trainer_counts_tokens(world: World) -> None:
    """The same, the norm not logged: the loss is divided by num_items_in_batch."""
    from transformers import Trainer

    model, optimizer, loader = _private(world)
    own = _with_loader(_unlogged(Trainer), loader)
    _silent(own(model, _arguments(world, max_grad_norm=0.0), optimizers=(optimizer, None))).train()


@row(LOOPS, **_HOST)
def _trainer_with_its_own_loader(world: World) -> None:
    """The private loader is thrown away and Trainer draws batches of its own, the norm not logged."""
    model, optimizer, _ = _private(world, losses=lm_means(world))
    records = lm_records(world)
    own = _unlogged(_own_loss())
    arguments = _arguments(world, max_grad_norm=0.0)
    trainer = own(model, arguments, train_dataset=records, data_collator=padded, optimizers=(optimizer, None))
    _silent(trainer).train()


@row(LOOPS, **_HOST, passes=2)
def _trainer_accumulates(world: World) -> None:
    """Trainer with gradient_accumulation_steps=2, the private loader, the norm not logged."""
    model, optimizer, loader = _private(world, losses=shared(lm_means(world), 2))
    own = _with_loader(_unlogged(_own_loss()), loader)
    arguments = _arguments(world, max_grad_norm=0.0, gradient_accumulation_steps=2, max_steps=2)
    _silent(own(model, arguments, optimizers=(optimizer, None))).train()


@row(LOOPS, **_HOST, uneven="Trainer counts physical batches, and ends in the middle of a logical one")
def _batch_memory_manager_in_trainer(world: World) -> None:
    """BatchMemoryManager's loader as Trainer's, the norm not logged."""
    from ghostclip.data.physical_batches import BatchMemoryManager

    model, optimizer, loader = _private(world, losses=lm_means(world))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as physical:
        own = _with_loader(_unlogged(_own_loss()), physical)
        arguments = _arguments(world, max_grad_norm=0.0, max_steps=-1, num_train_epochs=1)
        _silent(own(model, arguments, optimizers=(optimizer, None))).train()


@row(LOOPS, **_HOST)
def _trainer_evaluates_and_saves(world: World) -> None:
    """The model itself in Trainer (wrap_model=False): evaluation, config.json, columns of the data set."""
    model, optimizer, loader = _private(world, losses=lm_means(world))
    own = _with_loader(_own_loss(), loader)
    trainer = _silent(
        own(
            model, _arguments(world), eval_dataset=lm_records(world), data_collator=padded, optimizers=(optimizer, None)
        )
    )
    metrics = trainer.evaluate()
    trainer.save_model(world.folder)
    if "eval_loss" not in metrics:
        world.said = "no loss of the evaluation, and nothing said so"
    elif not (Path(world.folder) / "config.json").exists():
        world.said = "config.json was not saved, and nothing said so"
    trainer.train()


@row(LOOPS, **_HOST)
def _resumed_through_trainer(world: World) -> None:
    """Saved and resumed through Trainer, the norm not logged: the optimizer's state comes back."""
    for steps, resume in ((2, False), (4, True)):
        world.restart()
        model, optimizer, loader = _private(world, losses=lm_means(world))
        own = _with_loader(_unlogged(_own_loss()), loader)
        arguments = _arguments(world, max_grad_norm=0.0, max_steps=steps, save_strategy="steps", save_steps=2)
        _silent(own(model, arguments, optimizers=(optimizer, None))).train(resume_from_checkpoint=resume or None)


def _flattening(world: World) -> None:
    from transformers import DataCollatorWithFlattening

    bare = world.watch(gpt2, lm_means(world))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.1)
    loader = world.loader(lm_records(world), collate_fn=DataCollatorWithFlattening(return_tensors="pt"))
    model, optimizer, loader = world.private(bare, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@row(LOOPS, expect="refused", **(_HOST | {"clips": (0.5, 0.1)}))
def _data_collator_with_flattening(world: World) -> None:
    """DataCollatorWithFlattening: one row holds the whole batch."""
    _flattening(world)
