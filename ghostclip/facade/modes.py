"""Opacus's gradient sample modes, as strategies of the one clipper."""

from __future__ import annotations

from typing import Final, get_args

from ghostclip._validate import did_you_mean
from ghostclip.clipper import Strategy
from ghostclip.errors import InvalidOptionError

SHARDED: Final = (
    "how a model is sharded over devices is no mode here. Shard it (fully_shard, parallelize_module), then choose a "
    "mode as on one device: grad_sample_mode='ghost' for two passes"
)
NO_OP: Final = (
    "it trains without clipping while the account goes on. Use the plain model and optimizer to compare with "
    "training without privacy"
)
REFUSED_MODES: Final = {"ghost_fsdp": SHARDED, "ghost_tp": SHARDED, "no_op": NO_OP}
"""Values of `grad_sample_mode` that are refused by name."""

_STRATEGY_OF: Final[dict[str, Strategy]] = {
    **{name: name for name in get_args(Strategy)},
    # Opacus's other ways to fill p.grad_sample; what is in it is the same.
    "functorch": "hooks",
    "ew": "hooks",
}
MODES: Final = tuple(_STRATEGY_OF)


def mode_of(grad_sample_mode: str, compile: bool | None) -> str:  # noqa: A002, FBT001 - torch's word
    """Return the mode that a choice about compiling stands for."""
    fits = {True: ("auto", "graph"), False: tuple(mode for mode in MODES if mode != "graph")}
    if compile is not None and grad_sample_mode in MODES and grad_sample_mode not in fits[compile]:
        raise InvalidOptionError(
            f'compile={compile} with grad_sample_mode={grad_sample_mode!r}: only "auto" leaves it open whether the '
            "step is compiled. Leave one of them out."
        )
    return "graph" if compile else grad_sample_mode


def strategy_of(grad_sample_mode: str) -> Strategy:
    """Return the strategy of a mode; Opacus's "functorch" and "ew" stand for "hooks"."""
    if grad_sample_mode in REFUSED_MODES:
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: {REFUSED_MODES[grad_sample_mode]}.")
    if grad_sample_mode not in _STRATEGY_OF:
        listed, meant = ", ".join(map(repr, MODES)), did_you_mean(grad_sample_mode, MODES, otherwise=".")
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: must be one of {listed}{meant}")
    return _STRATEGY_OF[grad_sample_mode]
