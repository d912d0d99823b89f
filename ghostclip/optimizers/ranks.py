"""A step that several ranks make together: all of them, on one draw, or none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ghostclip.distributed import Share, SharedNoise

if TYPE_CHECKING:
    from ghostclip.noise import NoiseSource
    from ghostclip.optimizers.dp_optimizer import DPOptimizer
    from ghostclip.sampling.draws import Match


def agree_on_release(optimizer: DPOptimizer, drawn: Match | None) -> None:
    """Refuse a release on every rank unless all of them are about to make the same one.

    Args:
        optimizer: Is about to release; has nothing to refuse itself.
        drawn: The draws that its rows come from; None where the sampling is not known.

    Raises:
        InvalidOptionError: If the ranks hold different draws, add other noise, or one of them refuses.
    """
    noise = optimizer.noise_source
    if not isinstance(noise, SharedNoise):
        return
    share = Share(sum(optimizer.clipper.rows_seen))
    if drawn is not None:
        # This rank's rows are those of its draws; where the last of several ends, ranks may tell differently.
        first = drawn.draws[0]
        share = Share(first.rows, first.number, first.records)
    noise.require_one_draw(share._replace(std=optimizer.noise_std, sensitivity=optimizer.clipper.sensitivity()))


def refuse_release(noise: NoiseSource, error: BaseException) -> None:
    """Tell the other ranks, which wait for this one, that it makes no release.

    Args:
        noise: What the release was to get its noise from.
        error: Why it does not.
    """
    if isinstance(noise, SharedNoise) and isinstance(error, Exception):
        # Where the others are gone already, the error that counts is this rank's own.
        with contextlib.suppress(RuntimeError):
            noise.require_one_draw(None)
