"""A private run of a Trainer of transformers, and what it refuses; `ghostclip.integrations.transformers` uses both.

Trainer sees one *ticket* for each of the `gradient_accumulation_steps` batches that it takes for a step; the last of
them stands for a whole Poisson batch, which is computed in physical ones. So its steps, schedules and epochs count
releases. Options and overrides that contradict a private training are refused, each with its remedy.

Before the first step two records show that the loss is the model's own, and a record's alone: it may depend on the
records beside it without any mixing of rows, through the length that they are padded to (a softmax over all positions,
positions counted from a padded end). The engine looks for that in batches, but not where ranks hold a model in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip._validate import refuse_any
from ghostclip.data import BatchMemoryManager, DPDataLoader
from ghostclip.data.collation import unlike_pair
from ghostclip.data.physical_batches import count_rows, rows_of
from ghostclip.errors import DataError, InvalidOptionError, LossReductionError, SampleMixingError, UnsupportedModelError
from ghostclip.facade import GradSampleModule
from ghostclip.graph.takeover import hindered
from ghostclip.integrations._host import Contradiction, HostTraining, PrivacyArguments, refuse_options
from ghostclip.language import OWN, without_trace
from ghostclip.optim.wrapped import WrappedOptimizer


def check_same_loss(
    batch: Mapping[str, Any],
    *,
    native: Callable[[dict[str, Any]], Tensor | None],
    ours: Callable[[dict[str, Any]], Tensor],
    tolerance: float,
) -> None:
    """Check, on a few records, that the loss in the place of the model's own, if it has one, is the same."""
    # Up to the relative `tolerance`, by rounding.
    for record in _records(batch):
        loss = native(dict(record))
        if loss is None or not bool(loss.isfinite().all()):
            continue
        theirs, actual = float(loss), float(ours(dict(record)))
        if not _alike(theirs, actual, tolerance):
            raise LossReductionError(
                f"the model's own loss of one record is {theirs:.5g}, that of the record's labels {actual:.5g}, so "
                "that it adds something (a balancing or auxiliary loss?) or computes another. Switch that off in the "
                f"model's config, or {OWN}."
            )


def require_padding_without_effect(
    batch: Mapping[str, Any], *, ours: Callable[[dict[str, Any]], Tensor], tolerance: float
) -> None:
    """Check that the loss of a record is the same without the padding that longer records give it."""
    # The batch: a few records of different lengths, with an attention mask. `tolerance` is relative, for rounding.
    for record in _records(batch):
        cut = _without_padding(record)
        if cut is None:
            continue
        padded, alone = float(ours(dict(record))), float(ours(cut))
        if not _alike(padded, alone, tolerance):
            raise SampleMixingError(
                f"a record's loss is {alone:.5g} alone and {padded:.5g} with the padding of a longer record beside it, "
                "so that the longest record of a batch changes all others' gradients. Let the collator pad all records "
                "to one length (padding='max_length'), or on the side and with the positions that the model expects."
            )


