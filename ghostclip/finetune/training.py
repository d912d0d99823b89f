"""The private training: `DPTrainer` with the run's schedule, resume points and stops.

Privacy:
    The engine writes each step into the ledger before anything can see its result, and keeps the budget. The folder
    ``resume`` holds exact losses, a hash of the data, and the keys of noise and sampling, so it is as secret as the
    data, and is removed when the run is done. After a stop between two steps noise and sampling go on where they were.
    After a crash, when the ledger is ahead of the checkpoint, they start with *fresh* keys: a step that was lost need
    not come out the same again, and the same noise must not hide two different sums.
"""

from __future__ import annotations

import math
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ghostclip.distributed.agreement import digest_of, gathered, refusals_shared
from ghostclip.errors import FixedSeedWarning
from ghostclip.finetune.models import is_in_parts
from ghostclip.finetune.run import FinetuneRun
from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments
from ghostclip.mechanisms import AveragedWeights

_WARM_UP = 0.05
_AVERAGES = "finetune_averages"
# How often loss and ε are said in a run: working out ε takes time.
_LOGS = 40


def share_of_peak(step: int, *, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up over a twentieth of the steps, then decay to 0."""
    warm_up = max(1, round(_WARM_UP * steps))
    return min(1.0, (step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def training_arguments(run: FinetuneRun) -> DPTrainingArguments:
    """Return the run's options as those of `DPTrainer`; writes nothing."""
    options, mechanism, seed = run.options, run.mechanism, run.options.unsafe_noise_seed
    arguments = DPTrainingArguments(
        output_dir=str(run.output), seed=run.state.seed % 2**32, use_cpu=run.device.type == "cpu",
        max_steps=mechanism.steps,
        per_device_train_batch_size=run.physical_batch, expected_batch_size=mechanism.batch_size,
        target_epsilon=mechanism.target_epsilon, target_delta=mechanism.delta,
        noise_multiplier=mechanism.noise_multiplier, max_grad_norm=mechanism.max_grad_norm,
        grad_sample_mode=options.strategy, vocabulary_head=options.vocabulary_head,
        memory_budget=options.memory_budget, bf16=options.dtype == "bfloat16",
        noise_level="secure" if options.secure_noise else "fast", ledger=str(run.ledger),
        # A session after a crash must not draw the first one's noise again.
        reproducible_seed=None if seed is None else seed + run.state.sessions - 1,
        save_strategy="no", logging_steps=max(1, mechanism.steps // _LOGS), logging_first_step=True, report_to="none",
        disable_tqdm=not sys.stderr.isatty(), remove_unused_columns=False, log_level="error",
    )  # fmt: skip
    # One process uses the device that was asked for, and not all that there are.
    arguments._n_gpu = min(1, arguments.n_gpu)
    arguments.__dict__["_setup_devices"] = run.device
    return arguments


class FinetuneTrainer(DPTrainer):
    """`DPTrainer` of a run, which goes on from a resume point if there is one, as `begun` says."""

    # `stop_requested`: whether to stop after the current step.
    private_run: Any = None

    def __init__(self, run: FinetuneRun, arguments: DPTrainingArguments) -> None:
        self.run, self.begun, self.stop_requested = run, run.state.lost is not None, False
        self._saved, self._step = 0.0, (0.0, 0)
        run.ledger.parent.mkdir(parents=True, exist_ok=True)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        # Weight decay would pull against the noise.
        optimizer, self._averages = torch.optim.AdamW(trained, lr=run.options.rate, weight_decay=0.0), None
        if run.options.average is not None:
            kind = "exponential" if run.options.average == "ema" else "tail"
            self._averages = AveragedWeights(run.model, optimizer, kind=kind, start=run.mechanism.steps // 2)
        super().__init__(run.model, arguments, train_dataset=run.split.training, optimizers=(optimizer, None))
        self.add_callback(_step_end(self))
        # All ranks write through the engine, and none needs what DistributedDataParallel adds.
        self._is_placed |= run.ranks.count > 1

    def finish(self) -> None:
        """Take the steps that are left, or stop after the one in which stopping was asked for; in all processes."""
        with warnings.catch_warnings():
            # Said before the run, and louder.
            warnings.simplefilter("ignore", FixedSeedWarning)
            warnings.filterwarnings("ignore", "delta=.* is not below")
            if self.run.unfinished:
                with self._stopped_by_signals():
                    self.train()
            else:
                # Nothing is left but the account and the weights.
                self.get_train_dataloader()
                self.create_optimizer_and_scheduler(1)

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Let the first Ctrl-C (or SIGTERM) only ask for a stop; the second ends the program at once."""

        def on_signal(*_: Any) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            print("\nstopping after this step (once more: at once) …", file=sys.stderr, flush=True)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Go on from the resume point, or write the first one, and create the schedule from the run's step on."""
        run, private, done = self.run, self.private_run, self.run.state.step
        steps = run.mechanism.steps
        private.budget.known_to_fit((run.mechanism.noise_multiplier, run.mechanism.sample_rate, steps))
        with refusals_shared("beginning of the training"):
            if self.begun:
                entries = private.engine.load_checkpoint(
                    path=run.resume_point, module=self.model, optimizer=private.optimizer,
                    torch_load_kwargs={"map_location": "cpu"}, fresh_randomness=bool(run.state.lost),
                )  # fmt: skip
                if self._averages is not None:
                    self._averages.load_state_dict(entries[_AVERAGES])
            else:
                self.save()
        self.begun, self.state.global_step = True, done
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: share_of_peak(done + step, steps=steps))
        return self.lr_scheduler

    def save(self) -> None:
        """Replace the resume point by one file, which appears whole or not; between two steps, in all processes."""
        self._saved = time.monotonic()
        averages = {} if self._averages is None else {_AVERAGES: self._averages.state_dict()}
        if is_in_parts(self.run.mesh) or self.run.ranks.is_first:
            self.private_run.engine.save_checkpoint(
                path=self.run.resume_point, module=self.model, optimizer=self.private_run.optimizer,
                checkpoint_dict={**self.run.entries(), **averages},
            )  # fmt: skip

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the average that was asked for, or what it has."""
        return nullcontext() if self._averages is None else self._averages.applied()

    def _logical_step(self, model: nn.Module, ticket: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the clipped sum of a logical batch."""
        # Dropout follows from seed, step and share of the samples, so that it is the same in a resumed run.
        seed_text = f"{self.run.state.seed} {self.run.ranks.rank // self.run.mesh.tp} {self.run.state.step}"
        torch.manual_seed(digest_of(seed_text))
        loss = super()._logical_step(model, ticket, num_items_in_batch)
        self._step = float(loss) * ticket.records, ticket.records
        return loss

    def finish_step(self) -> bool:
        """Note what the step was, over all processes, and save where that is due; return whether to stop."""
        state, sharing = self.run.state, self.run.mesh.tp
        is_due = time.monotonic() - self._saved >= self.run.options.checkpoint_seconds
        by_rank = gathered("step", (*self._step, self.stop_requested, is_due))
        # As many processes, one after the other, have the same samples.
        losses, samples = (sum(column) for column in list(zip(*by_rank[::sharing], strict=True))[:2])
        loss = losses / samples if samples else math.nan
        state.losses.append(loss if math.isfinite(loss) else None)
        state.samples.append(samples)
        stopping = any(asked for _, _, asked, _ in by_rank)
        if by_rank[0][3] and not stopping:
            self.save()
        return stopping

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Show a loss with the ε that holds after it, on the bar or in a line."""
        if "loss" not in logs or self.private_run is None:
            return
        recent = [loss for loss in self.run.state.losses[-int(self.args.logging_steps) :] if loss is not None]
        loss = sum(recent) / len(recent) if recent else math.nan
        done, epsilon = f"step {self.state.global_step} of {self.state.max_steps}", self.private_run.epsilon()
        text = f"{done}: loss {loss:.3f}, ε {epsilon:.2f}"
        for bar in self._bars():
            bar.set_postfix_str(text)
        if self.args.disable_tqdm:
            print(text, file=sys.stderr)

    @property
    def clipper(self) -> Any:
        """What clips, once the training has begun."""
        return self.private_run.optimizer.clipper

    def close(self) -> None:
        """Detach the clipper and give the ledger back; the model is an ordinary one again."""
        if self.private_run is not None:
            self.private_run.engine.close()
            self.private_run.close()
        self.run.model.zero_grad(set_to_none=True)


def _step_end(trainer: FinetuneTrainer) -> Any:
    """Return what tells a trainer where a step ends, and Trainer's loop what follows from it."""
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= trainer.finish_step()

    return StepEnd()
