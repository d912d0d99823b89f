"""The parts of a step that can be called one by one or looked into, under Opacus's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.errors import InvalidOptionError, MissingGradientError
from ghostclip.grad_sample.handle import clipper_of
from ghostclip.noise import make_noise_source
from ghostclip.optimizers.release import SkipStep

if TYPE_CHECKING:
    from ghostclip.clipping.clipper import GhostClipper
    from ghostclip.noise import NoiseSource
    from ghostclip.optimizers.dp_optimizer import DPOptimizer
    from ghostclip.optimizers.virtual import LogicalBatch

StepHook = Callable[["DPOptimizer"], None]
ReleaseHook = Callable[["DPOptimizer", Sequence[torch.Tensor]], None]


class StepParts:
    """A step taken apart: `clip_and_accumulate()`, `add_noise()`, `scale_grad()`, then the wrapped optimizer's step.

    Privacy:
        `add_noise` is the release: it is where hooks, budget and ledger are asked. What comes before it is exact and
        not private: per-sample gradients in `p.grad_sample`, and a copy of their clipped sum in `p.summed_grad`, which
        are there with `grad_sample_mode="hooks"` only and end with the release.
    """

    clipper: GhostClipper
    params: list[nn.Parameter]
    loss_reduction: str
    expected_batch_size: float | None
    _batch: LogicalBatch
    noise_source: NoiseSource
    releases: int
    _step_hooks: list[StepHook]
    _release_hooks: list[ReleaseHook]
    _unscaled = False
    _undivided = 1.0
    _shows_sums = False
    _require_gradient: Callable[[], None]
    _drop: Callable[[], None]
    _release: Callable[..., None]

    @property
    def divisor(self) -> float:
        """The public constant that a noisy sum is divided by: of k accumulated mean losses the mean is released."""
        if self.loss_reduction != "mean" or not self.expected_batch_size:
            return 1.0
        return float(self.expected_batch_size) * max(1, self._batch.uses)

    @property
    def grad_samples(self) -> list[torch.Tensor]:
        """Per-sample gradients of the parameters in the last backward, each `[B, ...]`. Not private.

        Raises:
            MissingGradientError: Without `grad_sample_mode="hooks"`, or before a backward.
        """
        found = [getattr(p, "grad_sample", None) for p in self.params if p.requires_grad]
        if any(kept is None for kept in found):
            raise MissingGradientError(
                'grad_samples: there are none. They are formed with grad_sample_mode="hooks" only, by a backward.'
            )
        return [torch.cat(kept) if isinstance(kept, list) else kept for kept in found]  # type: ignore[misc]

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

    @torch.no_grad()
    def clip_and_accumulate(self) -> None:
        """First part of a step: take note of a backward, which has clipped and added up already.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last step.
            UncoveredParameterError: If the model's parameters are no longer those of this optimizer.
        """
        self._require_gradient()
        if self.clipper.strategy == "hooks":
            self._show_sums()

    def accumulate(self) -> None:
        """The same under the name of Opacus's two-pass optimizer."""
        self.clip_and_accumulate()

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
            self._undivided = self.divisor
            self._release(divide=False)
            self._unscaled = True
        except SkipStep:
            self._drop()
        except BaseException:
            self._drop()
            raise

    @torch.no_grad()
    def scale_grad(self) -> None:
        """Third part of a step: divide the release by the expected batch size if the loss is a mean.

        Raises:
            MissingGradientError: If nothing was released since it was last called.
        """
        if not self._unscaled:
            raise MissingGradientError("scale_grad(): nothing undivided was released. Call add_noise() first.")
        self._unscaled = False
        gradients = [p.grad for p in self.params if p.requires_grad and p.grad is not None]
        if gradients:
            _torch.divide_all_(gradients, self._undivided)

    def _show_sums(self) -> None:
        """Let `p.summed_grad` be a copy of the clipped sum, where per-sample gradients are shown too."""
        self._shows_sums = True
        for p in self.params:
            if p.requires_grad:
                total = self.clipper.summed_gradient(p)
                p.summed_grad = None if total is None else total.clone()  # type: ignore[attr-defined]

    def _hide_sums(self) -> None:
        if self._shows_sums:
            self._shows_sums = False
            for p in self.params:
                if getattr(p, "summed_grad", None) is not None:
                    p.summed_grad = None  # type: ignore[attr-defined]


def chosen_clipper(optimizer: Any, clipper: GhostClipper | None) -> GhostClipper:
    """Return the clipper that was given, or that of the facade which holds the optimizer's parameters.

    Args:
        optimizer: The optimizer to wrap.
        clipper: The clipper, or None.

    Returns:
        The clipper.

    Raises:
        InvalidOptionError: If no facade holds them.
    """
    if clipper is not None:
        return clipper
    return clipper_of([p for group in optimizer.param_groups for p in group["params"]])


def chosen_noise(
    noise_source: NoiseSource | None, *, generator: torch.Generator | None, secure_mode: bool
) -> NoiseSource:
    """Return the noise source that was given, or a fresh one.

    Args:
        noise_source: The source, or None.
        generator: Makes a fresh one reproducible, and so not private against who knows it.
        secure_mode: Whether a fresh one is a cryptographic keystream.

    Returns:
        The source.

    Raises:
        InvalidOptionError: If a source comes with options for another one, or secure noise is to be reproducible.
    """
    if noise_source is None:
        return make_noise_source(level="secure" if secure_mode else "fast", generator=generator)
    if generator is not None or secure_mode:
        raise InvalidOptionError("noise_source with generator or secure_mode: these make a source of their own.")
    return noise_source
