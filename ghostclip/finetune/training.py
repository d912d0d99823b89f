"""The private training: `DPTrainer` with the run's schedule, resume points, measures and stops.

Privacy:
    The engine writes each step into the ledger before anything can see its result, and keeps the budget. The folder
    ``resume`` holds exact losses, a hash of the data, and the keys of noise and sampling, so it is as secret as the
    data, and is removed when the run is done. After a stop between two steps noise and sampling go on where they were.
    After a crash, when the ledger is ahead of the checkpoint, they start with *fresh* keys: a step that was lost need
    not come out the same again, and the same noise must not hide two different sums.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ghostclip.accounting import Bounds
from ghostclip.data.tensor_memory import peak_bytes
from ghostclip.distributed import gathered, refused_together
from ghostclip.errors import FixedSeedWarning
from ghostclip.finetune.measure import StepMeasures, adamw
from ghostclip.finetune.progress import StopRequest
from ghostclip.finetune.ranks import is_in_parts
from ghostclip.finetune.state import FinetuneRun, ResumePoint
from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

_WARM_UP = 0.05
# The first step of a session fills caches; the second is slowed by the memory profiler.
_UNTIMED_STEPS = 2


def learning_rate_at(step: int, *, steps: int, peak: float) -> float:
    """Return the learning rate of a step from 0: linear warm-up over the first twentieth, then decay towards 0."""
    warm_up = max(1, round(_WARM_UP * steps))
    return peak * min(1.0, (step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def training_arguments(run: FinetuneRun) -> DPTrainingArguments:
    """Return the run's options as those of `DPTrainer`; writes nothing."""
    options, mechanism, state = run.options, run.mechanism, run.state
    seed = options.unsafe_noise_seed
    arguments = DPTrainingArguments(
        output_dir=str(run.output), seed=state.seed % 2**32, use_cpu=run.device.type == "cpu",
        max_steps=max(1, mechanism.steps - state.step),
        per_device_train_batch_size=run.physical_batch, expected_batch_size=mechanism.batch_size,
        target_epsilon=mechanism.target_epsilon, target_delta=mechanism.delta,
        noise_multiplier=mechanism.noise_multiplier, max_grad_norm=mechanism.max_grad_norm,
        grad_sample_mode=options.strategy, vocabulary_head=options.vocabulary_head,
        memory_budget=options.memory_budget, factor_dtype=options.factor_dtype, bf16=options.dtype == "bfloat16",
        noise_level="secure" if options.secure_noise else "fast", ledger=str(ResumePoint.of(run.output).ledger),
        # A session after a crash must not draw the first one's noise again.
        reproducible_seed=None if seed is None else seed + state.sessions - 1,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        log_level="error", log_level_replica="error",
    )  # fmt: skip
    # One process uses the device that was asked for, and not all that there are.
    arguments._n_gpu = min(1, arguments.n_gpu)
    arguments.__dict__["_setup_devices"] = run.device
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    return arguments


