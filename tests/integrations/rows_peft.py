"""What becomes of the adapters of peft, through DPTrainer and in a plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integrations.rows_transformers import _resumed, _train
from tests.integrations.table import Row, row
from tests.integrations.trainings import exact, next_token_losses, refused
from tests.loops.hugging import padded
from tests.loops.models import gpt2, lm_records
from tests.loops.world import World

ROWS: list[Row] = []
_HOST = {"tool": "peft", "hosts": ("transformers", "accelerate", "peft")}
_SUMS = "sums against one record at a time, leave-one-out, noise, ε; every adapter is trained"


def adapted(config: Callable[[], Any], base: Callable[[], nn.Module] = gpt2) -> nn.Module:
    """Return a tiny GPT-2 with adapters in float64, none of them zero, which would hide gradients.

    Args:
        config: Makes the adapters' configuration.
        base: Makes the model.
    """
    from peft import get_peft_model

    model = get_peft_model(base(), config())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and not bool(p.count_nonzero()):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.double()


def _through_trainer(config: Callable[[], Any], **options: Any) -> None:
    def train(world: World) -> None:
        records = lm_records(world)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*are not trained")
            _train(world, lambda: adapted(config), records, padded, next_token_losses(records), **options)

    exact(train)


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**({"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True} | options))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def lora(folder: Path) -> None:
    """LoRA."""
    _through_trainer(_lora)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dora(folder: Path) -> None:
    """DoRA."""
    _through_trainer(lambda: _lora(use_dora=True))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def saved_modules(folder: Path) -> None:
    """LoRA with modules_to_save."""
    _through_trainer(lambda: _lora(modules_to_save=["ln_f"]))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def lora_checkpointed(folder: Path) -> None:
    """LoRA with gradient checkpointing."""
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    _through_trainer(_lora, **given)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def ia3(folder: Path) -> None:
    """IA3."""
    from peft import IA3Config

    _through_trainer(
        lambda: IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True)
    )


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def prompt(folder: Path) -> None:
    """Prompt tuning."""
    from peft import PromptTuningConfig

    _through_trainer(lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def prefix(folder: Path) -> None:
    """Prefix tuning."""
    from peft import PrefixTuningConfig

    _through_trainer(lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def _quantised(folder: Path, config: Callable[[], Any]) -> None:
    """Train adapters on a quantised base."""
    from peft import prepare_model_for_kbit_training
    from transformers import GPT2LMHeadModel

    gpt2().float().save_pretrained(folder / "base")

    def make() -> nn.Module:
        model = GPT2LMHeadModel.from_pretrained(folder / "base", quantization_config=config())
        for module in model.modules():
            # Else bitsandbytes packs 4-bit weights in an evaluation on some CPUs, and cannot train any longer.
            module.support_avx512bf16_for_cpu = False
        return adapted(_lora, lambda: prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))

    def train(world: World) -> None:
        records = lm_records(world)
        _train(world, make, records, padded, next_token_losses(records))

    exact(train, tolerance=1e-2)


_BITS = _HOST | {"hosts": (*_HOST["hosts"], "bitsandbytes")}


@row(ROWS, **_BITS, outcome="exact", note=_SUMS)
def qlora(folder: Path) -> None:
    """QLoRA (bitsandbytes nf4)."""
    from transformers import BitsAndBytesConfig

    _quantised(folder, lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))


@row(ROWS, **_BITS, outcome="exact", note=_SUMS)
def int8(folder: Path) -> None:
    """LoRA on LLM.int8 (bitsandbytes)."""
    from transformers import BitsAndBytesConfig

    _quantised(folder, lambda: BitsAndBytesConfig(load_in_8bit=True))


@row(ROWS, **(_HOST | {"hosts": (*_HOST["hosts"], "torchao")}), outcome="exact", note=_SUMS)
def torchao_int8(folder: Path) -> None:
    """LoRA on int8 weights (torchao)."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    _quantised(folder, lambda: TorchAoConfig(Int8WeightOnlyConfig()))


