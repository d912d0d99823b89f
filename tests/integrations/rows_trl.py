"""What becomes of the features of trl's trainers."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations.rows_peft import _lora, adapted
from tests.integrations.rows_transformers import _mixtral
from tests.integrations.table import Row, row
from tests.integrations.trainings import arguments_of, exact, next_token_losses, refused, run
from tests.loops.models import gpt2, lm_means, lm_records
from tests.loops.trl_loops import _tokenizer
from tests.loops.world import World

ROWS: list[Row] = []
_HOST = {"tool": "trl", "hosts": ("transformers", "accelerate", "peft", "trl", "datasets")}
_SUMS = "sums against one record at a time, leave-one-out, noise, ε"
_QUIET = {"bf16": False, "gradient_checkpointing": False}


def _supervised(world: World, make: Callable[[], nn.Module] = gpt2, losses: Any = None, **options: Any) -> Any:
    from datasets import Dataset

    from ghostclip.integrations.trl import DPSFTConfig, DPSFTTrainer

    trainer_options = options.pop("trainer", {})
    data = options.pop("data", None) or [{"input_ids": r["input_ids"]} for r in lm_records(world)]
    arguments = arguments_of(world, DPSFTConfig, **(_QUIET | options))
    model = world.watch(make, losses)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = DPSFTTrainer(
            model, arguments, train_dataset=Dataset.from_list(data), processing_class=_tokenizer(), **trainer_options
        )
        run(world, trainer)
    return trainer


def _next(world: World) -> Any:
    return next_token_losses(lm_records(world))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_in_full(folder: Path) -> None:
    """SFT on all parameters."""
    exact(lambda world: _supervised(world, losses=lm_means(world)), clips=(0.5, 0.1))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_lora(folder: Path) -> None:
    """SFT with LoRA."""
    exact(lambda world: _supervised(world, lambda: adapted(_lora), _next(world)))


@row(ROWS, **_HOST, outcome="exact", note="clipped sums, leave-one-out, noise, ε")
def sft_peft_config(folder: Path) -> None:
    """SFT with peft_config (trl makes the adapters)."""

    def train(world: World) -> None:
        trainer = _supervised(world, trainer={"peft_config": _lora()})
        assert any("lora" in name for name, _ in trainer.model.named_parameters())

    # trl exchanges the model, so that the world has no reference for it.
    exact(train, tolerance=1e-6)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_checkpointed(folder: Path) -> None:
    """SFT with trl's default of gradient checkpointing."""
    exact(lambda world: _supervised(world, losses=lm_means(world), gradient_checkpointing=True))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_completions(folder: Path) -> None:
    """SFT on prompts and completions (completion_only_loss)."""

    def train(world: World) -> None:
        records = [
            {"input_ids": r["input_ids"], "completion_mask": [int(place > 0) for place in range(len(r["input_ids"]))]}
            for r in lm_records(world)
        ]
        _supervised(world, losses=lm_means(world), data=records, completion_only_loss=True)

    exact(train)


def _by_chance(world: World) -> Any:
    """The loss of loss_type="dft", one record at a time."""
    records = lm_records(world)

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        found = []
        for number in numbers:
            ids = torch.tensor([records[number]["input_ids"]])
            logs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
            found.append(-(logs * logs.exp().detach()).mean())
        return torch.stack(found)

    return losses


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_dft(folder: Path) -> None:
    """SFT with loss_type="dft"."""
    exact(lambda world: _supervised(world, losses=_by_chance(world), loss_type="dft"))


def _fused(world: World, *given: Any, **options: Any) -> Any:
    trainer = _supervised(world, *given, vocabulary_head="fused", **options)
    assert trainer._is_fused
    return trainer


@row(ROWS, **_HOST, outcome="exact", note=f"{_SUMS}; no logits in memory, in the place of trl's fused head")
def sft_fused(folder: Path) -> None:
    """SFT with vocabulary_head="fused"."""
    exact(lambda world: _fused(world, losses=lm_means(world)), clips=(0.5, 0.1))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_fused_lora(folder: Path) -> None:
    """SFT with LoRA and vocabulary_head="fused"."""
    exact(lambda world: _fused(world, lambda: adapted(_lora), _next(world)))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def sft_fused_dft(folder: Path) -> None:
    """SFT with loss_type="dft" and vocabulary_head="fused"."""
    exact(lambda world: _fused(world, losses=_by_chance(world), loss_type="dft"))


