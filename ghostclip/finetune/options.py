"""The options of one fine-tuning run: their defaults, their checks, and which of them a resumed run may change.

Kept apart from the argument parser, so that a run can also be started from Python and so that a resumed run can
compare what was asked then with what is asked now.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ghostclip._validate import did_you_mean
from ghostclip.errors import InvalidOptionError, ResumeError

TASKS = ("text", "answers", "classify")
TOYS = ("gpt2", "llama")
STRATEGIES = ("auto", "bookkeeping", "ghost", "fast", "hooks", "graph")
DTYPES = ("float32", "bfloat16")
# As in ghostclip.language.vocabulary_head, which takes longer to load.
HEADS = ("auto", "fused", "logits")
# As in ghostclip.planning.plan, for the same reason.
MEMORY_BUDGET = 1.05
# As in ghostclip.clipping.options, for the same reason.
FACTOR_DTYPES = ("bfloat16",)
DEFAULT_EPOCHS = 5.0
# Tokens of a sample; a model that holds fewer sets the length.
TOY_CONTEXT, DEFAULT_CONTEXT = 64, 128
# Peaks of AdamW under noise: random weights have far to go, adapters move little, pretrained weights are soon lost.
TOY_RATE, LORA_RATE, FULL_RATE = 6e-3, 1e-3, 2e-4
SIZES = ("toy", "layers", "hidden_size", "heads")

# What these decide does not enter the mechanism or the model, so an interrupted run may go on with other values.
CHANGEABLE_ON_RESUME = frozenset({"device", "mesh", "physical_batch_size", "comparison_steps", "checkpoint_seconds"})
# These say where and how to start, not what the run is.
NOT_RECORDED = frozenset({"output", "overwrite", "resume"})


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Everything ``ghostclip finetune`` can be told; field names equal the option names.

    ``epochs`` and ``steps`` are alternatives; with neither, ``DEFAULT_EPOCHS`` holds. ``delta=None`` means 1/(10 N)
    with N the number of training passages. ``seed=None`` means a fresh one, which is recorded.

    Privacy:
        ``seed`` never fixes the noise or the sampling; only ``unsafe_noise_seed`` does, and then nothing is private.
    """

    task: str = "text"
    data: Path | None = None
    text_column: str = "text"
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    label_column: str = "label"
    labels: str | None = None
    tokenizer: str | None = None
    max_passages_per_document: int | None = None
    eval_fraction: float = 0.1
    eval_samples: int = 256
    model: str | None = None
    toy: str = "gpt2"
    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    context_length: int | None = None
    lora: int | None = None
    lora_alpha: float | None = None
    lora_targets: str | None = None
    epsilon: float = 8.0
    delta: float | None = None
    max_grad_norm: float = 1.0
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 256
    physical_batch_size: int | None = None
    learning_rate: float | None = None
    strategy: str = "auto"
    vocabulary_head: str = "auto"
    memory_budget: float = MEMORY_BUDGET
    factor_dtype: str | None = None
    device: str = "auto"
    mesh: str | None = None
    dtype: str = "float32"
    seed: int | None = None
    secure_noise: bool = False
    unsafe_noise_seed: int | None = None
    comparison_steps: int = 7
    checkpoint_seconds: float = 60.0
    output: Path = Path("ghostclip-run")
    overwrite: bool = False
    resume: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, where nothing was said and the model holds as many."""
        return self.context_length or (DEFAULT_CONTEXT if self.model is not None else TOY_CONTEXT)

    @property
    def unit(self) -> str:
        """What one sample is, and so the unit of privacy."""
        return "passage" if self.task == "text" else "row"

    @property
    def head(self) -> str:
        """How losses of tokens are computed; "hooks" shows what needs a head's logits, "graph" is written in them.

        A head of which each process has some rows (tp) makes logits as well.
        """
        from ghostclip.scaling import Mesh

        divided = self.mesh is not None and Mesh.parse(self.mesh).tp > 1
        needed = (divided or self.strategy in ("hooks", "graph")) and self.vocabulary_head == "auto"
        return "logits" if needed else self.vocabulary_head

    @property
    def rate(self) -> float:
        """Peak learning rate: of random weights, of adapters, or of pretrained weights, if none was given."""
        if self.learning_rate is not None:
            return self.learning_rate
        if self.model is None:
            return TOY_RATE
        return FULL_RATE if self.lora is None else LORA_RATE

    def validate(self) -> None:
        """Refuse every value that no run could honour.

        Raises:
            InvalidOptionError: With the option, its value and what it may be.
        """
        self._validate_privacy()
        self._validate_sizes()
        self._validate_choices()

    def _validate_privacy(self) -> None:
        _require_positive("--epsilon", self.epsilon)
        _require_positive("--max-grad-norm", self.max_grad_norm)
        if self.delta is not None and not 0.0 < self.delta < 1.0:
            raise InvalidOptionError(
                f"--delta is {self.delta:g}: it must lie strictly between 0 and 1, and well below 1/(number of samples)"
            )

    def _validate_sizes(self) -> None:
        for name in ("layers", "hidden_size", "heads", "batch_size", "eval_samples"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("lora", "steps", "physical_batch_size", "max_passages_per_document"):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        if self.context_length is not None:
            _require_at_least("context_length", self.context_length, 2)
        _require_at_least("comparison_steps", self.comparison_steps, 0)
        _require_positive("--memory-budget", self.memory_budget)
        if self.factor_dtype is not None and self.memory_budget >= 1:
            raise InvalidOptionError(
                f"--factor-dtype is {self.factor_dtype}, with a memory budget of {self.memory_budget:g}: what clipping "
                "holds is rounded only to keep a --memory-budget below 1"
            )
        for option, value in (("--learning-rate", self.learning_rate), ("--lora-alpha", self.lora_alpha)):
            if value is not None:
                _require_positive(option, value)
        _require_positive("--checkpoint-seconds", self.checkpoint_seconds)
        if self.epochs is not None:
            _require_positive("--epochs", self.epochs)
        if not 0.0 < self.eval_fraction < 1.0:
            raise InvalidOptionError(f"--eval-fraction is {self.eval_fraction:g}: it must lie strictly between 0 and 1")

    def _validate_choices(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InvalidOptionError("--epochs and --steps both say how long to train: give one of them")
        if self.secure_noise and self.unsafe_noise_seed is not None:
            raise InvalidOptionError("--secure-noise cannot be fixed by --unsafe-noise-seed: give one of them")
        if self.overwrite and self.resume:
            raise InvalidOptionError("--overwrite starts anew and --resume continues: give one of them")
        if self.labels is not None and len(set(self.labels.split(","))) < max(2, self.labels.count(",") + 1):
            raise InvalidOptionError(f"--labels is {self.labels!r}: give at least two different ones, as in bad,good")
        if self.lora is not None and self.model is None:
            raise InvalidOptionError("--lora adapts pretrained weights: name them with --model")
        for option, value, allowed in (
            ("--task", self.task, TASKS),
            ("--toy", self.toy, TOYS),
            ("--strategy", self.strategy, STRATEGIES),
            ("--vocabulary-head", self.vocabulary_head, HEADS),
            ("--dtype", self.dtype, DTYPES),
            ("--factor-dtype", self.factor_dtype or FACTOR_DTYPES[0], FACTOR_DTYPES),
        ):
            if value not in allowed:
                meant = did_you_mean(value, allowed)
                raise InvalidOptionError(f"{option} is {value!r}: it may be {', '.join(allowed)}{meant}")
        for option, seed in (("--seed", self.seed), ("--unsafe-noise-seed", self.unsafe_noise_seed)):
            if seed is not None and not 0 <= seed < 2**63:
                raise InvalidOptionError(f"{option} is {seed}: it must be a whole number from 0 to 2^63 - 1")

    def recorded(self) -> dict[str, object]:
        """Give the options that describe the run, as plain values that JSON holds.

        Returns:
            Values by field name; paths are absolute.
        """
        values = {name: value for name, value in asdict(self).items() if name not in NOT_RECORDED}
        # A folder is told from a name of Hugging Face by its being there.
        for name in ("model", "tokenizer"):
            place = Path(str(values[name]))
            values[name] = place if values[name] is not None and place.exists() else values[name]
        return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in values.items()}


def require_together(given: dict[str, object]) -> None:
    """Refuse options that would be ignored beside the others.

    Args:
        given: The options of this command line that were written out, by field name.

    Raises:
        InvalidOptionError: One of them goes with another task, model or option.
    """
    task = given.get("task", FinetuneOptions.task)
    wrong = [
        *((name, "goes with --toy, whose sizes it sets; --model has its own") for name in SIZES if "model" in given),
        *((name, "goes with --lora") for name in ("lora_alpha", "lora_targets") if "lora" not in given),
        *((name, "goes with --task answers") for name in ("prompt_column", "answer_column") if task != "answers"),
        *((name, "goes with --task classify") for name in ("label_column", "labels") if task != "classify"),
        *((name, "goes with --task text or classify") for name in ("text_column",) if task == "answers"),
        *((name, "goes with --task text") for name in ("max_passages_per_document",) if task != "text"),
    ]
    for name, why in wrong:
        if name in given:
            raise InvalidOptionError(f"--{name.replace('_', '-')} {why}")


def resumed_options(recorded: dict[str, object], given: dict[str, object]) -> FinetuneOptions:
    """Continue with the options of the interrupted run, and refuse those that would make it another run.

    Args:
        recorded: What ``FinetuneOptions.recorded`` gave when the run began.
        given: The options of this command line that were written out, by field name.

    Returns:
        The recorded options, with the changeable ones replaced by what was given.

    Raises:
        ResumeError: An option differs that may not.
    """
    asked = FinetuneOptions(**given).recorded()  # type: ignore[arg-type]
    for name in sorted(set(given) - NOT_RECORDED - CHANGEABLE_ON_RESUME):
        if asked[name] != recorded.get(name):
            option = "--" + name.replace("_", "-")
            raise ResumeError(
                f"{option} is {asked[name]} but the interrupted run has {recorded.get(name)}: "
                "leave the option out, or start anew elsewhere"
            )
    known = {field.name for field in fields(FinetuneOptions)} - NOT_RECORDED
    if set(recorded) != known:
        raise ResumeError(
            "the interrupted run was started by another version "
            f"(options {sorted(set(recorded) ^ known)} differ): start anew"
        )
    values = {**recorded, **given}
    values["data"] = None if values["data"] is None else Path(str(values["data"]))
    return FinetuneOptions(**values)  # type: ignore[arg-type]


def _require_positive(option: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise InvalidOptionError(f"{option} is {value:g}: it must be a finite number above 0")


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidOptionError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")