def _plain_loop(world: World, *, held: bool, model_first: bool = False) -> None:
    """make_private first, get_peft_model second."""
    from peft import get_peft_model

    from ghostclip.losses import token_losses

    records = lm_records(world)
    model = world.watch(gpt2, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = world.private(model, optimizer, world.loader(records, collate_fn=padded), wrap_model=False)
    model = get_peft_model(model, _lora())
    model.double()
    if held:
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
    for _, batch in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        labels = batch.pop("labels")
        token_losses(model(**batch).logits, labels).mean().backward()
        optimizer.step()


@row(ROWS, **_HOST, outcome="exact", note="noise, account, leave-one-out")
def private_first(folder: Path) -> None:
    """make_private, then get_peft_model and add_param_group."""
    exact(lambda world: _plain_loop(world, held=True))


@row(ROWS, **_HOST, outcome="refused", note="optimizer does not hold them")
def private_first_unheld(folder: Path) -> None:
    """make_private, then get_peft_model, adapters not in the optimizer."""
    refused(lambda world: _plain_loop(world, held=False))


@row(ROWS, **_HOST, outcome="exact", note="the adapters that no gradient reaches are named, with and without noise")
def untrained(folder: Path) -> None:
    """An adapter beside a layer that does not run is named."""
    from ghostclip.integrations.peft import UntrainedAdapterWarning

    def base() -> nn.Module:
        model = gpt2()
        model.side = nn.Linear(8, 8)
        return model

    for sigma in (0.0, 1.0):
        world = World(sigma=sigma, clip=0.5, folder=str(folder))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _train(
                world,
                lambda: adapted(lambda: _lora(target_modules=["c_attn", "side"], fan_in_fan_out=False), base),
                lm_records(world),
                padded,
                None,
            )
        said = [str(w.message) for w in caught if issubclass(w.category, UntrainedAdapterWarning)]
        assert len(said) == 1, said
        assert said[0].startswith("2 trainable"), said
        assert "side.lora_A" in said[0], said
        assert "c_attn" not in said[0], said


@row(ROWS, **_HOST, outcome="exact", note="lora_B starts at zero, so that lora_A gets its first gradient later")
def zero_at_first(folder: Path) -> None:
    """A factor whose gradient is zero at first is not named."""
    from peft import get_peft_model

    world = World(sigma=0.0, clip=0.5, folder=str(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are not trained")
        make = lambda: get_peft_model(gpt2(), _lora()).double()  # noqa: E731
        _train(world, make, lm_records(world), padded, None, max_steps=6, warmup_steps=2)


@row(ROWS, **_HOST, outcome="exact", note="files of peft; merged weights compute what the adapters did")
def saved_and_merged(folder: Path) -> None:
    """save_model, from_pretrained, merge_and_unload after a private training."""
    from peft import PeftModel

    world = World(sigma=1.0, clip=0.5, folder=str(folder))
    records = lm_records(world)
    trainer = _train(world, lambda: adapted(_lora), records, padded, None)
    trainer.save_model(str(folder / "saved"))
    assert (folder / "saved" / "adapter_config.json").exists()
    batch = padded(records[:4])
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.model(**batch).logits
        torch.manual_seed(world.seed + 7)
        loaded = PeftModel.from_pretrained(gpt2(), folder / "saved").double().eval()
        merged = trainer.model.merge_and_unload()(**batch).logits
        assert torch.allclose(loaded(**batch).logits, found, atol=1e-6)
    assert torch.allclose(merged, found, atol=1e-9)


@row(ROWS, **_HOST, outcome="exact", note="adapters, logs and ε bit-equal to the undisturbed training")
def resumed(folder: Path) -> None:
    """LoRA through DPTrainer, killed in an epoch and resumed."""
    _resumed(folder, 2, make=lambda: adapted(_lora).float())


@row(ROWS, **_HOST, outcome="exact", note=_SUMS, ranks=2, slow=True)
def two_processes(folder: Path) -> None:
    """LoRA on two processes (torchrun, gloo)."""
    exact(_lora_on_ranks, ranks=2)


def _lora_on_ranks(world: World) -> None:
    records = lm_records(world)
    _train(world, lambda: adapted(_lora), records, padded, next_token_losses(records))