@row(ROWS, **_HOST, outcome="refused", note="vocabulary_head='logits'")
def sft_fused_smoothed(folder: Path) -> None:
    """SFT with label smoothing, which trl computes from logits, and vocabulary_head="fused"."""
    refused(lambda world: _fused(world, label_smoothing_factor=0.1))


@row(ROWS, **_HOST, outcome="refused", note="vocabulary_head='fused'")
def sft_liger(folder: Path) -> None:
    """SFT with use_liger_kernel=True."""
    refused(lambda world: _supervised(world, use_liger_kernel=True))


@row(ROWS, **_HOST, outcome="exact", note="sums against one packed row at a time; the warning names rows and people")
def sft_packed(folder: Path) -> None:
    """SFT with packing (packing_strategy="wrapped"): a packed row is a record."""

    def train(world: World) -> None:
        texts = [[1 + (place * number) % 10 for place in range(7)] for number in range(48)]
        rows = [{"input_ids": one + other} for one, other in zip(texts[::2], texts[1::2], strict=True)]
        data = [{"input_ids": text} for text in texts]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given = {"packing": True, "packing_strategy": "wrapped", "max_length": 14}
            trainer = _supervised(world, losses=next_token_losses(rows), data=data, **given)
        assert [row["input_ids"] for row in trainer.train_dataset] == [row["input_ids"] for row in rows]
        assert any("a record is now a packed row" in str(w.message) for w in caught), "no word of packing"

    exact(train)


@row(ROWS, **_HOST, outcome="refused", note="packing_strategy='wrapped'")
def sft_packed_without_padding(folder: Path) -> None:
    """SFT with packing as trl does it by default (padding-free)."""
    refused(lambda world: _supervised(world, packing=True, max_length=14))


@row(ROWS, **_HOST, outcome="refused", note="padding_free")
def sft_without_padding(folder: Path) -> None:
    """SFT with padding_free=True."""
    refused(lambda world: _supervised(world, padding_free=True, max_length=None))


@row(ROWS, **_HOST, outcome="refused", note="router_aux_loss_coef=0.0")
def sft_balancing(folder: Path) -> None:
    """SFT of a mixture of experts with its balancing loss (trl's default)."""
    refused(lambda world: _supervised(world, lambda: _mixtral(router_aux_loss_coef=0.1)))


@row(ROWS, **_HOST, outcome="exact", note="loss, entropy and accuracy that are logged are those from logits")
def sft_fused_metrics(folder: Path) -> None:
    """SFT's metrics with vocabulary_head="fused"."""
    logs = []
    for choice in ("fused", "logits"):
        world = World(sigma=0.0, clip=0.5, folder=str(folder / choice))
        logs.append(_supervised(world, vocabulary_head=choice).state.log_history[0])
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert abs(logs[0][name] - logs[1][name]) < 1e-5, name


