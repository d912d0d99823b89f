"""`DPOptimizer`: turns the clipped sum into a private release and hands it to any torch optimizer.

There is one class for every clipping strategy: what differs between strategies lives in the clipper, what is released
does not.

Several optimizers over one model, as for Muon on the matrices and AdamW on the rest, have one release
(`MemberOptimizer`).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip import _torch, _validate
from ghostclip.capture.nodes import nodes_behind
from ghostclip.checks.loss_graph import refuse_foreign
from ghostclip.clipper import GhostClipper
from ghostclip.distributed.agreement import Leaving, Share, noting
from ghostclip.distributed.release import SharedNoise
from ghostclip.errors import DrawError, InvalidOptionError, MissingGradientError
from ghostclip.facade import clipper_of
from ghostclip.graph.takeover import CompiledRecord
from ghostclip.noise import ExactNoise, make_noise_source
from ghostclip.noise.exact import ExactRelease
from ghostclip.noise.keyed import NoiseSource, add_noise_
from ghostclip.noise.keys import Owner
from ghostclip.optim import checks
from ghostclip.optim.checks import initialises_state
from ghostclip.optim.draws import BatchToken, DrawLog, LogicalBatch, Match, Replay
from ghostclip.optim.wrapped import Releases, WrappedOptimizer, evaluated, watch_other_optimizers

_log = logging.getLogger(__name__)

StepHook = Callable[["DPOptimizer"], None]
ReleaseHook = Callable[["DPOptimizer", Sequence[torch.Tensor]], None]


class SkipStep(Exception):  # noqa: N818 - no error: a step hook raises it, and the step does nothing
    """A step hook asks for a step that releases nothing, without an error."""


class DPOptimizer(WrappedOptimizer):
    """Wraps a torch optimizer so that each step releases a noisy sum of clipped gradients, and nothing else.

    A step computes, for every trainable parameter of the wrapped optimizer,

        grad = (Σ_b min(1, C/‖g_b‖)·g_b + N(0, (σ·sensitivity)²)) / expected_batch_size

    or what another clip policy makes of the sum; the sum and its sensitivity are asked of the clipper (there is no
    second copy of C), the noise is added in float32 at least, and `loss_reduction="sum"` leaves out the division. If k
    mean losses were accumulated by k backwards, their mean is released: k divides as well. Parameters without a
    gradient in this step get zero plus noise like all others.

    Between backward and step `p.grad` holds nothing of this training: the sums stay with the clipper, where loggers,
    gradient scalers and other optimizers neither see nor change them. `zero_grad()` of this optimizer or of the model
    discards what was accumulated since the last step, as in torch.

    Privacy:
        One step is one Gaussian mechanism with noise multiplier σ on the logical batch, adjacent as the clipper's
        relation says. Step and release hooks run before anything leaves this object: a ledger attached there
        over-counts after a crash and never under-counts, and a hook that raises stops the release. Whatever raises in
        a step, the logical batch is dropped: nothing of it is released later. Where the draws of a private loader are
        known (`require_draws`, as `PrivacyEngine` does), a step whose rows they do not explain is refused. Not private:
        whatever is read from the clipper.

    Args:
        optimizer: Any torch optimizer over parameters of the clipper's model that takes one gradient per step.
        noise_multiplier: σ, the noise's standard deviation in units of the sensitivity; 0 trains without privacy.
        max_grad_norm: C, handed on to the clipper; None leaves the clipper's.
        expected_batch_size: The public constant that the sum is divided by; may be None for `loss_reduction="sum"`.
        loss_reduction: "mean" or "sum", as the loss was declared to the clipper.
        generator: Makes the noise reproducible, and so not private against who knows it.
        secure_mode: Whether noise comes from a cryptographic keystream.
        clipper: Where the clipped sums come from; by default that of the `GradSampleModule` that holds the parameters.
        noise_source: Where the noise comes from, in place of `generator` and `secure_mode`.

    Raises:
        InvalidOptionError: If an option is out of range or contradicts the clipper, or if the optimizer is one that
            evaluates its closure more than once per step.
        UncoveredParameterError: If a trainable parameter of the optimizer is not clipped by the clipper.
    """

    @_validate.suggests_options
    def __init__(  # noqa: PLR0913 - the public constructor mirrors the mechanism, one argument per part
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | None = None,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        clipper: GhostClipper | None = None,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(optimizer)
        checks.refuse_unfit(optimizer)
        self.clipper = clipper = clipper or clipper_of(self.params)
        self.loss_reduction = _validate.choice(loss_reduction, "loss_reduction", ("mean", "sum"))
        if loss_reduction != clipper.loss_reduction:
            raise InvalidOptionError(
                f"loss_reduction={loss_reduction!r}: the clipper was told {clipper.loss_reduction!r}; use one."
            )
        self.expected_batch_size = expected_batch_size
        # An adaptive bound divides its count by it, whatever the loss.
        if loss_reduction == "mean" or expected_batch_size is not None or clipper.policy.adaptation is not None:
            self.expected_batch_size = _validate.positive(expected_batch_size, "expected_batch_size")
        self._owner = Owner(self)
        self._undivided: float | None = None  # by what a release is still to be divided; None where by nothing
        self._batch = LogicalBatch()
        self._step_hooks: list[StepHook] = []
        self._release_hooks: list[ReleaseHook] = []
        self.releases = 0
        self.noise_source = _chosen_noise(noise_source, clipper, generator=generator, secure_mode=secure_mode)
        # Integer sums. By level, not by type: a source that several ranks share adds up their integers as floats.
        exact = self.noise_source.level == "exact"
        self._collected = ExactRelease(clipper, cast("ExactNoise", self.noise_source)) if exact else None
        self.rounds = 0
        self.round_has_released = False
        self._warned: set[str] = set()
        self.noise_multiplier = noise_multiplier
        clipper.withhold_gradients(discard=weakref.WeakMethod(self.discard), samples=self._collected is not None)
        self._draws: DrawLog | None = None
        self._leaving, self._lost, self._update = Leaving(), 0, checks.Update(clipper.model)
        self._released, self.compiled = Releases(self.params), CompiledRecord()
        self.is_applying = False
        self.scheduled: set[str] = set()
        """Values of the mechanism that a schedule moves, which a saved state may therefore differ in."""
        if max_grad_norm is not None:
            self.max_grad_norm = max_grad_norm
        if self._noise_multiplier > 0:
            self._refuse_unbounded(clipper.sensitivity())
        checks.refuse_uncovered(clipper, self.params)
        checks.warn_about_parameters(clipper, self.params)
        watch_other_optimizers(self)

    # What the mechanism is

    @property
    def noise_multiplier(self) -> float:
        """σ; may be set between steps, as a schedule does."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = _validate.non_negative(value, "noise_multiplier")

    @property
    def max_grad_norm(self) -> float:
        """C, which lives in the clipper's policy; may be set between logical batches, as a schedule does."""
        return self.clipper.policy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not self.is_idle and value != self.max_grad_norm:
            raise InvalidOptionError(
                f"max_grad_norm={value!r}: part of a logical batch was already clipped to {self.max_grad_norm}. "
                "Change it after step() has released the batch."
            )
        self.clipper.policy.max_grad_norm = _validate.positive(value, "max_grad_norm", allow_infinity=True)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in one coordinate of the sum, before the division by `divisor`.

        Raises:
            InvalidOptionError: If the sum has no finite sensitivity and noise was asked for.
        """
        if self._noise_multiplier == 0:
            return 0.0
        std = self.clipper.policy.gradient_noise_multiplier(self._noise_multiplier) * self.clipper.sensitivity()
        self._refuse_unbounded(std)
        return std

    def _refuse_unbounded(self, std: float) -> None:
        """Refuse noise that would have to be infinite."""
        if not math.isfinite(std):
            raise InvalidOptionError(
                f"max_grad_norm={self.max_grad_norm}: no noise hides an unbounded gradient. Set a finite bound."
            )

    @property
    def accumulated_iterations(self) -> int:
        """Backward passes that one record of the current logical batch may have contributed to (usually 1)."""
        return max(self._batch.participations, self._batch.waiting(self.clipper.backward_passes))

    @property
    def last_step_was_virtual(self) -> bool:
        """Whether the last step() only accumulated, so that the parameters did not change."""
        return self._batch.open

    @property
    def divisor(self) -> float:
        """The public constant by which a noisy sum is divided; k accumulated mean losses are divided by k as well."""
        if self.loss_reduction != "mean" or not self.expected_batch_size:
            return 1.0
        return float(self.expected_batch_size) * max(1, self._batch.uses)

    @property
    def grad_samples(self) -> list[torch.Tensor]:
        """Per-sample gradients of each parameter, of all backwards since they were dropped, `[B, ...]`. Not private.

        Raises:
            MissingGradientError: Without `grad_sample_mode="hooks"`, or before a backward.
        """
        samples = [getattr(p, "grad_sample", None) for p in self.params if p.requires_grad]
        if any(grad is None for grad in samples):
            raise MissingGradientError(
                'grad_samples: there are none. They are formed with grad_sample_mode="hooks" only, by a backward.'
            )
        return [torch.cat(grad) if isinstance(grad, list) else grad for grad in samples]  # type: ignore[misc]

    def attach_step_hook(self, fn: StepHook) -> None:
        """Run a function in every releasing step, after all checks and before noise is drawn.

        Hooks add up and run in the order they were attached; the budget's is the first. (To see the noisy gradient,
        use torch's `register_step_pre_hook`.)

        Args:
            fn: Called with this optimizer; an exception it raises stops the step with nothing released.
        """
        self._step_hooks.append(fn)

    def attach_release_hook(self, fn: ReleaseHook) -> None:
        """Run a function in every releasing step on what is about to be released, before anything can see it.

        Args:
            fn: Called with this optimizer and the noisy gradients, which it must not change; the ledger's is the first.
                An exception it raises stops the step with nothing released.
        """
        self._release_hooks.append(fn)

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the logical batch and update the parameters, or keep accumulating if the step is virtual.

        Args:
            closure: Evaluates the model once, calls backward and returns the loss.

        Returns:
            What the closure returned, or None without one.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last step.
            UncoveredParameterError: If a trainable parameter of the optimizer is not clipped.
            TamperedGradientError: If a gradient was put into `p.grad` since backward.
            DrawError: If the rows that the model saw are not those of the next draws, where draws are known.
        """
        loss = None if closure is None else evaluated(closure)
        if (self.is_idle and checks.initialises_state(self.original_optimizer)) or self.pre_step():
            try:
                self.apply_to(self.original_optimizer)
            except BaseException:
                self.original_optimizer.zero_grad(set_to_none=True)
                raise
        return loss

    def begin_round(self) -> None:
        """Take a step up to the update, which each of several optimizers then makes by itself."""
        self.round_has_released = self.pre_step()
        self.rounds += 1

    @property
    def has_untaken_backward(self) -> bool:
        """Whether a backward has completed that no step, virtual ones included, has taken up."""
        return self.clipper.has_clipped_sum and not self._batch.includes_all(self.clipper.backward_passes)

    @noting()
    def apply_to(self, optimizer: Optimizer) -> None:
        """Let an optimizer update its parameters by the release in `p.grad`.

        Args:
            optimizer: The wrapped one, or one of several that are wrapped as one.
        """
        self.is_applying = True
        try:
            optimizer.step()
        except BaseException:
            self._lost += 1
            raise
        finally:
            self.is_applying = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing was accumulated since the last release."""
        return not (self._batch.open or self.clipper.has_clipped_sum)

    @noting()
    @torch.no_grad()
    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Everything of a step but the inner optimizer's update.

        Args:
            closure: Evaluates the model once and calls backward.

        Returns:
            True if `p.grad` now holds a release for the inner optimizer, False after a virtual step or one that a
            spent budget skipped.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last step.
            UncoveredParameterError: If a trainable parameter of the optimizer is not clipped.
            TamperedGradientError: If a gradient was put into `p.grad` since backward.
            DrawError: If the rows that the model saw are not those of the next draws, where draws are known.
        """
        if closure is not None:
            evaluated(closure)
        self.clipper.rest()
        try:
            with self._agreeing():
                self._require_gradient()
            if self._batch.skip_next:
                self._batch.close_virtual_step(self.clipper.generation)
                return False
            self._release()
        except SkipStep:
            self._drop()
            return False
        except BaseException:
            self._drop()
            raise
        return True

    def _require_gradient(self) -> None:
        """Refuse a step without a clipped gradient since the last one, or after a lost part of its logical batch."""
        token = self._batch.token
        empty = token.size == 0 if token is not None else self._draws is not None and self._draws.next_is_empty
        if not self.clipper.has_clipped_sum and empty:
            # A loop may well skip the model for a batch without rows; the noise-only step must happen all the same.
            self.clipper.mark_empty_batch()
        if not self.clipper.has_clipped_sum:
            raise MissingGradientError(
                "step() was called without a clipped gradient since the last step. Call loss.backward() (or "
                "clipper.backward(loss) in the two-pass strategies) on the private model first; for a batch without "
                "rows call clipper.mark_empty_batch()."
            )
        self._batch.count_passes(self.clipper.backward_passes, self.clipper.generation, empty=empty)
        if self._collected is not None:
            self._collected.collect()
        if self.clipper.strategy == "hooks":
            self._show_sums()

    def _release(self, *, divide: bool = True) -> None:
        """Replace the clipped sums in `p.grad` by the noisy, scaled release.

        Privacy:
            The order matters: first everything that can refuse, then noise, then the ledger; only then does anything
            leave the clipper's care.
        """
        self._owner.require(self, remedy=checks.FORKED)
        with self._agreeing():
            if self._batch.token is not None:
                self._batch.require_last_part(self._batch.token)
            drawn = self._require_drawn()
            trainable, std = self._examined()
        self._require_one_draw(drawn, std)
        try:
            self._release_agreed(trainable, std, drawn, divisor=self.divisor if divide else 1.0)
        except BaseException:
            self._lost += 1
            raise

    def _release_agreed(
        self, trainable: Sequence[nn.Parameter], std: float, drawn: Match | None, *, divisor: float
    ) -> None:
        """Add noise and hand over the release, which no rank refuses any more."""
        # The sums turn into the release, and what is left of the last one makes room.
        with self._leaving.errors_shared() if isinstance(self.noise_source, SharedNoise) else nullcontext():
            sums = self.clipper.hand_over_sums(trainable)
            self._take_gradients()
            released = self._noisy(trainable, sums, std, divisor)
            bound = self._next_bound()
        try:
            for release_hook in self._release_hooks:
                release_hook(self, released)
        finally:
            # Also after a failure: its number may be in the ledger, and stands for these values only.
            self.releases += 1
        if self._draws is not None and drawn is not None:
            self._draws.use(drawn)
        self._forget()
        if bound is not None:
            self.clipper.policy.max_grad_norm = bound
        for p, gradient in zip(trainable, released, strict=True):
            p.grad = gradient
        self._released.note(list(zip(trainable, released, strict=True)))

    def _noisy(
        self, trainable: Sequence[nn.Parameter], sums: list[torch.Tensor | None], std: float, divisor: float
    ) -> list[torch.Tensor]:
        """Return the release of each parameter: noise added to its clipped sum, divided by a public constant."""
        # Sums are None where nothing contributed; they are overwritten. Collected integers replace them.
        if self._collected is not None:
            released = self._collected.release(trainable, std=std)
            if divisor != 1 and released:
                _torch.divide_all_(released, divisor)
        else:
            pairs = zip(trainable, sums, strict=True)
            released = [_zeros_for(p) if clipped is None else clipped for p, clipped in pairs]
            sums.clear()
            # Also where it is 0: a source that several ranks share adds up their sums. By default `FastNoise`: NumPy's
            # SFC64 on a CPU, ChaCha8 or torch's normal on a GPU.
            add_noise_(self.noise_source, released, std, divisor)
        for index, p in enumerate(trainable):
            # One by one: 16-bit parameters must not have all releases twice.
            if released[index].dtype != p.dtype:
                released[index] = released[index].to(p.dtype)
        return released

    def _next_bound(self) -> float | None:
        """Return C of the next step where the policy adapts it to the samples of this step, else None.

        Privacy:
            The count is part of the step's one release; its cost is in the step's σ (see `QuantileAdaptation`).
        """
        policy = self.clipper.policy
        if policy.adaptation is None:
            return None
        assert self.expected_batch_size is not None, "checked when the optimizer was made"
        count = policy.adaptation.take_count().reshape(1)
        std = policy.adaptation.count_std * (policy.sensitivity(self.clipper.relation) / policy.max_grad_norm)
        # Also where it is 0: a source that several ranks share adds up their counts.
        self.noise_source.add_(count, std=std if self._noise_multiplier > 0 else 0.0)
        return policy.adaptation.next_bound(policy.max_grad_norm, count.item(), self.expected_batch_size)

    def _examined(self) -> tuple[list[nn.Parameter], float]:
        """Run all checks that can refuse or skip a release; return the trainable parameters and the noise's std."""
        noise_multiplier, std = self._noise_multiplier, self.noise_std
        if self.clipper.roster.changed:
            fixed = self.releases > 0 or self.noise_source.level == "exact"
            checks.refuse_changed_parameters(self.clipper, self.params, fixed=fixed)
        trainable = [p for p in self.params if p.requires_grad]
        if isinstance(self.noise_source, SharedNoise):
            self.noise_source.require_parameters(trainable)
        # What has a clipped sum is clipped; for the rest the whole model is looked through.
        checks.refuse_uncovered(self.clipper, self.clipper.without_sum(trainable))
        self._released.refuse_strangers(self)
        checks.warn_about_mechanism(self.noise_multiplier, self._batch.participations, self._warned)
        for step_hook in self._step_hooks:
            step_hook(self)
        checks.refuse_changed_noise((noise_multiplier, std), (self.noise_multiplier, self.noise_std))
        return trainable, std

    def _agreeing(self) -> AbstractContextManager[None]:
        """Tell the other ranks of a training when this one refuses a step, so that they do not wait for it."""
        return _telling(self.noise_source) if isinstance(self.noise_source, SharedNoise) else nullcontext()

    def _require_one_draw(self, drawn: Match | None, std: float) -> None:
        """Refuse the step on all ranks of a training unless they have the same draw, bound and noise."""
        if not isinstance(self.noise_source, SharedNoise):
            return
        share = Share(sum(self.clipper.rows_seen))
        if drawn is not None:
            # This rank's rows are those of its draws; where the last of several ends, ranks may tell differently.
            first = drawn.draws[0]
            share = Share(first.rows, first.number, first.records)
        share = share._replace(std=std, sensitivity=self.clipper.sensitivity(), asks=int(self.clipper.wants_proof))
        if not self.noise_source.in_parts:
            parameters, settings = self._update.digests(self.original_optimizer.param_groups)
            share = share._replace(parameters=parameters, settings=settings)
        batch = self._batch
        # What ranks divide by and account for is what the one with the most backwards does.
        agreed = self.noise_source.require_one_draw(
            share._replace(lost=self._lost, uses=batch.uses, rounds=batch.rounds)
        )
        batch.uses, batch.rounds = agreed.uses, agreed.rounds
        if agreed.asks:
            self.clipper.prove_next()

    def require_draws(self, draws: DrawLog) -> None:
        """Refuse, from now on, releases whose rows are not those of the next draws, or of records drawn for others.

        Args:
            draws: The log of the sampler that the account is of.
        """
        draws.claimed, draws.axis = True, self.clipper.axis
        self.clipper.note_inputs(draws)
        self._draws = draws

    def _require_drawn(self) -> Match | None:
        """Return the draws that the rows of this release come from, None where the sampling is not known."""
        if self._draws is None:
            return None
        rows = self._batch.rows_of_parts(self.clipper.rows_seen)
        match = self._draws.match(rows)
        if match is None:
            raise DrawError(checks.not_drawn(rows, [draw.rows for draw in self._draws.waiting]))
        self._batch.note_rounds(match.rounds)
        inputs = self.clipper.inputs_noted
        for one in filter(None, inputs):
            if one.crossed is not None:
                raise DrawError(checks.crossed(one.crossed))
            if one.edges:
                refuse_foreign(nodes_behind([edge.node for edge in one.edges]))
        traced = self._draws.trace(match, inputs)
        if isinstance(traced, Replay):
            raise DrawError(checks.replayed(traced, match.draws[0].number))
        return traced

    def _drop(self) -> None:
        """Forget the logical batch; no parameter keeps a clipped sum, also not one frozen since backward."""
        self._hide_sums()
        self._forget()
        self._take_gradients()

    def _forget(self) -> None:
        """Forget the logical batch, but for what parameters hold: the release, and what strategy "hooks" shows."""
        self.clipper.reset()
        self._batch.clear()

    def _take_gradients(self) -> None:
        """Set every `p.grad` to None, without the profiler's note that each `zero_grad` of torch makes."""
        for p in self.params:
            # Asking is cheaper than telling, and a step tells twice.
            if p.grad is not None:
                p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step, and the last release in `p.grad`.

        What virtual steps have accumulated is kept for the next physical batch; discarding a physical batch before its
        virtual step discards the logical batch, whose release is then refused.

        Args:
            set_to_none: Whether gradients become None or zeros, as in torch.
        """
        self.discard()
        if set_to_none and getattr(self.original_optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad:
            self._take_gradients()
        else:
            self.original_optimizer.zero_grad(set_to_none=set_to_none)

    def discard(self) -> None:
        """Forget the sums of backwards that no step has taken up yet, and what strategy "hooks" shows of others."""
        self.clipper.drop_samples()
        if not self._batch.includes_all(self.clipper.backward_passes):
            self._hide_sums()
            self.clipper.discard()

    # A step, part by part: what comes before `add_noise`, which is the release, is exact and not private.

    @torch.no_grad()
    def clip_and_accumulate(self) -> None:
        """First part of a step: take note of a backward, which has clipped and added up already.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last step.
            UncoveredParameterError: If the model's parameters are no longer those of this optimizer.
        """
        self._require_gradient()

    # The name of Opacus's two-pass optimizer.
    accumulate = clip_and_accumulate

    @torch.no_grad()
    def add_noise(self) -> None:
        """Second part of a step: release the noisy sum, undivided, to `p.grad`.

        Raises:
            MissingGradientError: If there is no clipped sum to release.
        """
        if not self.clipper.has_clipped_sum:
            raise MissingGradientError("add_noise(): no clipped sum. Call backward and clip_and_accumulate() first.")
        try:
            # The logical batch, and with it the number of its passes, ends with the release.
            divisor = self.divisor
            self._release(divide=False)
            self._undivided = divisor
        except BaseException as error:
            self._drop()
            if not isinstance(error, SkipStep):
                raise

    @torch.no_grad()
    def scale_grad(self) -> None:
        """Third part of a step: divide the release by the expected batch size if the loss is a mean.

        Raises:
            MissingGradientError: If nothing was released since it was last called.
        """
        if self._undivided is None:
            raise MissingGradientError("scale_grad(): nothing undivided was released. Call add_noise() first.")
        divisor, self._undivided = self._undivided, None
        gradients = [p.grad for p in self.params if p.requires_grad and p.grad is not None]
        if gradients:
            _torch.divide_all_(gradients, divisor)

    def _show_sums(self) -> None:
        """Set `p.summed_grad` to a copy of the clipped sum, where per-sample gradients are shown too."""
        for p in self.params:
            if p.requires_grad:
                p.summed_grad = self.clipper.summed_gradient(p)  # type: ignore[attr-defined]

    def _hide_sums(self) -> None:
        for p in self.params if self.clipper.strategy == "hooks" else ():
            p.summed_grad = None  # type: ignore[attr-defined]

    # Virtual steps

    def signal_skip_step(self, do_skip: bool = True) -> None:  # noqa: FBT001, FBT002 - Opacus's signature
        """Say whether the next step() is virtual: it keeps the clipped sum and neither releases nor counts.

        Args:
            do_skip: True for every physical batch of a logical batch but the last.
        """
        self._batch.skip_next = bool(do_skip)

    def begin_physical_batch(self, token: BatchToken) -> None:
        """Take the token of the physical batch that is about to be processed.

        Args:
            token: Which logical batch it belongs to, and whether it is the last part.

        Raises:
            MissingGradientError: If the previous logical batch was computed and never released, or the parts of this
                one do not follow each other.
        """
        if token.chunk == 0:
            self.require_released()
        self._batch.enter(token, untaken=self.has_untaken_backward)

    @property
    def current_token(self) -> BatchToken | None:
        """The token of the physical batch that is being processed, if batches come with tokens."""
        return self._batch.token

    def require_released(self) -> None:
        """Check that no logical batch is half-way.

        Raises:
            MissingGradientError: If one was computed and not released.
        """
        if not self.is_idle:
            raise MissingGradientError(
                f"the last logical batch ({self._batch.token}) was computed and not released: optimizer.step() must be "
                "called after every physical batch."
            )

    def discard_pending(self, *, token: BatchToken | None = None) -> None:
        """Drop a logical batch that was left half-way; nothing of it was released, so nothing is counted.

        Args:
            token: Drop it only if this is its latest physical batch (by identity); None drops it in any case.
        """
        if token is not None and token is not self._batch.token:
            return
        if not self.is_idle:
            _log.warning("a logical batch was left before it was released; its clipped sum is dropped")
            self.clipper.reset()
        self._batch.clear()

    def owns(self, optimizer: Optimizer) -> bool:
        """Say whether an optimizer is the one that this one wraps.

        Args:
            optimizer: Any optimizer.

        Returns:
            True if so.
        """
        return optimizer is self.original_optimizer or optimizer in getattr(self.original_optimizer, "members", ())

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return a parameter's name in the model.

        Args:
            parameter: One of this optimizer's.

        Returns:
            Its name, or its shape where the model does not hold it.
        """
        names = (name for name, p in self.clipper.model.named_parameters() if p is parameter)
        return next(names, f"of shape {tuple(parameter.shape)}")


