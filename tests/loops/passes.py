"""Observer of backward passes: how many a loop has made for each release, whatever the engine counts."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ghostclip import GhostClipper, PhysicalBatches
from ghostclip.optim import DPOptimizer

# Frames between a loop and torch's backward that are nobody's wish: torch's methods, and the engine's look at losses.
_TRANSPARENT = ("torch.", "ghostclip.capture.backward_entry", "ghostclip.checks.loop_record", __name__)


class Passes:
    """Counts the backwards that the loop itself asks for, from one step of the private optimizer to the next.

    A pass is a call of `loss.backward()`, `torch.autograd.backward` or the clipper's `backward`; what the engine runs
    inside of these, or to check something, is none. `zero_grad()` throws passes away. A step that only accumulates ends
    a physical batch, and each record is in one of them: of these the one with the most passes counts, as it does of the
    parts of a batch that `PhysicalBatches` runs. What is of one number reaches no model and is no pass.
    """

    def __init__(self) -> None:
        self._now, self._most, self._depth = 0, 0, 0

    def take(self) -> int:
        """Return the passes that are in the release that is applied now, at least 1, and begin anew."""
        found = max(1, self._most, self._now)
        self._now = self._most = 0
        return found

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count."""
        places: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
            (torch.autograd, "backward", self._backward),
            (GhostClipper, "backward", self._whole_backward),
            (PhysicalBatches, "run", self._run_in_parts),
            (DPOptimizer, "step", self._step),
            (DPOptimizer, "zero_grad", self._zero_grad),
            (nn.Module, "zero_grad", self._zero_grad),
        ]
        before = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, observed), own in zip(places, before, strict=True):
            setattr(owner, name, observed(own))
        try:
            yield
        finally:
            for (owner, name, _), own in zip(places, before, strict=True):
                setattr(owner, name, own)

    def _backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        # Without functools.wraps: the engine takes what it finds for its own where the attributes are its own.
        def backward(*args: Any, **options: Any) -> Any:
            if self._depth == 0 and not _is_of_a_number(args) and not _asker().startswith("ghostclip."):
                self._now += 1
            with self._inside():
                return own(*args, **options)

        return backward

    def _whole_backward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def backward(*args: Any, **options: Any) -> Any:
            self._now += self._depth == 0
            with self._inside():
                return own(*args, **options)

        return backward

    def _run_in_parts(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def run(parts: Any, batch: Any, work: Callable[[Any], Any]) -> Any:
            before = most = self._now

            def counted(part: Any) -> Any:
                nonlocal most
                self._now = before
                result = work(part)
                most = max(most, self._now)
                return result

            found = own(parts, batch, counted)
            self._now = most
            return found

        return run

    def _step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def step(*args: Any, **options: Any) -> Any:
            result = own(*args, **options)
            # Not before: a closure makes its passes inside of the step.
            self._most, self._now = max(self._most, self._now), 0
            return result

        return step

    def _zero_grad(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def zero_grad(*args: Any, **options: Any) -> Any:
            self._now = 0
            return own(*args, **options)

        return zero_grad

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _is_of_a_number(args: Sequence[Any]) -> bool:
    """Whether a backward is of one number, or of what was made of it by arithmetic: it reaches no model."""
    loss = args[0] if args else None
    if not isinstance(loss, torch.Tensor):
        return False
    node = loss.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        following = [found for found, _ in node.next_functions if found is not None]
        node = following[0] if len(following) == 1 else None
        if node is None:
            return False
    return loss.is_leaf if node is None else getattr(node, "variable", torch.ones(1)).dim() == 0


def _asker() -> str:
    """Name of the module that asked for the backward that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_TRANSPARENT):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