class FinetuneTrainer(DPTrainer):
    """`DPTrainer` of a run, which goes on from a resume point if there is one.

    Attributes:
        measures: What the private steps of this session took.
        begun: Whether there is a resume point.
        on_step: Called after every step.

    Args:
        run: The run.
        arguments: Its `training_arguments`.
        stop: Asked after every step.
    """

    def __init__(self, run: FinetuneRun, arguments: DPTrainingArguments, *, stop: StopRequest) -> None:
        self.run, self.stop = run, stop
        self.on_step: Callable[[], None] = lambda: None
        self.measures, self.begun = StepMeasures(), run.lost is not None
        self._point, self._saved, self._peak = ResumePoint.of(run.output), 0.0, 0
        self._step_loss, self._step_records, self._taken, self._began = 0.0, 0, 0, 0.0
        # All ranks write through the engine, and none needs what DistributedDataParallel adds.
        self._several = run.ranks.count > 1
        self._point.ledger.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(
            run.model, arguments, train_dataset=run.split.training, callbacks=[_after_steps(self)],
            optimizers=(adamw(run.model, run.options.rate), None),
        )  # fmt: skip
        self._is_placed |= self._several

    def finish(self) -> None:
        """Take the steps that are left, or stop after the one in which stopping was asked for; in all processes."""
        with warnings.catch_warnings():
            # Said before the run, and louder.
            warnings.simplefilter("ignore", FixedSeedWarning)
            if self.run.unfinished:
                self.train()
            else:
                # Nothing is left but the account and the weights.
                self.get_train_dataloader()
                self.create_optimizer()
                self.create_scheduler(1)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer, as `DPTrainer` does, with a budget that the planned noise is known to keep."""
        with warnings.catch_warnings(), refused_together("beginning of the training"):
            # A δ that promises little was said before the run.
            warnings.simplefilter("ignore", UserWarning)
            private, mechanism = super().create_optimizer(model), self.run.mechanism
        assert self.private_run is not None, "the loader is made first"
        assert self.private_run.training.budget is not None, "an ε is asked for"
        fits = (mechanism.noise_multiplier, mechanism.sample_rate, mechanism.steps)
        self.private_run.training.budget.known_to_fit(fits)
        return private

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Go on from the resume point, or write the first one, and create the schedule from the run's step on."""
        assert self.private_run is not None, "the loader is made first"
        with refused_together("beginning of the training"):
            if self.begun:
                self.private_run.engine.load_checkpoint(
                    path=self._point.path, module=self.model, optimizer=self.private_run.optimizer,
                    torch_load_kwargs={"map_location": "cpu"}, fresh_randomness=bool(self.run.lost),
                )  # fmt: skip
            else:
                self.save()
        self.begun = True
        done, steps = self.run.state.step, self.run.mechanism.steps
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda step: learning_rate_at(done + step, steps=steps, peak=1.0)
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def save(self) -> None:
        """Replace the resume point; only between two steps, and in all processes."""
        assert self.private_run is not None, "in a training"
        self._saved = time.monotonic()
        if is_in_parts(self.run.mesh) or self.run.ranks.is_first:
            self.private_run.engine.save_checkpoint(
                path=self._point.path, module=self.model, optimizer=self.private_run.optimizer,
                checkpoint_dict=self.run.entries(),
            )  # fmt: skip

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save what `PrivacyEngine` does in the place of Trainer's files: one file, which appears whole or not."""
        del model, trial
        self.save()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the clipped sum of a logical batch, and measure memory once."""
        self._begin_step()
        found: list[Tensor] = []

        def work() -> None:
            found.append(super(FinetuneTrainer, self).training_step(model, inputs, num_items_in_batch))

        if self._taken == _UNTIMED_STEPS - 1:
            self._peak = peak_bytes(work, self.run.device) or 0
        else:
            work()
        self._step_records = inputs.records
        self._step_loss = float(found[0]) * inputs.records
        return found[0]

    def _begin_step(self) -> None:
        """Let dropout follow from seed, step and share of the samples, so that it is the same in a resumed run."""
        state = self.run.state
        place = f"{state.seed} {self.run.ranks.rank // self.run.mesh.tp} {state.step}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big"))
        self._began = time.perf_counter()

    def finish_step(self) -> tuple[bool, bool]:
        """Note what the step was, over all processes; return whether to stop, and whether a resume point is due."""
        state, options, sharing = self.run.state, self.run.options, self.run.mesh.tp
        is_due = time.monotonic() - self._saved >= options.checkpoint_seconds
        found = gathered("step", (self._step_loss, self._step_records, self.stop.requested, is_due))
        # As many processes, one after the other, have the same samples.
        losses, samples = (sum(column) for column in list(zip(*found[::sharing], strict=True))[:2])
        loss = losses / samples if samples else math.nan
        state.losses.append(loss if math.isfinite(loss) else None)
        state.samples.append(samples)
        self._taken += 1
        if self._taken > _UNTIMED_STEPS:
            self.measures.timed.append((samples, time.perf_counter() - self._began))
        self.measures.peak_bytes = self._peak or None
        self.measures.physical_batch = self.private_run.physical_batch_size if self.private_run is not None else 0
        self.on_step()
        stopping = any(asked for _, _, asked, _ in found) or (not self._several and self.stop.requested)
        return stopping, found[0][3] and self.run.unfinished and not stopping

    @property
    def strategy(self) -> str:
        """The clipping strategy in use: what was asked for, and what ``auto`` became."""
        asked, used = self.run.options.strategy, self._clipper.resolve_strategy()
        return used if asked == used else f"{used} ({asked})"

    @property
    def unchecked(self) -> list[str]:
        """Checks of the model that were switched off or could not run, and why."""
        return [reason for reason in [self._clipper.coverage().unchecked] if reason]

    @property
    def _clipper(self) -> Any:
        assert self.private_run is not None, "after a training"
        assert self.private_run.optimizer is not None, "after a training"
        return self.private_run.optimizer.clipper

    def epsilon(self) -> float:
        """Return a bound on what was spent so far, at the mechanism's δ."""
        assert self.private_run is not None, "in a training"
        return self.private_run.epsilon()

    def guarantee(self) -> tuple[Bounds, str]:
        """Return bounds on what was spent in the end, at the mechanism's δ, and what that means."""
        delta = self.run.mechanism.delta
        with warnings.catch_warnings():
            # A δ that promises little was said before the run.
            warnings.simplefilter("ignore", UserWarning)
            return self.privacy_engine.epsilon_bounds(delta), self.privacy_engine.summary(delta)

    def close(self) -> None:
        """Detach the clipper and give the ledger back; the model is an ordinary one again."""
        if self.private_run is not None:
            self.private_run.engine.close()
            if self.private_run.optimizer is not None:
                self.private_run.optimizer.clipper.remove()
        self.run.model.zero_grad(set_to_none=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log nothing: the record is written by the run, with one ε."""


def _after_steps(trainer: FinetuneTrainer) -> Any:
    """Return what tells a trainer where a step ends, and Trainer's loop what follows from it."""
    from transformers import TrainerCallback

    class AfterSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stop, control.should_save = trainer.finish_step()
            control.should_training_stop |= stop

    return AfterSteps()