def _zeros_for(p: nn.Parameter) -> torch.Tensor:
    """Return a zero sum for a parameter without one."""
    return torch.zeros_like(
        p, dtype=torch.promote_types(p.dtype, torch.float32), memory_format=torch.contiguous_format, requires_grad=False
    )


@contextmanager
def _telling(noise_source: SharedNoise) -> Iterator[None]:
    try:
        yield
    except Exception:
        # Where the others are gone already, the error that counts is this rank's own.
        with suppress(RuntimeError):
            noise_source.require_one_draw(None)
        raise


def _chosen_noise(
    noise_source: NoiseSource | None, clipper: GhostClipper, *, generator: torch.Generator | None, secure_mode: bool
) -> NoiseSource:
    """Return the given noise source, or a fresh one; refuse options that contradict it or the clipper's ranks."""
    if noise_source is None:
        noise_source = make_noise_source(level="secure" if secure_mode else "fast", generator=generator)
    elif generator is not None or secure_mode:
        raise InvalidOptionError("noise_source with generator or secure_mode: these make a source of their own.")
    checks.refuse_other_shares(clipper, noise_source)
    return noise_source


class JoinedOptimizer(Optimizer):
    """Several torch optimizers over disjoint parameters as one: all their parameter groups, one step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # `Optimizer.__init__` is not called: groups and states live in the members.
        if not optimizers:
            raise InvalidOptionError("optimizer=[]: give at least one optimizer.")
        self.members = list(optimizers)
        ids = [id(p) for group in self.param_groups for p in group["params"]]
        if len(ids) != len(set(ids)):
            raise InvalidOptionError("optimizer=[...]: two of them hold the same parameter. Give each its own.")

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of all members by parameter."""
        return {p: state for member in self.members for p, state in member.state.items()}

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Those of the first member."""
        return self.members[0].defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let all members update their parameters; the private optimizer has evaluated its closure."""
        del closure
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Empty the gradients of all members."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the members' states under `members`, with the groups of all of them."""
        states = [member.state_dict() for member in self.members]
        groups = [group for state in states for group in state["param_groups"]]
        return {"state": {}, "param_groups": groups, "members": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the members' states."""
        states = state_dict.get("members", [])
        if len(states) != len(self.members):
            raise InvalidOptionError(
                f"state of {len(states)} optimizers: {len(self.members)} were made private together. Load a state "
                "that they have saved."
            )
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        """Refuse hooks of the joined optimizer, whose members are stepped one by one."""
        if name.startswith("_optimizer_"):
            raise InvalidOptionError("hooks of several optimizers: register them on one of the optimizers.")
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.members))})"


