"""The private training loop on the engine's loader, optimizer, ledger and checkpoints.

Shapes: B samples of a physical batch, T tokens.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.clipping.options import factor_dtype_of
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.data.physical_batch_size import find_max_physical_batch_size
from ghostclip.data.physical_batches import PhysicalBatches
from ghostclip.data.size_policies import largest_batch
from ghostclip.data.tensor_memory import peak_bytes
from ghostclip.distributed import gathered
from ghostclip.errors import FixedSeedWarning
from ghostclip.finetune.checkpoint import ResumePoint
from ghostclip.finetune.interrupts import StopRequest
from ghostclip.finetune.losses import losses_for, precision
from ghostclip.finetune.parts import is_in_parts
from ghostclip.finetune.prepare import Prepared
from ghostclip.finetune.privacy import ACCOUNTANT
from ghostclip.finetune.steps import (
    UNTIMED_STEPS,
    StepMeasures,
    adamw,
    dummy_passages,
    learning_rate_at,
    vocabulary_of,
)
from ghostclip.privacy.budget import Budget

if TYPE_CHECKING:
    from ghostclip.accounting import Bounds

# Of a GPU's free memory; the rest is for fragmentation, noise, and libraries that allocate by themselves.
CUDA_SHARE = 0.8
# On a CPU a batch larger than this only leaves the caches: 256 at once took longer per sample than 64.
CPU_ENOUGH = 64


class PrivateTraining:
    """Model, optimizer and loader made private, and the loop over them; continues where an interrupted run stopped.

    Privacy:
        The engine writes each step into the ledger before anything can see its result, and keeps the budget.

    Args:
        prepared: The run.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.mechanism = prepared.mechanism
        self.options = options = prepared.options
        self.state = prepared.state
        self._ranks, self._divided = prepared.ranks, is_in_parts(prepared.mesh)
        # As many processes, one after the other, have the same samples.
        self._sharing = prepared.mesh.tp
        self.measures = StepMeasures()
        self._losses = losses_for(options.task, prepared.model, vocabulary_head=options.head)
        self.device = prepared.device
        self._base_model, self._point = prepared.model, ResumePoint.of(prepared.output)
        self._width, self._vocabulary = prepared.split.training.width, vocabulary_of(prepared.model)
        self._point.ledger.parent.mkdir(parents=True, exist_ok=True)
        self._engine = ghostclip.PrivacyEngine(
            accountant=ACCOUNTANT, secure_mode=options.secure_noise, ledger=self._point.ledger
        )
        private = self._make_private(prepared)
        # Between optimizer and loader some strategies return a criterion; the losses here are per passage already.
        self.model, self.optimizer, self.loader = cast("nn.Module", private[0]), private[1], private[-1]
        self._graph: ghostclip.GraphStep | None = None
        if options.strategy == "graph":
            self.model = prepared.model
            self._graph = ghostclip.GraphStep(self.optimizer.clipper, self._sample_losses)
        self._session_steps = 0
        self._loss_sum = 0.0
        self._step_samples = 0
        self._step_began = 0.0
        self._peak = 0
        self._stopping = False
        self._saved = time.monotonic()
        if prepared.lost is None:
            self.save()
        else:
            self._restore(prepared.lost)

    def _make_private(self, prepared: Prepared) -> Any:
        """Make model, optimizer and loader private."""
        mechanism = self.mechanism
        budget = Budget(mechanism.target_epsilon, mechanism.delta)
        budget.known_to_fit((mechanism.noise_multiplier, mechanism.sample_rate, mechanism.steps))
        with warnings.catch_warnings():
            # Said once, and louder, before the run.
            warnings.simplefilter("ignore", FixedSeedWarning)
            return self._engine.make_private(
                module=prepared.model,
                optimizer=adamw(prepared.model, self.options.rate),
                data_loader=DataLoader(
                    prepared.split.training, batch_size=mechanism.batch_size, generator=self._unsafe_generator(stream=0)
                ),
                noise_multiplier=mechanism.noise_multiplier,
                max_grad_norm=mechanism.max_grad_norm,
                grad_sample_mode=self.options.strategy,
                # A graph calls the model itself.
                wrap_model=self.options.strategy != "graph",
                noise_generator=self._unsafe_generator(stream=1),
                budget=budget,
                memory_budget=self.options.memory_budget,
                factor_dtype=factor_dtype_of(self.options.factor_dtype),
            )

    @property
    def strategy(self) -> str:
        """The clipping strategy in use: what was asked for, and what ``auto`` became."""
        asked, used = self.options.strategy, self.optimizer.clipper.resolve_strategy()
        return used if asked == used else f"{used} ({asked})"

    def save(self) -> None:
        """Replace the resume point; only between two steps, and in all processes."""
        self._saved = time.monotonic()
        if not (self._divided or self._ranks.is_first):
            return
        self._engine.save_checkpoint(
            path=self._point.path,
            module=self._base_model,
            optimizer=self.optimizer,
            checkpoint_dict=self._point.entries(self.options, self.state),
        )

    def _restore(self, lost: int) -> None:
        """Continue from the resume point; without lost steps the resumed run is the run that would have been."""
        self._engine.load_checkpoint(
            path=self._point.path,
            module=self._base_model,
            optimizer=self.optimizer,
            torch_load_kwargs={"map_location": "cpu"},
            fresh_randomness=lost > 0,
        )

    def _unsafe_generator(self, *, stream: int) -> torch.Generator | None:
        if self.options.unsafe_noise_seed is None:
            return None
        # A session after a crash must not draw the first one's noise again.
        return torch.Generator().manual_seed(self.options.unsafe_noise_seed + 2 * (self.state.sessions - 1) + stream)

    def epsilon(self) -> float:
        """Bound what was spent so far.

        Returns:
            ε at the mechanism's δ.
        """
        return self._engine.accountant.get_epsilon(self.mechanism.delta)

    def guarantee(self) -> tuple[Bounds, str]:
        """Give what was spent in the end, and what it means.

        Returns:
            Bounds on ε at the mechanism's δ, and the engine's summary.
        """
        with warnings.catch_warnings():
            # A δ that promises little was said before the run.
            warnings.simplefilter("ignore", UserWarning)
            return self._engine.epsilon_bounds(self.mechanism.delta), self._engine.summary(self.mechanism.delta)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Checks of the model that were switched off or could not run, and why."""
        return tuple(filter(None, [self.optimizer.clipper.coverage().unchecked]))

    def close(self) -> None:
        """Detach the clipper and give the ledger back; the model is an ordinary one again."""
        self._engine.close()
        self.optimizer.clipper.remove()
        self._base_model.zero_grad(set_to_none=True)

    def run(self, *, stop: StopRequest, on_step: Callable[[], None]) -> None:
        """Take the steps that are left, or stop after the one in which stopping was asked for; in all processes.

        Resume points are saved on the way.

        Args:
            stop: Asked after every step.
            on_step: Called after every step.
        """
        self.model.train()
        if not self._unfinished:
            return
        physical = self.options.physical_batch_size or self._find_physical_batch()
        released = self._released_in_parts(physical) if self._divided else self._released(physical)
        self._begin_step()
        while self._unfinished:
            for _ in released():
                is_due = self._finish_step(stop)
                on_step()
                if self._ranks.count == 1:
                    self._stopping |= stop.requested
                if is_due:
                    self.save()
                if not self._unfinished:
                    break
                self._begin_step()

    def _released(self, physical: int) -> Callable[[], Iterator[None]]:
        """Return what goes through the loader once, and yields after each release."""
        parts = PhysicalBatches(self.optimizer, max_physical_batch_size=physical)

        def released() -> Iterator[None]:
            for ids_BT, marks_B2 in self.loader:
                self._measured(partial(self._forward_backward_step, parts, ids_BT, marks_B2))
                self.measures.physical_batch = parts.size
                yield

        return released

    def _released_in_parts(self, physical: int) -> Callable[[], Iterator[None]]:
        """Return the same for a model that the processes hold in parts: all run it equally often, on no sample too."""
        self.measures.physical_batch = physical
        parts = BatchMemoryManager(data_loader=self.loader, max_physical_batch_size=physical, optimizer=self.optimizer)

        def released() -> Iterator[None]:
            with parts as batches:
                for batch in batches:
                    self._measured(partial(self._part, batch))
                    if not self.optimizer.last_step_was_virtual:
                        yield

        return released

    def _part(self, batch: tuple[Tensor, Tensor]) -> None:
        self._loss_sum += float(self._forward_backward(batch).sum())
        self._step_samples += len(batch[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _find_physical_batch(self) -> int:
        """Find the largest physical batch that fits, or on a CPU the largest that still pays, with dummy passages."""
        upper = largest_batch(self.mechanism.batch_size)
        budget = None
        if self.device.type == "cuda":
            budget = int(CUDA_SHARE * torch.cuda.mem_get_info(self.device)[0])
        else:
            upper = min(upper, CPU_ENOUGH)
        with self.optimizer.rehearsal():
            return find_max_physical_batch_size(self._trial_step, upper=upper, memory_budget=budget, device=self.device)

    def _trial_step(self, size: int) -> None:
        ids_BT, marks_B2 = dummy_passages(size, self._width, self._vocabulary, self.device)
        self.optimizer.clipper.backward(self._sample_losses(self.model, ids_BT, marks_B2))

    @property
    def _unfinished(self) -> bool:
        return self.state.step < self.mechanism.steps and not self._stopping

    def _begin_step(self) -> None:
        if self._ranks.count > 1:
            # Dropout of its own for each share of the samples, in a resumed run the same.
            place = f"{self.state.seed} {self._ranks.rank // self._sharing} {self.state.step}"
            torch.manual_seed(int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest(), "big"))
        rate = learning_rate_at(self.state.step, steps=self.mechanism.steps, peak=self.options.rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._step_began = time.perf_counter()

    def _measured(self, work: Callable[[], None]) -> None:
        if self._session_steps == UNTIMED_STEPS - 1:
            self._peak = max(self._peak, peak_bytes(work, self.device) or 0)
        else:
            work()

    def _forward_backward_step(self, parts: PhysicalBatches, ids_BT: Tensor, marks_B2: Tensor) -> None:
        # A Poisson batch can be empty: then the step is one of noise only, which the optimizer takes by itself.
        if len(ids_BT) > 0:
            for losses_B in parts.run((ids_BT, marks_B2), self._forward_backward):
                self._loss_sum += float(losses_B.sum())
            self._step_samples += len(ids_BT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _sample_losses(self, model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
        with precision(self.device, self.options.dtype):
            return self._losses(model, ids_BT, marks_B2)

    def _forward_backward(self, part: tuple[Tensor, Tensor]) -> Tensor:
        ids_BT, marks_B2 = (tensor.to(self.device) for tensor in part)
        if self._graph is not None:
            found: Tensor = self._graph(ids_BT, marks_B2)
            return found
        losses_B = self._sample_losses(self.model, ids_BT, marks_B2)
        self.optimizer.clipper.backward(losses_B)
        return losses_B.detach()

    def _finish_step(self, stop: StopRequest) -> bool:
        """Note what the step was, over all processes, and return whether a resume point is due."""
        is_due = time.monotonic() - self._saved >= self.options.checkpoint_seconds
        found = gathered("step", (self._loss_sum, self._step_samples, stop.requested, is_due))
        losses, samples, _, due = zip(*found[:: self._sharing], strict=True)
        self._stopping = any(stops for _, _, stops, _ in found)
        loss = sum(losses) / sum(samples) if sum(samples) else math.nan
        self.state.losses.append(loss if math.isfinite(loss) else None)
        self.state.samples.append(sum(samples))
        if self._session_steps >= UNTIMED_STEPS:
            self.measures.timed.append((sum(samples), time.perf_counter() - self._step_began))
        self.measures.peak_bytes = self._peak or None
        self._session_steps += 1
        self._loss_sum, self._step_samples = 0.0, 0
        return due[0] and self._unfinished
