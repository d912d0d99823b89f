"""`Architecture`, one row of the table of known architectures, and what its rows are written with.

Shape suffixes: B samples (always 3), T tokens or frames, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.architectures.tiny import VOCABULARY, make, tiny
from tests.cases import Case
from tests.cases.table import probe_loss
from tests.reference import Batch

SAMPLES = 3
# How reasons begin where per-sample gradients exist and another library, or a later version, could form them.
OURS = "a limit of this version"


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        family: What kind of model it is, for people and for reports.
        case: Model, data and loss, as in the table that all engines share.
        reason: Where it is refused, why it has to be.
    """

    family: str
    case: Case
    reason: str = ""

    @property
    def name(self) -> str:
        """The case's name."""
        return self.case.name


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make positions and masks that a model computes by itself have the dtype of the run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def outputs_probed(*names: str, extra: Mapping[str, object] | None = None) -> Callable[[nn.Module, Batch], Tensor]:
    """Return a loss that hands the batch over as keywords and probes what the model returns under these names.

    Args:
        names: Floating outputs with the samples along axis 0; several are probed together.
        extra: Keywords that are the same for every batch.

    Returns:
        A function of model and batch that returns losses `[B]`.
    """

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        given = {key: value for key, value in batch.items() if key != "weight"}
        with default_dtype(batch["weight"].dtype):
            output = model(**given, **(extra or {}))
        return probe_loss(torch.cat([output[name].flatten(1) for name in names], 1))

    return losses


def architecture(
    family: str,
    config: str,
    model: str,
    *,
    inputs: Callable[[], Batch],
    given: Mapping[str, object] | None = None,
    outputs: tuple[str, ...] = ("logits",),
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    name: str = "",
    refused: str = "",
    reason: str = "",
    train: bool = True,
    reference: str = "one_by_one",
) -> Architecture:
    """Make a row of a transformers model.

    Args:
        family: As in `Architecture`.
        config: Name of the class of its configuration.
        model: Name of its class.
        inputs: Makes its keyword arguments.
        given: What its configuration needs beside what all tiny ones have.
        outputs: What its loss probes.
        loss: Another loss.
        name: Where two rows are of one class.
        refused: What the error says, where it is refused (a regular expression).
        reason: Why it has to be refused.
        train: Whether it runs in training mode.
        reference: As in `Case`.

    Returns:
        The row.
    """
    case = Case(
        name or model,
        lambda: make(model, tiny(config, **(given or {}))),
        inputs,
        loss or outputs_probed(*outputs),
        tags=frozenset({"transformers", "float32_inside"}),
        refused=refused,
        train=train,
        reference=reference,
    )
    return Architecture(family, case, reason)


def ids(length: int = 7) -> Tensor:
    """Draw token ids `[B, T]`, none of them special."""
    return torch.randint(4, VOCABULARY, (SAMPLES, length))


def padded(length: int = 7) -> Tensor:
    """Return an attention mask `[B, T]` of samples of different lengths."""
    mask_BT = torch.ones(SAMPLES, length, dtype=torch.int64)
    mask_BT[1, length - 2 :] = 0
    mask_BT[2, length - 1 :] = 0
    return mask_BT


def text() -> Batch:
    """Token ids of different lengths."""
    return {"input_ids": ids(), "attention_mask": padded()}


def text_pair() -> Batch:
    """Token ids of different lengths, and those of a shorter target."""
    return {**text(), "decoder_input_ids": ids(5)}


def pixels(size: int = 16, *, channels: int = 3) -> Callable[[], Batch]:
    """Return a function that draws square images."""
    return lambda: {"pixel_values": torch.randn(SAMPLES, channels, size, size)}
