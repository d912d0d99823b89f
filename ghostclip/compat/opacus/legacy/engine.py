"""The engine of Opacus's first generation: attached to an optimizer, whose own `step` then releases privately."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip._validate import fraction, positive, positive_int
from ghostclip.accounting import RDPAccountant, get_noise_multiplier
from ghostclip.clipper import GhostClipper, Reduction
from ghostclip.clipping import policies
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.compat.opacus.legacy.attached import Attachment
from ghostclip.errors import InvalidOptionError, MissingGradientError
from ghostclip.noise import make_noise_source
from ghostclip.optim import DPOptimizer


class PrivacyEngine:
    """Clips a model's per-sample gradients, adds noise in its optimizer's `step` and keeps the account.

    Privacy:
        The engine sees neither the loader nor the data: that every batch is a Poisson sample of rate `sample_rate` is
        the caller's promise, and the account holds only if it is kept (`DPDataLoader` keeps it; a shuffled loader does
        not). ε is meant under zero-out adjacency, for which the sizes of the batches are public.

    Attributes:
        module: The model.
        noise_multiplier: σ.
        steps: Releases so far.

    Args:
        module: The model.
        sample_rate: Probability with which each record joins a batch; or give `batch_size` and `sample_size`.
        batch_size: Expected records in a batch: what a mean gradient is divided by. Without it, and without
            `sample_size`, that is the size of the first logical batch.
        sample_size: Records in the data set.
        max_grad_norm: C, or one bound for each trainable parameter.
        noise_multiplier: σ; or give `target_epsilon` and `epochs`.
        alphas: Rényi orders to search; a wide range by default.
        secure_rng: Whether noise comes from a cryptographic keystream.
        batch_first: Whether the leading axis of the model's inputs is the batch.
        target_delta: δ.
        target_epsilon: ε that `epochs` passes may cost.
        epochs: Passes over the data that are planned.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.

    Raises:
        InvalidOptionError: If an option is out of range, missing or contradicts another.
        BudgetError: If no noise keeps the budget.
    """

    def __init__(  # noqa: PLR0913 - the arguments that existing scripts pass
        self,
        module: nn.Module,
        *,
        sample_rate: float | None = None,
        batch_size: int | None = None,
        sample_size: int | None = None,
        max_grad_norm: float | Sequence[float],
        noise_multiplier: float | None = None,
        alphas: Sequence[float] | None = None,
        secure_rng: bool = False,
        batch_first: bool = True,
        target_delta: float = 1e-6,
        target_epsilon: float | None = None,
        epochs: float | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        self.module = module
        self.sample_rate, self._expected = _rate_and_size(sample_rate, batch_size, sample_size)
        self.target_delta, self.alphas = target_delta, alphas
        self.noise_multiplier = _noise(noise_multiplier, self.sample_rate, target_epsilon, target_delta, epochs)
        self.accountant = RDPAccountant()
        self._secure_rng = secure_rng
        policy = policies.per_layer(max_grad_norm) if isinstance(max_grad_norm, Sequence) else ClipPolicy(max_grad_norm)
        self.clipper = GhostClipper(
            module,
            policy=policy,
            loss_reduction=cast(Reduction, loss_reduction),
            batch_first=batch_first,
        )
        self._attachment: Attachment | None = None
        warnings.warn(
            f"sample_rate={self.sample_rate:g} is taken on trust: ε holds for batches that are Poisson samples of this "
            "rate, which a shuffled loader does not draw. ghostclip.PrivacyEngine sees to the sampling itself.",
            stacklevel=2,
        )

    @property
    def max_grad_norm(self) -> float:
        """C, which the clip policy holds."""
        return self.clipper.max_grad_norm

    @property
    def steps(self) -> int:
        """Releases so far."""
        return len(self.accountant)

    def attach(self, optimizer: Optimizer) -> None:
        """Make an optimizer's `step` private, and give it `virtual_step` and `privacy_engine`.

        Args:
            optimizer: Over the model's parameters.

        Raises:
            InvalidOptionError: If one is attached already.
        """
        if self._attachment is not None:
            raise InvalidOptionError("attach(): an optimizer is attached already; detach() it first.")
        private = DPOptimizer(
            optimizer,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=self._expected if self._expected is not None else 1.0,
            loss_reduction=self.clipper.loss_reduction,
            clipper=self.clipper,
            noise_source=make_noise_source(level="secure" if self._secure_rng else "fast"),
        )
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(self.sample_rate))
        self._attachment = Attachment(
            self, private, noise_multiplier=lambda: self.noise_multiplier, size_known=self._expected is not None
        )
        self._attachment.install()

    def detach(self) -> None:
        """Give the optimizer its own `step` back and take the clipper off the model."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        self.clipper.remove()

    def zero_grad(self) -> None:
        """Forget the clipped sums of the batch, unless virtual steps are accumulating it."""
        self._attached().private.zero_grad()

    def virtual_step(self) -> None:
        """Keep the clipped sum of a physical batch; the next step continues it."""
        self._attached().virtual_step()

    def get_privacy_spent(self, target_delta: float | None = None) -> tuple[float, float]:
        """Return ε and the Rényi order that proves it.

        Args:
            target_delta: δ; the engine's by default.

        Returns:
            (ε, α).
        """
        delta = self.target_delta if target_delta is None else target_delta
        return self.accountant.get_privacy_spent(delta=delta, alphas=self.alphas)

    def to(self, device: torch.device | str) -> PrivacyEngine:
        """Nothing to move: noise is drawn where the gradients are.

        Args:
            device: Where the model is.

        Returns:
            The engine.
        """
        del device
        return self

    def _attached(self) -> Attachment:
        if self._attachment is None:
            raise MissingGradientError("no optimizer is attached: call privacy_engine.attach(optimizer) first.")
        return self._attachment


def _rate_and_size(
    sample_rate: float | None, batch_size: int | None, sample_size: int | None
) -> tuple[float, float | None]:
    """Return the sampling rate and, where it follows, the expected size of a batch."""
    if sample_rate is not None:
        rate = fraction(sample_rate, "sample_rate")
        if batch_size is not None:
            return rate, float(positive_int(batch_size, "batch_size"))
        return rate, None if sample_size is None else rate * positive_int(sample_size, "sample_size")
    if batch_size is None or sample_size is None:
        raise InvalidOptionError("sample_rate=None: give it, or batch_size and sample_size.")
    size, records = positive_int(batch_size, "batch_size"), positive_int(sample_size, "sample_size")
    return fraction(size / records, "batch_size / sample_size"), float(size)


def _noise(
    noise_multiplier: float | None,
    rate: float,
    target_epsilon: float | None,
    target_delta: float,
    epochs: float | None,
) -> float:
    """Return σ, given it or the budget that it must keep."""
    if (noise_multiplier is None) == (target_epsilon is None):
        raise InvalidOptionError("give noise_multiplier, or target_epsilon and epochs.")
    if target_epsilon is None:
        assert noise_multiplier is not None, "one of the two is given"
        return noise_multiplier
    if epochs is None:
        raise InvalidOptionError(f"target_epsilon={target_epsilon}: for how long? Give epochs.")
    return get_noise_multiplier(
        target_epsilon=positive(target_epsilon, "target_epsilon"),
        target_delta=target_delta,
        sample_rate=rate,
        epochs=epochs,
        accountant="rdp",
    )
