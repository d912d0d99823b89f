"""The private training loop: physical batches in, one release per logical batch, a ledger line before each.

Shapes: B samples of a physical batch, T tokens.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip.data.batch_memory_manager import BatchMemoryManager
from ghostclip.data.physical_batch_size import find_max_physical_batch_size
from ghostclip.errors import FixedSeedWarning
from ghostclip.finetune.checkpoint import RunState, TensorState, generator_states, restore_generators
from ghostclip.finetune.interrupts import StopRequest
from ghostclip.finetune.losses import passage_losses, precision
from ghostclip.finetune.memory import peak_bytes
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.passages import PassageDataset
from ghostclip.finetune.privacy import ACCOUNTANT, Mechanism
from ghostclip.finetune.steps import (
    UNTIMED_STEPS,
    StepMeasures,
    adamw,
    learning_rate_at,
    made_up_passages,
    vocabulary_of,
)
from ghostclip.privacy.account import run_of
from ghostclip.privacy.ledger_file import Entry, LedgerFile
from ghostclip.privacy.optimizer_state import without_keys

if TYPE_CHECKING:
    from ghostclip.accounting import Bounds, IAccountant
    from ghostclip.data import PoissonSampler
    from ghostclip.noise import NoiseSource
    from ghostclip.optim import DPOptimizer

# Of a GPU's free memory; the rest is for fragmentation, noise, and libraries that allocate by themselves.
CUDA_SHARE = 0.8
# On a CPU a batch larger than this only leaves the caches: 256 at once took longer per sample than 64.
CPU_ENOUGH = 64


class PrivateTraining:
    """Model, optimizer and loader made private, and the loop over them.

    Privacy:
        The hook that writes the ledger runs inside ``DPOptimizer.step`` before noise is drawn and before the weights
        change.

    Args:
        model: The model, on its device.
        passages: The training part.
        mechanism: Noise, clipping bound and number of steps.
        options: The run's options.
        state: What happened so far; extended by every step.
    """

    def __init__(
        self,
        model: nn.Module,
        passages: PassageDataset,
        mechanism: Mechanism,
        options: FinetuneOptions,
        state: RunState,
    ) -> None:
        self.mechanism = mechanism
        self.options = options
        self.state = state
        self.measures = StepMeasures()
        self._base_model = model
        self._width, self._vocabulary = passages.width, vocabulary_of(model)
        self.device = next(model.parameters()).device
        engine = ghostclip.PrivacyEngine(accountant=ACCOUNTANT, secure_mode=options.secure_noise)
        loader = DataLoader(
            passages, batch_size=mechanism.batch_size, generator=_unsafe_generator(options, state, stream=0)
        )
        with warnings.catch_warnings():
            # Said once, and louder, before the run.
            warnings.simplefilter("ignore", FixedSeedWarning)
            private = engine.make_private(
                module=model,
                optimizer=adamw(model, options.learning_rate),
                data_loader=loader,
                noise_multiplier=mechanism.noise_multiplier,
                max_grad_norm=mechanism.max_grad_norm,
                poisson_sampling=True,
                grad_sample_mode=options.strategy,
                noise_generator=_unsafe_generator(options, state, stream=1),
            )
        # Between optimizer and loader some strategies return a criterion; the losses here are per passage already.
        self.model = cast("nn.Module", private[0])
        self.optimizer: DPOptimizer = private[1]
        self._loader: DataLoader = private[-1]
        self._engine = engine
        self.accountant: IAccountant = engine.accountant
        self._session_steps = 0
        self._loss_sum = 0.0
        self._step_samples = 0
        self._step_began = 0.0
        self._peak = 0

    @property
    def strategy(self) -> str:
        """The clipping strategy in use: what was asked for, and what ``auto`` became."""
        asked, used = self.options.strategy, self.optimizer.clipper.resolve_strategy()
        return used if asked == used else f"{used} ({asked})"

    @property
    def _noise_source(self) -> NoiseSource:
        return self.optimizer.noise_source

    @property
    def _sampler(self) -> PoissonSampler:
        return self._loader.batch_sampler  # type: ignore[return-value]

    def restore(self, tensors: TensorState) -> None:
        """Continue from a resume point.

        Args:
            tensors: What ``snapshot`` gave, when the point was saved.
        """
        self._base_model.load_state_dict(tensors.model)
        self.optimizer.load_state_dict(tensors.optimizer)
        self.accountant.load_state_dict(tensors.accountant)
        restore_generators(tensors.generators)
        lost = self.state.step - len(self.accountant)
        if lost == 0:
            # Stopped between two steps: the resumed run is the run that would have been.
            self._noise_source.load_state_dict(tensors.secrets["noise"])
            self._sampler.load_state_dict(tensors.secrets["sampler"])
        for _ in range(lost):
            self.accountant.step(
                noise_multiplier=self.mechanism.noise_multiplier, sample_rate=self.mechanism.sample_rate
            )

    def snapshot(self) -> TensorState:
        """Collect what a resume point holds; only between two steps.

        Returns:
            References to the live tensors.
        """
        return TensorState(
            model=dict(self._base_model.state_dict()),
            # The keys are among the secrets: a run that goes on after a crash must not find them here.
            optimizer=without_keys(self.optimizer.state_dict()),
            accountant=dict(self.accountant.state_dict()),
            generators=generator_states(),
            secrets={"noise": self._noise_source.state_dict(), "sampler": self._sampler.state_dict()},
        )

    def epsilon(self) -> float:
        """Bound what was spent so far.

        Returns:
            ε at the mechanism's δ.
        """
        return self.accountant.get_epsilon(self.mechanism.delta) if self.state.step else 0.0

    def guarantee(self) -> tuple[Bounds, str]:
        """Give what was spent in the end, and what it means.

        Returns:
            Bounds on ε at the mechanism's δ, and the engine's summary.
        """
        with warnings.catch_warnings():
            # A δ that promises little was said before the run.
            warnings.simplefilter("ignore", UserWarning)
            return self._engine.epsilon_bounds(self.mechanism.delta), self._engine.summary(self.mechanism.delta)

    def close(self) -> None:
        """Detach the clipper; the model is an ordinary one again."""
        self.optimizer.clipper.remove()
        self._base_model.zero_grad(set_to_none=True)

    def run(self, *, ledger: LedgerFile, stop: StopRequest, on_step: Callable[[], None]) -> None:
        """Take the steps that are left, or stop after the one in which stopping was asked for.

        Args:
            ledger: Gets its line before every release; is taken for this run.
            stop: Asked after every step.
            on_step: Called after every step.
        """
        ledger.lock()
        self.optimizer.attach_step_hook(_ledger_hook(ledger, self.mechanism))
        self.model.train()
        if not self._unfinished(stop):
            return
        physical = self.options.physical_batch_size or self._find_physical_batch()
        self.measures.physical_batch = physical
        manager = BatchMemoryManager(
            data_loader=self._loader, max_physical_batch_size=physical, optimizer=self.optimizer
        )
        with manager as batches:
            self._step_began = time.perf_counter()
            while self._unfinished(stop):
                for ids_BT, lengths_B in batches:
                    self._physical_batch(ids_BT, lengths_B)
                    if self.optimizer.last_step_was_virtual:
                        continue
                    self._finish_step()
                    on_step()
                    self._step_began = time.perf_counter()
                    if not self._unfinished(stop):
                        break

    def _find_physical_batch(self) -> int:
        """Find the largest physical batch that fits, or on a CPU the largest that still pays, with made-up passages."""
        expected = self.mechanism.batch_size
        # A Poisson batch exceeds its mean by six standard deviations about once in 10^9 draws.
        upper = math.ceil(expected + 6.0 * math.sqrt(expected))
        budget = None
        if self.device.type == "cuda":
            budget = int(CUDA_SHARE * torch.cuda.mem_get_info(self.device)[0])
        else:
            upper = min(upper, CPU_ENOUGH)
        with self.optimizer.rehearsal():
            return find_max_physical_batch_size(self._trial_step, upper=upper, memory_budget=budget, device=self.device)

    def _trial_step(self, size: int) -> None:
        ids_BT, lengths_B = made_up_passages(size, self._width, self._vocabulary, self.device)
        with precision(self.device, self.options.dtype):
            losses_B = passage_losses(self.model, ids_BT, lengths_B)
        self.optimizer.clipper.backward(losses_B)

    def _unfinished(self, stop: StopRequest) -> bool:
        return self.state.step < self.mechanism.steps and not stop.requested

    def _physical_batch(self, ids_BT: Tensor, lengths_B: Tensor) -> None:
        rate = learning_rate_at(self.state.step, steps=self.mechanism.steps, peak=self.options.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._session_steps == UNTIMED_STEPS - 1:
            peak = peak_bytes(lambda: self._forward_backward_step(ids_BT, lengths_B), self.device)
            self._peak = max(self._peak, peak or 0)
        else:
            self._forward_backward_step(ids_BT, lengths_B)

    def _forward_backward_step(self, ids_BT: Tensor, lengths_B: Tensor) -> None:
        # A Poisson batch can be empty: then the step is one of noise only, which the optimizer takes by itself.
        if len(ids_BT) > 0:
            with precision(self.device, self.options.dtype):
                losses_B = passage_losses(self.model, ids_BT.to(self.device), lengths_B.to(self.device))
            self.optimizer.clipper.backward(losses_B)
            self._loss_sum += float(losses_B.detach().sum())
            self._step_samples += len(ids_BT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _finish_step(self) -> None:
        loss = self._loss_sum / self._step_samples if self._step_samples else math.nan
        self.state.losses.append(loss if math.isfinite(loss) else None)
        self.state.samples.append(self._step_samples)
        if self._session_steps >= UNTIMED_STEPS:
            self.measures.timed.append((self._step_samples, time.perf_counter() - self._step_began))
        self.measures.peak_bytes = self._peak or None
        self._session_steps += 1
        self._loss_sum, self._step_samples = 0.0, 0


def _ledger_hook(ledger: LedgerFile, mechanism: Mechanism) -> Callable[[DPOptimizer], None]:
    cost = (mechanism.noise_multiplier, mechanism.sample_rate, 1)

    def begin(optimizer: DPOptimizer) -> None:
        run = run_of(optimizer.noise_source.state_dict()) or ""
        ledger.append(Entry(run, len(ledger.entries), (cost,), ""))

    return begin


def _unsafe_generator(options: FinetuneOptions, state: RunState, *, stream: int) -> torch.Generator | None:
    if options.unsafe_noise_seed is None:
        return None
    # A session after a crash must not draw the first one's noise again.
    return torch.Generator().manual_seed(options.unsafe_noise_seed + 2 * (state.sessions - 1) + stream)
