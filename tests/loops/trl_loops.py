"""Loops of trl: supervised fine-tuning with LoRA, without padding, in full, and preferences."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.loops.hugging import quiet
from tests.loops.loop import Loop
from tests.loops.models import gpt2, lm_means, lm_records
from tests.loops.rows import row
from tests.loops.world import BATCH, VOCABULARY, World

LOOPS: list[Loop] = []
_HOST = {"hosts": ("transformers", "accelerate", "trl", "peft", "datasets")}


def _tokenizer() -> Any:
    """A tokenizer of the tiny vocabulary, made without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY + 1)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w0", bos_token="w0")


def _adapted() -> nn.Module:
    """The tiny GPT-2 with LoRA on its attention, in float64."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zero at the start, which would hide the other factor's gradient
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return model.double()


def _supervised(world: World, make: Callable[[], nn.Module], losses: Any = None, **options: Any) -> None:
    """Fine-tune through SFTTrainer with the private loader, the norm not logged."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    quiet()
    bare = world.watch(make, losses)
    optimizer = torch.optim.AdamW([p for p in bare.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    private: dict[str, Any] = {}

    class Own(SFTTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return private["loader"]

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
            return grad_norm

    arguments = SFTConfig(
        **{
            "output_dir": str(Path(world.folder) / "run"),
            "per_device_train_batch_size": BATCH,
            "max_steps": 3,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "report_to": [],
            "save_strategy": "no",
            "seed": world.seed,
            "max_grad_norm": 0.0,
            "learning_rate": 0.1,
            "weight_decay": 0.0,
            "logging_steps": 100,
        }
        | options
    )
    data = Dataset.from_list([{"input_ids": r["input_ids"]} for r in lm_records(world)])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = Own(bare, arguments, train_dataset=data, processing_class=_tokenizer(), optimizers=(optimizer, None))
        loader = world.loader(lm_records(world), collate_fn=trainer.data_collator)
        _, trainer.optimizer, private["loader"] = world.private(bare, optimizer, loader, wrap_model=False)
        trainer.train()


@row(LOOPS, **_HOST, clips=(0.1,))
def _sft_trainer_lora(world: World) -> None:
    """SFTTrainer with LoRA: the loss is divided by the batch's tokens."""
    _supervised(world, _adapted)


@row(LOOPS, **_HOST, clips=(0.3,), expect="refused")
def _sft_trainer_without_padding(world: World) -> None:
    """SFTTrainer with padding_free=True."""
    _supervised(world, _adapted, lm_means(world), padding_free=True, max_length=None)


@row(LOOPS, **_HOST, clips=(0.5,))
def _sft_trainer_in_full(world: World) -> None:
    """SFTTrainer on all parameters."""
    _supervised(world, gpt2)


@row(LOOPS, **_HOST, clips=(0.5,))
def _dpo_trainer(world: World) -> None:
    """DPOTrainer on all parameters."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    quiet()
    bare = world.watch(gpt2)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.1, weight_decay=0.0)
    private: dict[str, Any] = {}

    class Own(DPOTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return private["loader"]

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
            return grad_norm

    arguments = DPOConfig(
        output_dir=str(Path(world.folder) / "run"),
        per_device_train_batch_size=BATCH,
        max_steps=3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        max_grad_norm=0.0,
        logging_steps=100,
    )
    texts = [" ".join(f"w{number}" for number in record["input_ids"]) for record in lm_records(world)]
    data = Dataset.from_list([{"prompt": "w1 w2", "chosen": " " + text, "rejected": " w3"} for text in texts])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = Own(
            bare,
            ref_model=gpt2(),
            args=arguments,
            train_dataset=data,
            processing_class=_tokenizer(),
            optimizers=(optimizer, None),
        )
        loader = world.loader(trainer.train_dataset, collate_fn=trainer.data_collator)
        _, trainer.optimizer, private["loader"] = world.private(bare, optimizer, loader, wrap_model=False)
        trainer.train()
