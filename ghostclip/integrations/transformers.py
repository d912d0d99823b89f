"""Trainers of transformers whose training is private: `DPTrainer`, `DPSeq2SeqTrainer` and their arguments.

A script imports these in the place of `Trainer` and `TrainingArguments` and says what privacy may cost; everything else
stays. A Trainer of somebody else's becomes private by inheritance: ``class Private(TheirTrainer, DPTrainer)``, because
the private parts are below all that other trainers add.

Needs transformers.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip._memory import is_out_of_memory
from ghostclip.errors import DataError, LossReductionError, NotOfferedError, ResumeError
from ghostclip.graph import GraphOptions, GraphStep
from ghostclip.graph.takeover import Takeover, left_of
from ghostclip.integrations._host import PrivacyArguments, forgotten, suggests_fields, warn_if_untested
from ghostclip.integrations._trainer import PrivateRun, Ticket, check_same_loss, refuse, require_padding_without_effect
from ghostclip.integrations.peft import AdapterWatch, use_plain_operations
from ghostclip.language import evaluating, losses_of, task_of, use_fused, without_adapters
from ghostclip.optim import DPOptimizer
from ghostclip.optim.wrapped import WrappedOptimizer

try:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise NotOfferedError(
        f"ghostclip.integrations.transformers: transformers' Trainer cannot be imported ({error}). Install it: "
        "pip install 'transformers[torch]'."
    ) from error

_log = logging.getLogger(__name__)
# How far a loss may differ by rounding, in 32 bits and in 16.
_ALIKE, _ALIKE_16 = 1e-4, 3e-2
# On a `create_optimizer` whose optimizer is private.
_PRIVATE = "_ghostclip_private"

__all__ = ["DPSeq2SeqTrainer", "DPSeq2SeqTrainingArguments", "DPTrainer", "DPTrainingArguments", "PrivacyArguments"]


@suggests_fields
@dataclass
class DPTrainingArguments(PrivacyArguments, TrainingArguments):
    """`TrainingArguments` with the options of `PrivacyArguments`; `max_grad_norm` is C, the bound on each record."""


@suggests_fields
@dataclass
class DPSeq2SeqTrainingArguments(PrivacyArguments, Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the options of `PrivacyArguments`."""


