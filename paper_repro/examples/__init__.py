"""The trainings that people start private learning from, small: `python -m paper_repro.examples` lists and runs them.

Each is one file, written as a script for Opacus is written, with `ghostclip` in the imports; it makes or finds its data
on the machine and takes less than a minute on one core.
"""

from typing import Final

NAMES: Final = (
    "mnist", "cifar_resnet", "bert_text", "char_lstm", "dcgan", "mnist_lightning", "mnist_ddp", "mnist_accelerate",
    "mnist_fabric", "mnist_timm", "hf_trainer", "peft_lora", "trl_sft", "trl_dpo",
)  # fmt: skip
