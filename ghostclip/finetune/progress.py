"""What a person sees of a run while it goes on, and how they stop it: the bar, and Ctrl-C between two steps."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

# The bar moves at most this often, and seldom enough that working out ε takes a twentieth of the time.
_REFRESH_SECONDS, _REFRESH_LOG, _SHARE = 0.5, 30.0, 20.0


class ProgressBar:
    """Context that draws a bar on stderr; where stderr is no terminal, a line now and then.

    Steps are shown together with the ε that holds after them, never one without the other.
    """

    def __init__(self, *, steps: int, done: int, epsilon: Callable[[], float]) -> None:
        from tqdm import tqdm

        self._least = self._pause = _REFRESH_SECONDS if sys.stderr.isatty() else _REFRESH_LOG
        self._bar = tqdm(
            total=steps, initial=done, desc="private training", unit="step", dynamic_ncols=True, mininterval=0.0
        )
        self._physical = self._waiting = self._samples = 0
        self._epsilon = epsilon
        self._began = time.perf_counter()
        self._shown = self._began - self._least
        self._losses: list[float] = []

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._waiting:
            self._show()
        self._bar.close()

    def step(self, loss: float | None, samples: int, physical_batch: int) -> None:
        """Show one more step."""
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


class StopRequest:
    """Context in which the first Ctrl-C (or SIGTERM) only sets ``requested``; the second ends the program at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only, and refuses handlers elsewhere.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step (once more: at once) …", file=sys.stderr, flush=True)


def smoothed(values: Sequence[float]) -> list[float]:
    """Average exponentially over about a fortieth of the run, without pulling the start towards zero."""
    keep = math.exp(-1.0 / max(1.0, len(values) / 40.0))
    total = weight = 0.0
    averages: list[float] = []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1.0
        averages.append(total / weight)
    return averages