def _records(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    size = count_rows(batch) or 0
    for number in range(size):
        yield rows_of(dict(batch), size, slice(number, number + 1))


def _without_padding(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a record without the columns that its mask leaves out; None where that cannot be told."""
    mask = record.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()) or not bool(mask.any()):
        return None
    attended = mask[0] != 0
    cut: dict[str, Any] = {}
    for name, value in record.items():
        along = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == len(attended)
        if along and name == "labels" and bool((value[0, ~attended] != -100).any()):
            return None
        cut[name] = value[:, attended] if along else value
    return cut


def _alike(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(1.0, abs(one))


_OURS: Final = ("ghostclip", "transformers", "trl")
# Each changes what a draw is, or reads gradients where there are none before the release.
_OVERRIDES: Final = ("get_train_dataloader", "_get_train_sampler")
# Trainers of trl, and those that know what a record is there, and its loss.
_OF_TRL: Final = {"SFTTrainer": "DPSFTTrainer", "DPOTrainer": "DPDPOTrainer", "RewardTrainer": "DPRewardTrainer"}


_OPTIONS: Final[tuple[Contradiction, ...]] = (
    ("train_sampling_strategy", lambda value: value != "random",
     "records are drawn independently of each other and of their order and length", "Leave it out"),
    ("group_by_length", bool, "records are drawn independently of each other and of their length", "Leave it out"),
    ("neftune_noise_alpha", lambda _: True,
     "its noise is scaled by the batch's longest record, which so changes the other records' gradients",
     "Leave it out"),
    ("auto_find_batch_size", bool, "it starts anew with another batch, which is another mechanism",
     "Leave it out: what does not fit in memory is halved in any case, and physical_batch='auto' finds a size"),
    ("fp16", bool, "its loss scale adapts to the data", "Use bf16=True"),
    ("use_liger_kernel", bool, "its fused layers are autograd functions that hide each record's gradient",
     "Leave it out; vocabulary_head='fused' saves what its fused loss would"),
    ("deepspeed", bool, "it sums gradients by itself", "Start processes with torchrun instead"),
    ("fsdp", bool, "it shards parameters below the clipping",
     "Start processes with torchrun, and give a model that fully_shard has divided among them"),
    ("parallelism_config", lambda _: True, "it splits records or parameters over processes",
     "Leave it out and start processes with torchrun"),
    ("n_gpu", lambda value: value > 1, "nn.DataParallel runs copies of the model that nobody clips",
     "Start a process for each device with torchrun, or show it one device (CUDA_VISIBLE_DEVICES)"),
    ("ignore_data_skip", bool, "a resumed training goes on with its draws, and nothing has to be skipped",
     "Leave it out"),
    ("dataloader_in_order", lambda value: value is False, "parts of a batch must come in order", "Leave it out"),
    ("optim", lambda value: "layerwise" in str(value).lower() or str(value).lower().endswith("lomo"),
     "it updates parameters during the backward, before there is a release", "Use another optimizer (adamw_torch)"),
    ("padding_free", bool,
     "it puts the records of a batch into one row, so that the row would count as one record",
     "Use padding_free=False"),
    ("activation_offloading", bool, "it moves what the clipping keeps", "Use gradient_checkpointing=True"),
)  # fmt: skip


def refuse(trainer: Any) -> None:
    """Refuse a training that could not be private, before it begins."""
    foreign = next((kind for kind in type(trainer).__mro__ if _library(kind) == "sentence_transformers"), None)
    if foreign is not None:
        raise InvalidOptionError(
            f"{type(trainer).__name__}: sentence-transformers' {foreign.__name__} makes its batches by itself, and "
            "most of its losses compare the texts of a batch with each other, so that no bound holds. Train its model "
            "in a loop of your own, by PrivacyEngine.make_private(module=model, ...), with a loss of each text or "
            "pair alone: (cosine_similarity(model(first)['sentence_embedding'], model(second)['sentence_embedding']) "
            "- scores) ** 2, its mean backwards."
        )
    arguments = trainer.args
    if not isinstance(arguments, PrivacyArguments):
        raise InvalidOptionError(
            f"args={type(arguments).__name__}: it does not say what privacy costs. Use DPTrainingArguments (or the "
            "class with DP in its name beside this trainer), which takes the same options and target_epsilon."
        )
    kinds = {kind.__name__: kind for kind in type(trainer).__mro__}
    theirs = next((name for name, kind in kinds.items() if _library(kind) == "trl"), None)
    if theirs is not None and _OF_TRL.get(theirs) not in kinds:
        ours = [_OF_TRL[theirs]] if theirs in _OF_TRL else list(_OF_TRL.values())
        raise InvalidOptionError(
            f"{type(trainer).__name__}: a record of trl's {theirs} may be a pair of answers, in two rows of a batch, "
            "and its loss may compare it with others. Inherit from ghostclip.integrations.trl."
            f"{' or '.join(ours)}, which clips each record, in the place of {theirs}."
        )
    refuse_options(_OPTIONS, lambda name: getattr(arguments, name, None), "{}")
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        raise InvalidOptionError("accelerate is configured for DeepSpeed or FSDP: start processes with torchrun.")
    _refuse_overrides(trainer)
    _refuse_data(trainer.train_dataset)
    _refuse_model(trainer)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _refuse_overrides(trainer: Any) -> None:
    for name in _OVERRIDES:
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
        if owner is not None and _library(owner) not in _OURS:
            raise InvalidOptionError(
                f"{owner.__name__}.{name}: the batches of a private training are drawn by ghostclip, each record with "
                "the same probability. Leave the override out (weights of records belong into the loss)."
            )


def _refuse_data(dataset: Any) -> None:
    refuse_any(
        (dataset is None, "train_dataset=None: a training needs one."),
        (not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"),
         f"train_dataset {type(dataset).__name__} (streaming): private sampling draws records by number from a data "
         "set of known length. Make it one: a list, or datasets.Dataset.from_generator (streaming=False)."),
        error=DataError,
    )  # fmt: skip


def _refuse_model(trainer: Any) -> None:
    model = trainer.model
    if isinstance(model, GradSampleModule):
        raise InvalidOptionError(
            "model is wrapped by make_private already: pass the model itself, the trainer makes it private."
        )
    if isinstance(trainer.optimizer, WrappedOptimizer) and trainer.private_run is None:
        raise InvalidOptionError("optimizers: the optimizer is private already; pass the plain one, or none.")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{type(model).__name__}: output_router_logits=True adds a loss that balances the experts over the whole "
            "batch, no sum over records. Set model.config.output_router_logits = False (trl: "
            "router_aux_loss_coef=0.0)."
        )


class Ticket(dict[str, Any]):
    """Stands for a batch in the host's loop; holds nothing but, afterwards, how many tokens were computed."""

    # `is_last`: the logical batch is computed with it; `records`: of this process in that batch, afterwards.
    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.is_last, self.records = is_last, 0


class PrivateRun(HostTraining):
    """What makes the training of one trainer private, with `steps` releases an epoch; lives as long as the trainer."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], arguments: Any) -> None:
        super().__init__(arguments, max_grad_norm=arguments.max_grad_norm, rank=lambda: int(arguments.process_index))
        self._arguments = arguments
        self._records = dataset, collate
        self.steps = len(self._private_loader().private_sampler)
        # What the host takes for batches: some parts for each step.
        self.batches = range(self.steps * int(arguments.gradient_accumulation_steps))
        self._pass: Iterator[Any] | None = None
        self._physical: Any = None
        self._manager: BatchMemoryManager | None = None
        self._loss = torch.zeros(())  # of the latest draw that had records

    # What the host is given

    def tickets(self) -> DataLoader[Ticket]:
        """Return the loader that the host iterates over: as many batches as it expects, without records."""
        # One by one by a sampler: a resumed training passes over the first ones of it.
        one_by_one = [[number] for number in self.batches]
        return DataLoader(self.batches, batch_sampler=one_by_one, collate_fn=self._ticket)  # type: ignore[arg-type]

    def begin(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Return the host's optimizer made private; the model stays what it is."""
        assert self.loader is not None, "made with the run"
        model.train()
        _, private = self.make_private(model, optimizer, steps=self.planned_steps, wrap_model=False)
        self._manager = BatchMemoryManager(
            data_loader=self.loader,
            max_physical_batch_size=self.options.physical_batch or int(self._arguments.train_batch_size),
            optimizer=self.optimizer,
        )
        # Whether graphs may take over unasked.
        self.unhindered = hindered(self.optimizer.clipper) is None
        return private

    def releases(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is the private one, of a training that has not ended."""
        clipper = getattr(self.optimizer, "clipper", None)
        return optimizer is self.optimizer and clipper is not None and bool(clipper.attached)

    # A step

    def compute(self, work: Callable[[Any], Tensor], ticket: Ticket, main_input: str) -> Tensor:
        """Return the mean loss of the next logical batch, run in physical ones up to the release."""
        # Without records that of the one before: the host averages over steps, and a 0 would be taken for a small loss.
        # `work` runs forward and backward on a part and returns its mean loss; the ticket is told how many tokens were
        # computed, counted in `main_input`.
        losses: list[tuple[Tensor, int]] = []
        counts, in_parts = [0, 0], self.optimizer.clipper.is_sharded
        while True:
            batch = self._next_physical()
            token = self.optimizer.current_token
            assert token is not None, "the loader hands out batches with tokens"
            if in_parts:
                # Ranks that hold the model in parts run it equally often, on no record too.
                losses.append((work(batch), token.size))
            elif token.size:
                losses += self._physical.run(batch, lambda part: (work(part), count_rows(part) or 0))
            if token.size:
                _count(batch, main_input, counts)
            if token.is_last:
                break
            self.optimizer.step()
        ticket[main_input] = torch.empty(counts[0], device="meta")
        ticket["attention_mask"] = torch.tensor(counts[1])
        ticket.records = rows = sum(rows for _, rows in losses)
        device = self.optimizer.params[0].device
        if rows:
            self._loss = sum((loss * (count / rows) for loss, count in losses if count), torch.zeros((), device=device))
        return self._loss.to(device)

    def example(self) -> tuple[Any, bool]:
        """Return a batch of two records, of different lengths if there are, and whether lengths differ."""
        return unlike_pair(*self._records)

    def rehearse(self, losses: Callable[[], Tensor]) -> None:
        """Run a forward and backward whose sums are dropped; the engine's checks see it."""
        clipper = self.optimizer.clipper
        try:
            with without_trace(clipper.model):
                clipper.backward(losses())
        finally:
            clipper.reset()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """End the pass over the data, whose rest is dropped, and leave the model as it was."""
        if self._pass is not None:
            self._pass.close()  # type: ignore[attr-defined]
            self._pass = None
        self.leave()

    def _ticket(self, numbers: list[int]) -> Ticket:
        parts = int(self._arguments.gradient_accumulation_steps)
        return Ticket(is_last=(numbers[0] + 1) % parts == 0)

    def _next_physical(self) -> Any:
        for _ in range(2):
            if self._pass is None:
                assert self._manager is not None, "made private before the first step"
                self._physical = self._manager.__enter__()
                self._pass = iter(self._physical)
            try:
                return next(self._pass)
            except StopIteration:
                self._pass = None
        raise DataError("the private loader hands out no further batch (a budget is spent?).")

    @property
    def planned_steps(self) -> int:
        """Releases of the whole training, as the host counts them."""
        if self._arguments.max_steps > 0:
            return int(self._arguments.max_steps)
        return math.ceil(self._arguments.num_train_epochs * self.steps)

    def _private_loader(self) -> DPDataLoader:
        arguments, (dataset, collate) = self._arguments, self._records
        workers = int(arguments.dataloader_num_workers)
        each, parts = int(arguments.train_batch_size), int(arguments.gradient_accumulation_steps)
        plain = DataLoader(
            dataset,
            batch_size=each,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
        )
        ranks = int(arguments.world_size)
        return self.private_loader(plain, ranks=ranks, accumulated=parts, source="train_dataset")


def _count(part: Any, main_input: str, counts: list[int]) -> None:
    """Add the tokens of a part to those counted: all, and those that are no padding."""
    main, mask = part.get(main_input), part.get("attention_mask")
    if isinstance(main, Tensor):
        counts[0] += main.numel()
        counts[1] += int(mask.sum()) if isinstance(mask, Tensor) else main.numel()
