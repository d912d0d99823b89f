"""peft's LoRA through Trainer: a GPT-2 that has read public documentation learns the private part."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence

from paper_repro.examples.language import PRIVATE, PUBLIC, QUIET, sentences, trained_on
from paper_repro.examples.options import options_of


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Perplexity before and after, and ε.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForLanguageModeling

    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    options = options_of(
        "peft_lora", __doc__, arguments, samples=1000, epochs=8, batch_size=128, lr=2e-2, noise_multiplier=None
    )
    private = sentences(*PRIVATE)
    model, tokenizer = trained_on(sentences(*PUBLIC))
    records = [{"input_ids": tokenizer(text)["input_ids"]} for text in private]
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    trainer = DPTrainer(
        get_peft_model(model, lora),
        DPTrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=options.lr,
            **QUIET,
            target_epsilon=options.epsilon,
            target_delta=options.delta,
            max_grad_norm=options.max_grad_norm,
        ),
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