class DPTrainer(Trainer):
    """`Trainer` that trains with differential privacy; arguments, callbacks, evaluation and files are Trainer's.

    Each step uses one Poisson batch, which contains each record of `train_dataset` with the same probability. On
    average it has `per_device_train_batch_size` × `gradient_accumulation_steps` × processes records; each process
    computes at most `per_device_train_batch_size` of them at once. An epoch has round(records / expected batch) steps.
    The loss of a record is the mean over its own labels, not over the tokens of the batch. A `compute_loss_func` may
    return one loss per record, shape (B,), or a plain mean. Logs, progress bar and trainer_state.json show ε at
    `target_delta` as "epsilon".

    Checkpoints hold the privacy account and the positions of sampling and noise (optimizer.pt), so a resumed training
    continues as if it had not been interrupted. Keep optimizer.pt as secret as the data: it holds the keys of both.

    A model that `fully_shard` or a plan of tensor parallelism has divided among the processes is trained as it is, with
    `save_strategy="no"` or `save_only_model=True`: Trainer does not save the state of its optimizer;
    `PrivacyEngine.save_checkpoint` does.

    Privacy:
        One record is one entry of `train_dataset`. ε covers the trained parameters, not the losses and metrics that are
        logged. Options that contradict a private training are refused before the first step.

    Attributes:
        private_run: The private training, after it has started.
    """

    # Of newer versions: what compute_loss returns is not divided by the number of accumulated batches.
    loss_is_scaled_for_ga = True
    private_run: PrivateRun | None = None
    _libraries: tuple[str, ...] = ("transformers", "accelerate")
    _computing = False
    _loss_is_known = False
    _is_placed = False
    _graph: GraphStep | None = None
    _said_eager = False
    # Losses of the records of a physical batch, and the mean that compute_loss has returned of them, with its version.
    _losses: tuple[Tensor, Tensor, int] | None = None

    def __init_subclass__(cls) -> None:
        """Let an optimizer be private that a subclass, or a trainer beside this one, creates without asking `super`."""
        super().__init_subclass__()
        creates = cls.create_optimizer
        if creates is not DPTrainer.create_optimizer and not hasattr(creates, _PRIVATE):
            cls.create_optimizer = _private(creates)  # type: ignore[method-assign]

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether the model owns its placement, so that nothing wraps or divides it: Trainer's name for it."""
        # None until a `model_init` was called.
        model: nn.Module | None = self.model
        return self._is_placed or (model is not None and any(map(_torch.is_sharded_tensor, model.parameters())))

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, placed: bool) -> None:
        self._is_placed = placed

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Leave parameters that every rank has whole to the engine, which sums what is clipped."""

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        """Leave divided parameters to the engine, too."""
        return nullcontext()

    @property
    def _releasing(self) -> DPOptimizer:
        """What releases, in a private step."""
        assert self.private_run is not None, "called in a private step"
        return self.private_run.optimizer

    @property
    def privacy_engine(self) -> Any:
        """The engine that keeps the account; None before training."""
        return None if self.private_run is None else self.private_run.engine

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 - Trainer's signature
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train privately.

        Args:
            resume_from_checkpoint: As Trainer's.
            trial: As Trainer's.
            ignore_keys_for_eval: As Trainer's.

        Returns:
            What Trainer returns; its metrics hold "epsilon".

        Raises:
            GhostClipError: If options, data or model contradict a private training; nothing was released then.
        """
        self._require_options()
        self._require_account(resume_from_checkpoint)
        # Of the host's loop alone: a subclass's own step, and ours, are of physical batches.
        self.__dict__["training_step"] = self._logical_step
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            del self.__dict__["training_step"]
            if self.private_run is not None:
                self.private_run.close()

    def _require_options(self) -> None:
        """Refuse options that contradict a private training; trainers with options of their own add to it."""
        for library in self._libraries:
            warn_if_untested(library)
        refuse(self)

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: int = 20,
        direction: Any = "minimize",
        backend: Any = None,
        hp_name: Any = None,
    ) -> NoReturn:
        """Refuse: trials on the same records cost ε.

        Args:
            hp_space: As Trainer's.
            compute_objective: As Trainer's.
            n_trials: As Trainer's.
            direction: As Trainer's.
            backend: As Trainer's.
            hp_name: As Trainer's.

        Raises:
            NotOfferedError: Always.
        """
        raise NotOfferedError(
            "hyperparameter_search: each trial on the same records costs ε of its own, and so does choosing by them. "
            "Make a trainer for each setting and add their ε up."
        )

    def _require_account(self, checkpoint: str | bool | None) -> None:  # noqa: FBT001 - as Trainer has it
        """Refuse to go on from a checkpoint whose optimizer, and with it the account, was not saved."""
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        if folder and Path(folder).is_dir() and not (Path(folder) / "optimizer.pt").is_file():
            raise ResumeError(
                f"{folder} holds no optimizer.pt, and so no account of what its weights have cost already; ε must not "
                "start at zero for them. Save with save_only_model=False, or load the weights into the model if they "
                "were trained on other data."
            )

    # Batches

    def get_train_dataloader(self) -> Any:
        """Return what Trainer iterates over: a ticket for each batch, whose records are drawn by its step."""
        if self.private_run is None:
            dataset, collate = self.train_dataset, self.data_collator
            if type(dataset).__module__.partition(".")[0] == "datasets":
                dataset = self._remove_unused_columns(dataset, description="training")
            else:
                collate = self._get_collator_with_removed_columns(collate, description="training")
            self.private_run = PrivateRun(dataset, collate, self.args)
        return self.private_run.tickets()

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of records of a loader.

        Args:
            dataloader: Any of the trainer's.

        Returns:
            Records; of the training loader those that are drawn from.
        """
        run = self.private_run
        drawn_from = run is not None and dataloader.dataset is run.batches
        return len(self.train_dataset) if drawn_from else super().num_examples(dataloader)

    # A step

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer and make it private.

        Args:
            model: As Trainer's.

        Returns:
            The private optimizer.
        """
        return self._private_optimizer(super().create_optimizer() if model is None else super().create_optimizer(model))

    def _private_optimizer(self, plain: Any) -> Any:
        # A second call of train() finds that of the first, in accelerate's wrapping.
        inner = getattr(plain, "optimizer", plain)
        bare = inner if isinstance(inner, WrappedOptimizer) else plain
        if self.private_run is not None and not self.private_run.releases(bare):
            self.optimizer = self.private_run.begin(self.model, bare)
            if getattr(self.model, "peft_config", None):
                warn_if_untested("peft")
                use_plain_operations()
                AdapterWatch(self.model, self.optimizer)
        return self.optimizer

    def _logical_step(self, model: nn.Module, ticket: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the clipped sum of a logical batch, for the host's loop; return the mean loss."""
        if not isinstance(ticket, Ticket) or self.private_run is None:
            raise DataError(
                f"training_step() was given a {type(ticket).__name__} that the private loader did not hand out. Let "
                "the trainer make its loader (get_train_dataloader)."
            )
        if not ticket.is_last:
            return torch.zeros((), device=self.args.device)
        # Ranks run forward different numbers of times, so that nothing may be exchanged before the step.
        around = getattr(model, "_orig_mod", model)
        bare = around.module if isinstance(around, nn.parallel.DistributedDataParallel) else model
        if not self._loss_is_known:
            self.check_losses(bare)
            if int(self.args.train_batch_size) == 1:
                self._rehearse(bare)
            self._loss_is_known = True
        self._computing = True
        try:
            main_input, step = getattr(self.model, "main_input_name", "input_ids"), type(self).training_step
            with _ungathered(self.accelerator):
                return self.private_run.compute(lambda part: step(self, bare, part, None).detach(), ticket, main_input)
        finally:
            self._computing = False

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of a physical batch, as `Trainer.training_step` does.

        A subclass may have one of its own, which calls this one or `backward` of a loss that is a mean of the records'.

        Args:
            model: The model.
            inputs: The physical batch.
            num_items_in_batch: Not used: no loss is divided by it.

        Returns:
            The mean loss, without a graph.

        Raises:
            DataError: If it is called outside of `train`.
        """
        if not self._computing:
            raise DataError("training_step: it is called by train(), on batches of the private loader.")
        model.train()
        getattr(self.optimizer, "train", lambda: None)()
        inputs = self._prepare_inputs(inputs)
        if self._compiles():
            return _mean(self._compiled_step(model, inputs))
        self._losses = None
        # It may take the labels out.
        batch = dict(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
            if not type(self).compute_loss.__module__.startswith("ghostclip."):
                # A subclass of the user's computes the loss, with a model that accelerate runs under autocast.
                with self.accelerator.autocast():
                    self._releasing.clipper.know_loss(loss, self._unseen_loss, (model, batch), {}, criterion=self.model)
        losses, self._losses = self._losses, None
        if losses is not None and losses[1] is loss and losses[2] == _torch.version(loss):
            self._releasing.clipper.backward(losses[0])
        else:
            # Somebody else's loss, or a change to ours: proved to be a mean of the records' own.
            self.accelerator.backward(loss)
        return loss.detach()

    def _unseen_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the loss of a batch as without a clipper; what is noted in attributes meanwhile is forgotten."""
        with forgotten(self), self._releasing.clipper.unwatched(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs)

    def _compiles(self) -> bool:
        """Return whether the step may be one graph: the loss must be one that is known, a loss of each record."""
        plain, known = type(self).compute_loss is DPTrainer.compute_loss, task_of(self.model) is not None
        if self.args.grad_sample_mode != "graph":
            compiles = self.args.grad_sample_mode == "auto" and self.args.compile is not False
            compiles = compiles and plain and known and self.compute_loss_func is None and not self._is_fused
            return compiles and self.private_run is not None and self.private_run.unhindered
        known = plain and (self.compute_loss_func is not None or known)
        if not known and not self._said_eager:
            self._said_eager = True
            _log.warning("grad_sample_mode='graph': computed eagerly, as the loss is not one that DPTrainer computes.")
        return known

    def _compiled_step(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run forward and backward of a physical batch as one graph, and return the records' losses."""
        assert self.private_run is not None, "called in a private step"
        optimizer, asked = self._releasing, self.args.grad_sample_mode == "graph"
        if self._graph is None or self._graph.clipper is not optimizer.clipper:
            smoothing = float(self.args.label_smoothing_factor)

            def losses(model: nn.Module, inputs: Any) -> Tensor:
                with self.compute_loss_context_manager():
                    return self._record_losses(model, inputs, smoothing=smoothing)[0]

            backend = "inductor" if self.args.torch_compile_backend in (None, "inductor") else "aten"
            takeover = Takeover(left=left_of(optimizer, self.private_run.planned_steps), asked=asked)
            self._graph = GraphStep(optimizer.clipper, losses, options=GraphOptions(backend=backend), takeover=takeover)
            self._graph.reads = self.compute_loss_func
        return self._graph(dict(inputs))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - Trainer's signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the mean of the records' losses in a private step; else what Trainer returns.

        Args:
            model: The model.
            inputs: A batch.
            return_outputs: Whether to return the outputs as well.
            num_items_in_batch: Not used in a private step.

        Returns:
            The loss, or the loss and the outputs.

        Raises:
            LossReductionError: If there is no loss for each record, and no plain mean of such losses.
        """
        if not self._computing:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        smoothing = float(self.args.label_smoothing_factor)
        loss, outputs = self._record_losses(model, inputs, smoothing=smoothing, logits=return_outputs)
        loss = self._mean_of(loss)
        return (loss, outputs) if return_outputs else loss

    def _mean_of(self, losses: Tensor) -> Tensor:
        """Return the mean of one loss per record, and keep them for the backward; or a scalar loss as it is."""
        mean = _mean(losses)
        if losses.dim():
            self._losses = losses, mean, _torch.version(mean)
        return mean

    def _record_losses(
        self, model: nn.Module, inputs: Any, *, smoothing: float, logits: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the loss of each record, or a mean that the engine will prove, and the outputs."""
        task = task_of(self.model)
        forward = without_adapters(self.model).forward
        if self.args.memory_budget < 1 and "use_cache" in inspect.signature(forward).parameters:
            # A block that fills a cache cannot be run again.
            inputs = {**inputs, "use_cache": False}
        if self.compute_loss_func is not None:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            try:
                arguments, options = (outputs, inputs.get("labels")), {"num_items_in_batch": None}
                losses = self.compute_loss_func(*arguments, **options)
            except TypeError as error:
                raise LossReductionError(
                    f"compute_loss_func: {error}. If it divides by num_items_in_batch: that is None in a private step, "
                    "as the tokens of a batch are those of all its records. Return one loss per record, (B,), as the "
                    "mean over its own labels: ghostclip.losses.token_losses(outputs.logits, labels)."
                ) from error
            if self._computing:
                clipper, function = self._releasing.clipper, self.compute_loss_func
                clipper.know_loss(losses, function, arguments, options, criterion=function)
            return losses, outputs
        if task is not None:
            fused = not logits and self._is_fused
            return losses_of(model, inputs, task, smoothing=smoothing, fused=fused)
        return super().compute_loss(model, inputs, return_outputs=True)

    @functools.cached_property
    def _is_fused(self) -> bool:
        """Whether the loss is computed without logits; a trainer with a loss of its own may want them."""
        allowed = not self._needs_logits() and self.args.grad_sample_mode not in ("hooks", "graph")
        bare = without_adapters(self.model)
        task = task_of(bare)
        language = task is not None and bool(task.predicts)
        return language and use_fused(bare, self.args.vocabulary_head, allowed=allowed)

    def _needs_logits(self) -> bool:
        """Return whether the loss is another's, which may want logits."""
        return type(self).compute_loss is not DPTrainer.compute_loss

    def check_losses(self, model: nn.Module) -> None:
        """Check the loss on two records, before the first step.

        Args:
            model: The model.

        Raises:
            LossReductionError: If it is not the model's own.
            SampleMixingError: If it is another with the padding of a longer record.
        """
        half = self.args.bf16 or any(p.dtype.itemsize < 4 for p in model.parameters() if p.is_floating_point())
        tolerance = _ALIKE_16 if half else _ALIKE
        example, lengths_differ = self._checked_example()
        batch = self._prepare_inputs(example)

        def ours(part: dict[str, Any]) -> Tensor:
            return _mean(self._record_losses(model, part, smoothing=0.0)[0])

        # A model that is compiled would be for these forwards alone.
        with evaluating(model), torch.compiler.set_stance("force_eager"):
            if self.compute_loss_func is None and task_of(self.model) is not None:
                check_same_loss(batch, native=lambda part: _scalar_loss(model(**part)), ours=ours, tolerance=tolerance)
            if lengths_differ:
                require_padding_without_effect(batch, ours=ours, tolerance=tolerance)
        for unit in _torch.gathered_modules(model):
            # A forward without a backward leaves parts gathered.
            unit.reshard()

    def _rehearse(self, model: nn.Module) -> None:
        """Let the engine prove on two records that samples do not mix, which batches of one record never show."""
        assert self.private_run is not None, "called in a private step"
        batch = self._prepare_inputs(self._checked_example()[0])
        try:
            self.private_run.rehearse(lambda: self._record_losses(model, batch, smoothing=0.0)[0])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("two records do not fit in memory: not checked that records of a batch do not mix")

    def _checked_example(self) -> tuple[Any, bool]:
        """Return a batch that losses are checked on, and whether its records differ in length."""
        assert self.private_run is not None, "called in a private training"
        return self.private_run.example()

    # What is said

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with ε beside a training loss.

        Args:
            logs: The values.
            start_time: As Trainer's.
        """
        if self.private_run is not None and logs.keys() & {"loss", "train_loss"}:
            # Between backward and release there is no gradient whose norm could be logged.
            logs.pop("grad_norm", None)
            logs["epsilon"] = epsilon = self.private_run.epsilon()
            for bar in self._bars():
                bar.set_postfix(epsilon=f"{epsilon:.2f}", refresh=False)
        super().log(logs, start_time)

    def _bars(self) -> list[Any]:
        """Return the progress bars of the training that are shown."""
        bars = (getattr(callback, "training_bar", None) for callback in self.callback_handler.callbacks)
        return [bar for bar in bars if bar is not None]


def _private(creates: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `create_optimizer` whose optimizer is private."""

    @functools.wraps(creates)
    def create_optimizer(self: DPTrainer, *args: Any, **kwargs: Any) -> Any:
        plain = creates(self, *args, **kwargs)
        return self._private_optimizer(self.optimizer if plain is None else plain)

    setattr(create_optimizer, _PRIVATE, True)
    return create_optimizer


class DPSeq2SeqTrainer(Seq2SeqTrainer, DPTrainer):
    """`Seq2SeqTrainer` that trains with differential privacy, as `DPTrainer` does."""


@contextmanager
def _ungathered(accelerator: Any) -> Iterator[None]:
    """Let what gathers metrics from all ranks return this rank's own: ranks compute different numbers of parts."""
    names = ("gather", "gather_for_metrics") if accelerator.num_processes > 1 else ()
    for name in names:
        setattr(accelerator, name, lambda values: values)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def _mean(loss: Tensor) -> Tensor:
    """Return a scalar loss: the mean of one loss per record, or the scalar itself, which the engine proves."""
    if loss.dim() > 1:
        raise LossReductionError(
            f"loss of shape {tuple(loss.shape)}: return one loss per record, shape (B,), or their mean. For tokens: "
            "ghostclip.losses.token_losses."
        )
    return loss.mean() if loss.dim() else loss


def _scalar_loss(outputs: Any) -> Tensor | None:
    """Return the loss that a model has computed itself, if it has."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
