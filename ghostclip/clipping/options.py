"""Options of a clipper that contradict each other."""

from typing import Final

from torch import nn

from ghostclip import _torch, _validate
from ghostclip.clipping.passes import Sequences
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.clipping.store import Sharded
from ghostclip.errors import InvalidOptionError, UnsupportedModelError

TWO_PASS: Final = ("ghost", "fast")


def check_ranks(
    model: nn.Module, strategy: str, *, device_only: bool, sharded: Sharded | None, sequences: Sequences | None
) -> None:
    """Refuse parameters in parts that nobody describes, and options that contradict other ranks."""
    if sharded is None and any(map(_torch.is_sharded_tensor, model.parameters())):
        raise UnsupportedModelError(
            f"{type(model).__name__} has parameters that several ranks hold in parts (DTensor). Call make_private, "
            "or say GhostClipper(model, sharded=ghostclip.distributed.ShardedModel(model), ...)."
        )
    if device_only and sharded is not None and sharded.shared_samples is not None:
        raise InvalidOptionError(
            "device_only=True with ranks that share samples (tensor parallelism): their squares are added up, and what "
            "they say of rounding is read. Leave device_only out."
        )
    if sequences is not None and sharded is not None:
        raise InvalidOptionError(
            "sequences with sharded: splitting sequences over ranks that hold parameters in parts is not supported. "
            "Use one of them."
        )
    if sequences is not None and strategy not in {"auto", "bookkeeping"}:
        raise InvalidOptionError(
            f"strategy={strategy!r} with sequences: factors that ranks have in parts are brought together by "
            "book-keeping alone. Use strategy='bookkeeping'."
        )


def check_budget(
    memory_budget: float, strategy: str, *, device_only: bool, sharded: Sharded | None, sequences: Sequences | None
) -> None:
    """Refuse a memory budget below 1 where nothing can be chosen to meet it."""
    _validate.positive(memory_budget, "memory_budget", allow_infinity=True)
    reasons = {
        "device_only=True": device_only,
        "sequences": sequences is not None,
        "a model that is sharded": sharded is not None,
        f"strategy={strategy!r}": strategy not in ("auto", "bookkeeping"),
    }
    conflict = next((reason for reason, holds in reasons.items() if holds), None)
    if memory_budget < 1 and conflict is not None:
        raise InvalidOptionError(
            f"memory_budget={memory_budget} with {conflict}: below 1 every layer gets one backward or two as memory "
            "allows, and the two are compared. Use strategy='auto', or a budget of 1 or more."
        )


def check_readers(strategy: str, policy: ClipPolicy, *, device_only: bool) -> None:
    """Refuse options that read values where ``device_only`` forbids it."""
    if not device_only:
        return
    if strategy in TWO_PASS:
        raise InvalidOptionError(
            f"strategy={strategy!r} with device_only=True: two backwards are compared, and the answer is read. Use "
            "strategy='bookkeeping'."
        )
    if policy.adaptation is not None:
        raise InvalidOptionError(
            "policy with device_only=True: an adaptive bound is a number that every step reads. Use a fixed one."
        )
