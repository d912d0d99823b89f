"""trl's SFTTrainer with LoRA: a GPT-2 that has read public documentation is fine-tuned on private texts."""
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
    from datasets import Dataset
    from peft import LoraConfig

    from ghostclip.integrations.trl import DPSFTConfig, DPSFTTrainer

    options = options_of(
        "trl_sft", __doc__, arguments, samples=1000, epochs=8, batch_size=128, lr=2e-2, noise_multiplier=None
    )
    private = sentences(*PRIVATE)
    model, tokenizer = trained_on(sentences(*PUBLIC))
    trainer = DPSFTTrainer(
        model,
        DPSFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=options.lr,
            bf16=False,
            **QUIET,
            target_epsilon=options.epsilon,
            target_delta=options.delta,
            max_grad_norm=options.max_grad_norm,
        ),
        train_dataset=Dataset.from_dict({"text": private[100 : 100 + options.samples]}),
        eval_dataset=Dataset.from_dict({"text": private[:100]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    )
    before = math.exp(trainer.evaluate()["eval_loss"])
    epsilon = trainer.train().metrics["epsilon"]
    after = math.exp(trainer.evaluate()["eval_loss"])
    print(f"perplexity {before:.0f}, then {after:.0f}; ε = {epsilon:.2f}")
    return {"before": before, "perplexity": after, "epsilon": epsilon}


if __name__ == "__main__":
    main()
