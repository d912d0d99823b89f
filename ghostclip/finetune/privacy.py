"""The mechanism of a run: how much noise over how many steps, and what its (ε, δ) assumes.

Symbols: N training samples, B expected batch size, q = B/N sampling rate, σ noise multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass

from ghostclip.accounting import DEFAULT_ACCOUNTANT, bounding_accountant, epsilon_too_large, get_noise_multiplier
from ghostclip.errors import InvalidOptionError
from ghostclip.finetune.options import DEFAULT_EPOCHS, FinetuneOptions
from ghostclip.finetune.tokens import BYTES

ACCOUNTANT = DEFAULT_ACCOUNTANT


@dataclass(frozen=True, kw_only=True)
class RunMechanism:
    """A run's private mechanism: ``steps`` Poisson-subsampled Gaussian releases, σ in units of ``max_grad_norm``."""

    passages: int
    batch_size: int
    sample_rate: float
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    target_epsilon: float
    delta: float

    def epsilon_after(self, steps: int) -> float:
        """Return an upper bound on ε after some steps."""
        accountant = bounding_accountant(ACCOUNTANT)
        accountant.history = [(self.noise_multiplier, self.sample_rate, steps)] if steps else []
        return accountant.get_epsilon(self.delta)


def plan_mechanism(options: FinetuneOptions, passages: int) -> RunMechanism:
    """Return the least noise that keeps the whole run within the budget.

    Without ``--delta``, δ = 1/(10 N): a mechanism that publishes one random passage in the clear satisfies δ = 1/N,
    so δ must lie well below that, and a tenth of it is the usual compromise between that and the noise a smaller δ
    costs.
    """
    if options.batch_size > passages:
        raise InvalidOptionError(
            f"--batch-size {options.batch_size} is larger than the data ({passages} training {options.unit}s): "
            f"give at most {passages}, and far less for better privacy"
        )
    rate, epochs = options.batch_size / passages, options.epochs or DEFAULT_EPOCHS
    steps, delta = options.steps or max(1, round(epochs / rate)), options.delta or 1.0 / (10.0 * passages)
    sigma = get_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant=ACCOUNTANT
    )
    return RunMechanism(
        passages=passages, batch_size=options.batch_size, sample_rate=rate, steps=steps, noise_multiplier=sigma,
        max_grad_norm=options.max_grad_norm, target_epsilon=options.epsilon, delta=delta,
    )  # fmt: skip


def warnings_about(mechanism: RunMechanism, options: FinetuneOptions) -> list[str]:
    """Return what weakens the guarantee, in one line each, most often nothing."""
    said = (
        (mechanism.delta * mechanism.passages >= 1.0,
         f"δ = {mechanism.delta:.3g} is not below 1/N = {1.0 / mechanism.passages:.3g}: "
         f"publishing one random {options.unit} in the clear would satisfy it"),
        (mechanism.target_epsilon > 10.0, epsilon_too_large(mechanism.target_epsilon)
         or f"ε = {mechanism.target_epsilon:g} promises little: an attacker's odds may grow by e^ε"),
        (options.seed is not None,
         "--seed fixes the split, initial weights and dropout; noise and sampling stay random, as they must"),
        (options.unsafe_noise_seed is not None,
         "--unsafe-noise-seed fixes the noise: whoever knows it removes it, so THIS RUN IS NOT PRIVATE"),
    )  # fmt: skip
    return [line for applies, line in said if applies]


def assumptions(mechanism: RunMechanism, most_per_document: int, options: FinetuneOptions) -> list[str]:
    """Return what the (ε, δ) of a run holds under, and what it does not cover; each thing once."""
    unit = options.unit
    noise = "secure (a cryptographic keystream)" if options.secure_noise else "fast (a statistical generator)"
    said = (
        (True, f"Neighbours: data sets in which one {unit} has nothing in its place, is added, or is removed; the "
         f"number of training {unit}s, {mechanism.passages}, is public."),
        (most_per_document > 1,
         f"A document is several samples (up to {most_per_document} passages), so a whole document is protected far "
         "less than a passage; --max-passages-per-document 1 makes the two the same."),
        (True, f"Mechanism: {mechanism.steps} Gaussian steps on Poisson samples (q = {mechanism.sample_rate:.5g}), "
         f"each {unit}'s gradient clipped to C = {mechanism.max_grad_norm:g}, σ = {mechanism.noise_multiplier:.4f}; "
         f"accountant {ACCOUNTANT!r}; noise {noise}, in floating point, fresh secret key."),
        (True, "Protected: the weights after every step, and so the checkpoint."),
        (True, "Not protected: the losses, batch sizes and speeds shown, plotted and recorded; "
         f"the held-out {unit}s and what was measured on them; choices made by looking at any of these, such as "
         "trying several settings; other uses of the data. Attacks on rounding or timing are not covered."),
        (options.task == "classify" and options.labels is None,
         "Not protected: the list of labels, which was read from the data (--labels states it)."),
        (options.tokenizer not in (None, BYTES), "Assumed: the tokenizer was not trained on this text."),
        (options.model is not None, "Assumed: the initial weights do not depend on this text."),
    )  # fmt: skip
    return [line for applies, line in said if applies]