@row(ROWS, **_HOST, outcome="exact", note="entropy, accuracy, tokens and evaluation as of trl's own trainer")
def sft_metrics(folder: Path) -> None:
    """SFT's metrics and evaluation."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    world = World(sigma=0.0, clip=0.5, folder=str(folder))
    data = Dataset.from_list([{"input_ids": r["input_ids"]} for r in lm_records(world)])
    trainer = _supervised(world, trainer={"eval_dataset": data}, learning_rate=0.0)
    logs = trainer.state.log_history[0]
    assert logs["epsilon"] == float("inf")
    assert logs.keys() >= {"loss", "entropy", "mean_token_accuracy", "num_tokens"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        arguments = SFTConfig(str(folder / "plain"), use_cpu=True, report_to=[], disable_tqdm=True, **_QUIET)
        plain = SFTTrainer(
            trainer.model, arguments, train_dataset=data, eval_dataset=data, processing_class=_tokenizer()
        )
        due, found = plain.evaluate(), trainer.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert abs(due[name] - found[name]) < 1e-6, name


# Preferences


def _preferences(world: World, make: Callable[[], nn.Module] = gpt2, **options: Any) -> Any:
    from datasets import Dataset

    from ghostclip.integrations.trl import DPDPOConfig, DPDPOTrainer

    reference = options.pop("reference", gpt2)
    losses = options.pop("losses", _pair_losses(world, reference))
    arguments = arguments_of(world, DPDPOConfig, **(_QUIET | options))
    model = world.watch(make, losses)
    data = Dataset.from_list([{"prompt": "w1 w2", "chosen": " " + text, "rejected": " w3"} for text in _texts(world)])
    torch.manual_seed(11)
    given = None if reference is None else reference()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Each record's own reference may be computed of all.
        left_out, world.drop = world.drop, ()
        trainer = DPDPOTrainer(
            model, ref_model=given, args=arguments, train_dataset=data, processing_class=_tokenizer()
        )
        world.drop = left_out
        run(world, trainer)
    return trainer


def _texts(world: World) -> list[str]:
    return [" ".join(f"w{number}" for number in record["input_ids"]) for record in lm_records(world)]


def _sigmoid(sums: list[Tensor], counts: list[int]) -> Tensor:
    """Rafailov et al. (2023), equation 7."""
    return -nn.functional.logsigmoid(0.1 * (sums[0] - sums[1]))


def _squares(sums: list[Tensor], counts: list[int]) -> Tensor:
    """Azar et al. (2024), equation 17, of means over each answer's own tokens, as trl has it."""
    return (sums[0] / counts[0] - sums[1] / counts[1] - 1 / (2 * 0.1)) ** 2


def _pair_losses(
    world: World, reference: Callable[[], nn.Module] | None, of: Any = _sigmoid, *, weighted: bool = False
) -> Any:
    """A loss of log-probabilities against the reference, one pair at a time; `weighted` as in Zhou et al. (2024)."""
    ids = [[1, 2, *map(int, record["input_ids"]), 0] for record in lm_records(world)]

    def scored(model: nn.Module, tokens: list[int]) -> tuple[Tensor, Tensor]:
        row = torch.tensor([tokens])
        logs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
        answer = logs.gather(1, row[0, 1:, None])[1:, 0]
        return answer.sum(), (answer - (2 * logs[1:]).logsumexp(-1)).mean().exp().detach()

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        torch.manual_seed(11)
        other = reference() if reference is not None else None
        found = []
        for number in numbers:
            sums, weight, pair = [], torch.ones(()), (ids[number], [1, 2, 3, 0])
            for tokens in pair:
                with torch.no_grad():
                    # Of adapters that are there already trl keeps a copy of their start.
                    base = scored(model if other is None else other, tokens)[0]
                own, likely = scored(model, tokens)
                sums.append(own - base)
                weight = weight * likely if weighted else weight
            found.append(of(sums, [len(tokens) - 2 for tokens in pair]) * weight)
        return torch.stack(found)

    return losses


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_in_full(folder: Path) -> None:
    """DPO on all parameters: a pair is a record."""
    exact(_preferences, clips=(0.5, 0.1))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_lora(folder: Path) -> None:
    """DPO with LoRA, the reference being the adapters' start."""
    # peft copies adapters in 32 bits.
    exact(lambda world: _preferences(world, lambda: adapted(_lora), reference=None), tolerance=1e-6)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_squares(folder: Path) -> None:
    """DPO with loss_type="ipo", which divides by each answer's own length."""
    exact(lambda world: _preferences(world, loss_type="ipo", losses=_pair_losses(world, gpt2, _squares)))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_weighted(folder: Path) -> None:
    """DPO with use_weighting=True, by each pair's own likelihood."""

    def train(world: World) -> None:
        _preferences(world, use_weighting=True, losses=_pair_losses(world, gpt2, weighted=True))

    # A norm is an upper bound.
    exact(train, tolerance=1e-8)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_checkpointed(folder: Path) -> None:
    """DPO with trl's default of gradient checkpointing."""
    exact(lambda world: _preferences(world, gradient_checkpointing=True))


def _dpo_refusal(kind: str) -> None:
    def drive(folder: Path) -> None:
        refused(lambda world: _preferences(world, loss_type=kind))

    drive.__doc__ = f"DPO with loss_type={kind!r}."
    row(ROWS, **_HOST, outcome="refused", note="compares pairs")(drive)


for _kind in ("aot", "sft"):
    _dpo_refusal(_kind)


