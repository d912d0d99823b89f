"""The options of one fine-tuning run: their defaults, their checks, and which of them a resumed run may change.

Kept apart from the argument parser, so that a run can also be started from Python and so that a resumed run can
compare what was asked then with what is asked now.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ghostclip.errors import InvalidOptionError, ResumeError

ARCHITECTURES = ("gpt2", "llama")
STRATEGIES = ("auto", "bookkeeping", "ghost", "fast", "hooks")
DTYPES = ("float32", "bfloat16")
DEFAULT_EPOCHS = 5.0

# What these decide does not enter the mechanism or the model, so an interrupted run may go on with other values.
CHANGEABLE_ON_RESUME = frozenset({"device", "physical_batch_size", "comparison_steps", "checkpoint_seconds"})
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

    data: Path | None = None
    text_column: str = "text"
    tokenizer: Path | None = None
    max_passages_per_document: int | None = None
    eval_fraction: float = 0.1
    eval_samples: int = 256
    model: str = "gpt2"
    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    context_length: int = 64
    epsilon: float = 8.0
    delta: float | None = None
    max_grad_norm: float = 1.0
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 256
    physical_batch_size: int | None = None
    learning_rate: float = 6e-3
    strategy: str = "auto"
    device: str = "auto"
    dtype: str = "float32"
    seed: int | None = None
    secure_noise: bool = False
    unsafe_noise_seed: int | None = None
    comparison_steps: int = 7
    checkpoint_seconds: float = 60.0
    output: Path = Path("ghostclip-run")
    overwrite: bool = False
    resume: bool = False

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
        for name in ("steps", "physical_batch_size", "max_passages_per_document"):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        _require_at_least("context_length", self.context_length, 2)
        _require_at_least("comparison_steps", self.comparison_steps, 0)
        _require_positive("--learning-rate", self.learning_rate)
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
        for option, value, allowed in (("--strategy", self.strategy, STRATEGIES), ("--dtype", self.dtype, DTYPES)):
            if value not in allowed:
                raise InvalidOptionError(f"{option} is {value!r}: it may be {', '.join(allowed)}")
        for option, seed in (("--seed", self.seed), ("--unsafe-noise-seed", self.unsafe_noise_seed)):
            if seed is not None and not 0 <= seed < 2**63:
                raise InvalidOptionError(f"{option} is {seed}: it must be a whole number from 0 to 2^63 - 1")

    def recorded(self) -> dict[str, object]:
        """Give the options that describe the run, as plain values that JSON holds.

        Returns:
            Values by field name; paths are absolute.
        """
        values = {name: value for name, value in asdict(self).items() if name not in NOT_RECORDED}
        return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in values.items()}


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
    for name in ("data", "tokenizer"):
        values[name] = None if values[name] is None else Path(str(values[name]))
    return FinetuneOptions(**values)  # type: ignore[arg-type]


def _require_positive(option: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise InvalidOptionError(f"{option} is {value:g}: it must be a finite number above 0")


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidOptionError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")
