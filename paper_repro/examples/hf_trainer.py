"""transformers' Trainer: a GPT-2 reads Python's documentation, from random weights."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence

from paper_repro.examples.language import PRIVATE, PUBLIC, QUIET, sentences, small_gpt2, tokenizer_of
from paper_repro.examples.options import options_of


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Perplexity before and after, and ε.
    """
    from transformers import DataCollatorForLanguageModeling

    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    options = options_of(
        "hf_trainer", __doc__, arguments, samples=2000, epochs=5, batch_size=128, lr=5e-3, noise_multiplier=None
    )
    texts = sentences(*PUBLIC, *PRIVATE)
    tokenizer = tokenizer_of(texts)
    records = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    given = DPTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=max(1, options.batch_size // 32),
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        logging_steps=20,
        **QUIET,
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        max_grad_norm=options.max_grad_norm,
    )
    trainer = DPTrainer(
        small_gpt2(tokenizer),
        given,
        train_dataset=records[100 : 100 + options.samples],
        eval_dataset=records[:100],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    before = math.exp(trainer.evaluate()["eval_loss"])
    epsilon = trainer.train().metrics["epsilon"]
    after = math.exp(trainer.evaluate()["eval_loss"])
    print(f"perplexity {before:.0f}, then {after:.0f}; ε = {epsilon:.2f}")
    return {"before": before, "perplexity": after, "epsilon": epsilon}


if __name__ == "__main__":
    main()
