"""The mechanism of a run: how much noise over how many steps, and what its (ε, δ) assumes.

Symbols: N training samples, B expected batch size, q = B/N sampling rate, σ noise multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass

from ghostclip.accounting import DEFAULT_ACCOUNTANT, bounding_accountant, get_noise_multiplier
from ghostclip.errors import InvalidOptionError
from ghostclip.finetune.options import DEFAULT_EPOCHS, FinetuneOptions
from ghostclip.finetune.tokens import BYTES

ACCOUNTANT = DEFAULT_ACCOUNTANT


@dataclass(frozen=True, kw_only=True)
class Mechanism:
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
        if steps == 0:
            return 0.0
        accountant = bounding_accountant(ACCOUNTANT)
        accountant.load_state_dict(
            {"mechanism": ACCOUNTANT, "history": [(self.noise_multiplier, self.sample_rate, steps)]}
        )
        return accountant.get_epsilon(self.delta)

    def curve(self, steps: int, *, points: int = 40) -> list[tuple[int, float]]:
        """Return (step, ε) at evenly spaced steps from 0 to the last."""
        return [
            (step, self.epsilon_after(step)) for step in sorted({round(steps * i / points) for i in range(points + 1)})
        ]


def plan_mechanism(options: FinetuneOptions, passages: int) -> Mechanism:
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
    sample_rate = options.batch_size / passages
    epochs = DEFAULT_EPOCHS if options.epochs is None else options.epochs
    steps = options.steps if options.steps is not None else max(1, round(epochs / sample_rate))
    delta = 1.0 / (10.0 * passages) if options.delta is None else options.delta
    sigma = get_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant=ACCOUNTANT
    )
    return Mechanism(
        passages=passages, batch_size=options.batch_size, sample_rate=sample_rate, steps=steps, noise_multiplier=sigma,
        max_grad_norm=options.max_grad_norm, target_epsilon=options.epsilon, delta=delta,
    )  # fmt: skip


def warnings_about(mechanism: Mechanism, options: FinetuneOptions) -> list[str]:
    """Return what weakens the guarantee, in one line each, most often nothing."""
    lines = []
    if mechanism.delta >= 1.0 / mechanism.passages:
        lines.append(
            f"δ = {mechanism.delta:.3g} is not below 1/N = {1.0 / mechanism.passages:.3g}: "
            f"publishing one random {options.unit} in the clear would satisfy it"
        )
    if mechanism.target_epsilon > 10.0:
        lines.append(f"ε = {mechanism.target_epsilon:g} promises little: an attacker's odds may grow by e^ε")
    if options.seed is not None:
        lines.append(
            "--seed fixes the split, initial weights and dropout; noise and sampling stay random, as they must"
        )
    if options.unsafe_noise_seed is not None:
        lines.append("--unsafe-noise-seed fixes the noise: whoever knows it removes it, so THIS RUN IS NOT PRIVATE")
    return lines


def assumptions(mechanism: Mechanism, most_per_document: int, options: FinetuneOptions) -> list[str]:
    """Return what the (ε, δ) of a run holds under, and what it does not cover; each thing once."""
    unit, secure = options.unit, options.secure_noise
    noise = "secure (a cryptographic keystream)" if secure else "fast (a statistical generator)"
    lines = [
        f"Neighbours: data sets in which one {unit} has nothing in its place, is added, or is removed; the number of "
        f"training {unit}s, {mechanism.passages}, is public.",
        f"Mechanism: {mechanism.steps} Gaussian steps on Poisson samples (q = {mechanism.sample_rate:.5g}), each "
        f"{unit}'s gradient clipped to C = {mechanism.max_grad_norm:g}, σ = {mechanism.noise_multiplier:.4f}; "
        f"accountant {ACCOUNTANT!r}; noise {noise}, in floating point, fresh secret key.",
        "Protected: the weights after every step, and so the checkpoint.",
        "Not protected: the losses, batch sizes and speeds shown, plotted and recorded; "
        f"the held-out {unit}s and what was measured on them; choices made by looking at any of these, such as trying "
        "several settings; other uses of the data. Attacks on rounding or timing are not covered.",
    ]
    if most_per_document > 1:
        lines.insert(
            1,
            f"A document is several samples (up to {most_per_document} passages), so a whole document is protected far "
            "less than a passage; --max-passages-per-document 1 makes the two the same.",
        )
    if options.task == "classify" and options.labels is None:
        lines.append("Not protected: the list of labels, which was read from the data (--labels states it).")
    if options.tokenizer not in (None, BYTES):
        lines.append("Assumed: the tokenizer was not trained on this text.")
    if options.model is not None:
        lines.append("Assumed: the initial weights do not depend on this text.")
    return lines