@row(ROWS, **_HOST, outcome="refused", note="Use 'auto' or 'logits'")
def dpo_fused(folder: Path) -> None:
    """DPO with vocabulary_head="fused"."""
    refused(lambda world: _preferences(world, vocabulary_head="fused"))


def _scored() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, num_labels=1, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config).double()


def _rewards(world: World, *, kind: Any = None, center: float | None = None, **options: Any) -> Any:
    """The loss of Ouyang et al. (2022), equation 1, one pair at a time."""
    from datasets import Dataset

    from ghostclip.integrations.trl import DPRewardConfig, DPRewardTrainer

    pairs = [
        {"chosen_ids": [1, 2, *map(int, record["input_ids"]), 4], "rejected_ids": [1, 2, 3 + number % 5]}
        for number, record in enumerate(lm_records(world))
    ]

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        found = []
        for number in numbers:
            better, worse = (
                model(input_ids=torch.tensor([pairs[number][name]])).logits[0, 0]
                for name in ("chosen_ids", "rejected_ids")
            )
            found.append(-nn.functional.logsigmoid(better - worse) + (center or 0) * (better + worse) ** 2)
        return torch.stack(found)

    arguments = arguments_of(world, DPRewardConfig, center_rewards_coefficient=center, **(_QUIET | options))
    model = world.watch(_scored, losses)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = (kind or DPRewardTrainer)(
            model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=_tokenizer()
        )
        run(world, trainer)
    return trainer


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def rewards(folder: Path) -> None:
    """RewardTrainer: a pair is a record."""
    exact(_rewards)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def rewards_centered(folder: Path) -> None:
    """RewardTrainer with center_rewards_coefficient, a pair in each physical batch."""
    exact(lambda world: _rewards(world, center=0.1, per_device_train_batch_size=1, gradient_accumulation_steps=6))


@row(ROWS, **_HOST, outcome="refused", note="Inherit from ghostclip.integrations.trl.DPRewardTrainer")
def rewards_by_inheritance(folder: Path) -> None:
    """RewardTrainer beside DPTrainer, without ours."""
    from trl import RewardTrainer

    from ghostclip.integrations.transformers import DPTrainer

    class Mine(RewardTrainer, DPTrainer):
        pass

    refused(lambda world: _rewards(world, kind=Mine))


@row(ROWS, **_HOST, outcome="refused", note="trl's KTOTrainer .*DPSFTTrainer or DPDPOTrainer or DPRewardTrainer")
def unpaired_preferences(folder: Path) -> None:
    """KTOTrainer beside DPTrainer."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    from ghostclip.integrations._host import PrivacyArguments
    from ghostclip.integrations.transformers import DPTrainer

    @dataclass
    class Config(PrivacyArguments, KTOConfig):
        pass

    class Mine(KTOTrainer, DPTrainer):
        pass

    def train(world: World) -> None:
        rows = [{"prompt": "w1", "completion": text, "label": len(text) > 9} for text in _texts(world)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments = arguments_of(world, Config, **_QUIET)
            data = Dataset.from_list(rows)
            run(world, Mine(world.watch(gpt2), ref_model=gpt2(), args=arguments, train_dataset=data,
                            processing_class=_tokenizer()))  # fmt: skip

    refused(train)


def _sft_on_ranks(world: World) -> None:
    _supervised(
        world, lambda: adapted(_lora), _next(world), per_device_train_batch_size=1, gradient_accumulation_steps=3
    )


@row(ROWS, **_HOST, outcome="exact", note=_SUMS, ranks=2, slow=True)
def sft_two_processes(folder: Path) -> None:
    """SFT with LoRA on two processes, whose parts differ in number."""
    exact(_sft_on_ranks, ranks=2)


def _dpo_on_ranks(world: World) -> None:
    _preferences(world, per_device_train_batch_size=1, gradient_accumulation_steps=3)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS, ranks=2, slow=True)
def dpo_two_processes(folder: Path) -> None:
    """DPO on two processes, whose parts differ in number."""
    exact(_dpo_on_ranks, ranks=2)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def dpo_precomputed(folder: Path) -> None:
    """DPO with precompute_ref_log_probs=True."""
    exact(lambda world: _preferences(world, precompute_ref_log_probs=True))
