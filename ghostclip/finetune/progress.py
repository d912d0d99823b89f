"""The progress bar of a run: loss, ε so far, samples per second, physical batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from ghostclip.finetune.plot import smoothed

# ε takes the accountant some hundred milliseconds at most; more often would slow a run of short steps.
_REFRESH_SECONDS = 2.0


class ProgressBar:
    """Context that draws a bar on stderr; where stderr is no terminal, a line now and then.

    Args:
        steps: Steps of the whole run.
        done: Steps taken before.
        epsilon: Gives ε so far.
    """

    def __init__(self, *, steps: int, done: int, epsilon: Callable[[], float]) -> None:
        from tqdm import tqdm

        interactive = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps, initial=done, desc="private training", unit="step", dynamic_ncols=True,
            mininterval=0.1 if interactive else 30.0,
        )  # fmt: skip
        self._epsilon = epsilon
        self._shown = 0.0
        self._samples = 0
        self._began = time.perf_counter()
        self._losses: list[float] = []

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def step(self, loss: float | None, samples: int, physical_batch: int) -> None:
        """Show one more step.

        Args:
            loss: Its mean loss, ``None`` for an empty batch.
            samples: Its samples.
            physical_batch: Samples computed at once.
        """
        self._samples += samples
        if loss is not None:
            self._losses = [*self._losses[-19:], loss]
        now = time.perf_counter()
        if now - self._shown >= _REFRESH_SECONDS or self._bar.n + 1 == self._bar.total:
            self._shown = now
            mean = smoothed(self._losses)[-1] if self._losses else float("nan")
            rate = self._samples / (now - self._began)
            self._bar.set_postfix_str(
                f"loss {mean:.3f}, ε {self._epsilon():.2f}, {rate:.0f} samples/s, physical batch {physical_batch}",
                refresh=False,
            )
        self._bar.update()