class MemberOptimizer(WrappedOptimizer):
    """One of several optimizers of a private training; each is stepped, zeroed, scheduled and saved by itself.

    The first `step()` after a backward releases the gradients of all members at once and is the one entry in the
    account; it updates this member's parameters, and each other member's `step()` applies its part of that release.

    Privacy:
        One Gaussian mechanism for each draw, on the clipped sum over the parameters of all members together.

    Attributes:
        release: The private optimizer of all members, which draws noise and is accounted.

    Args:
        optimizer: The member's own optimizer.
        release: The private optimizer around a `JoinedOptimizer` that holds it.
    """

    def __init__(self, optimizer: Optimizer, release: DPOptimizer) -> None:
        super().__init__(optimizer)
        self.release = release
        self._rounds_applied = 0

    account = property(attrgetter("release.account"), doc="The account that travels with each member's state.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the logical batch if no member has, and update this member's parameters.

        Args:
            closure: Evaluates the model once, calls backward and returns the loss.

        Returns:
            What the closure returned, or None without one.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last release, and this member has applied
                that one already.
        """
        loss = None if closure is None else evaluated(closure)
        release = self.release
        if release.is_idle and initialises_state(self.original_optimizer):
            release.apply_to(self.original_optimizer)
            return loss
        if self._rounds_applied == release.rounds or release.has_untaken_backward:
            release.begin_round()
        self._rounds_applied = release.rounds
        if release.round_has_released:
            release.apply_to(self.original_optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step, of all members, and this one's last release in `p.grad`.

        Args:
            set_to_none: Whether gradients become None or zeros, as in torch.
        """
        self.release.discard()
        self.original_optimizer.zero_grad(set_to_none=set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Look up a missing attribute on the member's own optimizer, and then on the private one."""
        if "release" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original_optimizer if name in vars(self.original_optimizer) else self.release, name)


def release_of(optimizer: Any) -> Any:
    """Return what releases for an optimizer that `make_private` returned, also in a wrapping or a list of several."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, WrappedOptimizer):
        optimizer = inner
    if isinstance(optimizer, (list, tuple)) and optimizer and isinstance(optimizer[0], MemberOptimizer):
        return optimizer[0].release
    return optimizer.release if isinstance(optimizer, MemberOptimizer) else optimizer


def private_optimizer(optimizer: Any) -> DPOptimizer:
    """Return the `DPOptimizer` behind what `make_private` returned; refuse any other optimizer."""
    releasing = release_of(optimizer)
    if not isinstance(releasing, DPOptimizer):
        raise InvalidOptionError(
            f"optimizer: expected the one that make_private() returned, got {type(releasing).__name__}."
        )
    return releasing
