"""The privacy options of a training, as fields that any class of training arguments is joined with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ghostclip import _validate
from ghostclip.assembly.clipping_options import CLIPPINGS
from ghostclip.clipping.options import check_factor_dtype, factor_dtype_of
from ghostclip.errors import InvalidOptionError
from ghostclip.facade.module import mode_of
from ghostclip.language.vocabulary_head import CHOICES
from ghostclip.noise import LEVELS
from ghostclip.planning.plan import MEMORY_BUDGET

_MODES = ("auto", "bookkeeping", "ghost", "fast", "hooks", "graph")
MECHANISMS = (
    "poisson", "balls_in_bins", "unamplified", "banded_inverse", "banded_matrix_factorization", "buffered_toeplitz"
)  # fmt: skip
_CHOICES = {
    "clipping": CLIPPINGS,
    "grad_sample_mode": _MODES,
    "vocabulary_head": CHOICES,
    "noise_level": LEVELS,
    "mechanism": MECHANISMS,
}
_NUMBERS: dict[str, Callable[[object, str], float]] = {
    "noise_multiplier": _validate.non_negative,
    "target_epsilon": _validate.positive,
    "planned_epochs": _validate.positive,
    "expected_batch_size": _validate.positive_int,
    "noise_bands": _validate.positive_int,
}
_A = TypeVar("_A", bound="PrivacyArguments")


@dataclass
class PrivacyArguments:
    """Privacy options, in addition to those of `TrainingArguments`; its `max_grad_norm` is C, the bound on each record.

    The gradient of the batch is not clipped a second time. `per_device_train_batch_size` is the physical batch, which
    is computed at once. Times `gradient_accumulation_steps` and the number of processes it is the expected size of a
    Poisson batch, unless `expected_batch_size` is given.

    Attributes:
        target_epsilon: ε that the whole training may cost. The noise follows from it, unless it is given.
        target_delta: δ, well below 1/N for N records.
        noise_multiplier: σ, the standard deviation of the noise in units of C. With `target_epsilon` as well, the step
            that would exceed that ε is refused.
        planned_epochs: Number of epochs for which `target_epsilon` shall last, if the training will be resumed and
            continue beyond the trainer's own number of epochs, which is the least it can be.
        expected_batch_size: Average number of records in a Poisson batch, from 1 to all of them.
        clipping: As in `PrivacyEngine.make_private`.
        physical_batch: "auto" measures memory and finds the size of physical batches; None uses
            `per_device_train_batch_size`. Either way, a physical batch that does not fit is halved.
        grad_sample_mode: "auto", "bookkeeping", "ghost", "fast", "hooks" or "graph".
        compile: Of "auto": None begins eagerly, and has graphs compute the step once they are known to be quicker (on
            CPUs, where the loss is a known one); True has them compute it from the beginning, as the Trainer's
            `torch_compile=True` does; False never does.
        vocabulary_head: "auto" computes the loss of causal language models without their logits where that fits,
            "fused" refuses models where it does not, "logits" never does.
        memory_budget: How much a backward may hold, relative to an ordinary one. Below 1, repeated blocks are run
            again, and some get two backwards; see `PrivacyEngine.make_private`.
        factor_dtype: "bfloat16" allows a memory budget below 1 to round what clipping holds to 16 bits.
        noise_level: "fast", "secure" or "exact".
        mechanism: How records are drawn and noise is added: "poisson", "balls_in_bins" (each record once an epoch),
            "unamplified", or noise that takes earlier noise back: "banded_inverse", "banded_matrix_factorization" (with
            sampling) or "buffered_toeplitz"; see `ghostclip.mechanisms`.
        noise_bands: Bands of correlated noise; of "buffered_toeplitz" its buffers.
        ledger: A file that every release is written to before it is applied.
        reproducible_seed: What sampling and noise follow from, and so not private against who knows it; for tests.
    """

    target_epsilon: float | None = field(default=None, metadata={"help": "ε that the whole training may cost."})
    target_delta: float | None = field(default=None, metadata={"help": "δ, well below 1 / number of records."})
    noise_multiplier: float | None = field(default=None, metadata={"help": "σ, in place of target_epsilon."})
    planned_epochs: float | None = field(default=None, metadata={"help": "Epochs that target_epsilon is to last for."})
    expected_batch_size: int | None = field(default=None, metadata={"help": "Records of a Poisson batch on average."})
    clipping: str = field(default="flat", metadata={"help": f"How records are clipped: {', '.join(CLIPPINGS)}."})
    physical_batch: str | None = field(default=None, metadata={"help": '"auto": as large as memory allows.'})
    grad_sample_mode: str = field(default="auto", metadata={"help": f"Strategy: {', '.join(_MODES)}."})
    compile: bool | None = field(default=None, metadata={"help": "Whether the step is compiled; None: where it pays."})
    vocabulary_head: str = field(default="auto", metadata={"help": f"Loss of a head: {', '.join(CHOICES)}."})
    memory_budget: float = field(
        default=MEMORY_BUDGET, metadata={"help": "Memory of a backward, over an ordinary one's."}
    )
    factor_dtype: str | None = field(default=None, metadata={"help": '"bfloat16": with a memory budget below 1.'})
    noise_level: str = field(default="fast", metadata={"help": f"Source of noise: {', '.join(LEVELS)}."})
    mechanism: str = field(default="poisson", metadata={"help": f"Sampling and noise: {', '.join(MECHANISMS)}."})
    noise_bands: int = field(default=4, metadata={"help": "Bands, or buffers, of correlated noise."})
    ledger: str | None = field(default=None, metadata={"help": "File that every release is written to first."})
    reproducible_seed: int | None = field(default=None, metadata={"help": "For tests: not private."})

    def __post_init__(self) -> None:
        # The next in line is the host's, where this is joined with one.
        following = getattr(super(), "__post_init__", None)
        if following is not None:
            following()
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise InvalidOptionError("target_epsilon=None, noise_multiplier=None: give one of the two.")
        if self.target_delta is None:
            raise InvalidOptionError("target_delta=None: give δ, well below 1 / number of records (1e-5 for 10,000).")
        _validate.probability(self.target_delta, "target_delta")
        for name, check in _NUMBERS.items():
            if getattr(self, name) is not None:
                check(getattr(self, name), name)
        for name, known in _CHOICES.items():
            _validate.choice(getattr(self, name), name, known)
        if self.compile is None and self.grad_sample_mode == "auto" and getattr(self, "torch_compile", False):
            self.compile = True
        self.grad_sample_mode = mode_of(self.grad_sample_mode, self.compile)
        _validate.positive(self.memory_budget, "memory_budget", allow_infinity=True)
        check_factor_dtype(factor_dtype_of(self.factor_dtype), self.memory_budget)
        if self.physical_batch not in (None, "auto"):
            raise InvalidOptionError(
                f"physical_batch={self.physical_batch!r}: None or 'auto'; a number is per_device_train_batch_size."
            )
        bound = getattr(self, "max_grad_norm", 1.0)
        if bound is None or not bound > 0:
            raise InvalidOptionError(
                f"max_grad_norm={bound}: it is C here, the bound of each record's gradient, and the batch's is not "
                "clipped again. Give a number above 0."
            )


def suggests_fields(kind: type[_A]) -> type[_A]:
    """Let a class of training arguments that is given a field it does not have name the nearest one that it has.

    Args:
        kind: A dataclass.

    Returns:
        The same class.
    """
    kind.__init__ = _validate.suggests_options(kind.__init__)  # type: ignore[method-assign]
    return kind
