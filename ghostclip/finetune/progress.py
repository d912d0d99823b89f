"""The progress bar of a run: loss, ε so far, samples per second, physical batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from ghostclip.finetune.plot import smoothed

# The bar moves at most this often, and seldom enough that working out ε takes a twentieth of the time.
_REFRESH_SECONDS, _REFRESH_LOG, _SHARE = 0.5, 30.0, 20.0


class ProgressBar:
    """Context that draws a bar on stderr; where stderr is no terminal, a line now and then.

    Steps are shown together with the ε that holds after them, never one without the other.

    Args:
        steps: Steps of the whole run.
        done: Steps taken before.
        epsilon: Gives ε so far.
    """

    def __init__(self, *, steps: int, done: int, epsilon: Callable[[], float]) -> None:
        from tqdm import tqdm

        self._least = self._pause = _REFRESH_SECONDS if sys.stderr.isatty() else _REFRESH_LOG
        self._bar = tqdm(
            total=steps, initial=done, desc="private training", unit="step", dynamic_ncols=True, mininterval=0.0
        )
        self._physical = self._waiting = 0
        self._epsilon = epsilon
        self._shown = time.perf_counter() - self._least
        self._samples = 0
        self._began = time.perf_counter()
        self._losses: list[float] = []

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._show()
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
        self._waiting += 1
        self._physical = physical_batch
        if time.perf_counter() - self._shown >= self._pause:
            self._show()

    def _show(self) -> None:
        began = time.perf_counter()
        epsilon = self._epsilon()
        now = time.perf_counter()
        self._pause = max(self._least, _SHARE * (now - began))
        mean = smoothed(self._losses)[-1] if self._losses else float("nan")
        rate = self._samples / (now - self._began)
        self._bar.set_postfix_str(
            f"loss {mean:.3f}, ε {epsilon:.2f}, {rate:.0f} samples/s, physical batch {self._physical}", refresh=False
        )
        self._shown = now
        waiting, self._waiting = self._waiting, 0
        self._bar.update(waiting)
