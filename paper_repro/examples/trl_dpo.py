"""trl's DPOTrainer: a GPT-2 learns to prefer how private passages go on to words in any order."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Sequence

from paper_repro.examples.language import PRIVATE, PUBLIC, QUIET, sentences, trained_on
from paper_repro.examples.options import options_of


def _pair(text: str) -> dict[str, str]:
    begin, end = text.split()[:4], text.split()[4:]
    answers = [" ".join(["", *words]) for words in (end, random.sample(end, len(end)))]
    return dict(zip(("prompt", "chosen", "rejected"), [" ".join(begin), *answers], strict=True))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Share of pairs that are ranked rightly, that of guesses, and ε.
    """
    from datasets import Dataset

    from ghostclip.integrations.trl import DPDPOConfig, DPDPOTrainer

    options = options_of(
        "trl_dpo", __doc__, arguments, samples=1000, epochs=5, batch_size=100, lr=2e-3, noise_multiplier=None
    )
    random.seed(options.seed)
    pairs = [_pair(text) for text in sentences(*PRIVATE) if len(text.split()) > 8]
    model, tokenizer = trained_on(sentences(*PUBLIC))
    given = DPDPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.batch_size,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        bf16=False,
        **QUIET,
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        max_grad_norm=options.max_grad_norm,
    )
    train, test = Dataset.from_list(pairs[100 : 100 + options.samples]), Dataset.from_list(pairs[:100])
    trainer = DPDPOTrainer(model, copy.deepcopy(model), given, None, train, test, tokenizer)
    epsilon = trainer.train().metrics["epsilon"]
    found = {"accuracy": trainer.evaluate()["eval_rewards/accuracies"], "chance": 0.5, "epsilon": epsilon}
    print(f"{found['accuracy']:.0%} of the pairs are ranked rightly; ε = {epsilon:.2f}")
    return found


if __name__ == "__main__":
    main()
