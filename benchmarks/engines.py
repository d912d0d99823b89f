"""The ways to a gradient that are compared, behind one small interface.

A step is forward, backward, and everything until the sum of clipped gradients is there. Noise and the optimizer's
update are left out: they cost the same whatever computed the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

from torch import Tensor, nn

from benchmarks.tasks import Batch, per_sample_losses


class CannotDo(Exception):  # noqa: N818 - a fact about an engine, no error
    """Raised by an engine for a model that is not made for it; says why in one sentence."""


class Runner(Protocol):
    """An engine at work on one model."""

    def step(self, batch: Batch) -> None:
        """Compute the gradient of the batch, from cleared gradients on."""

    def result(self) -> list[Tensor | None]:
        """What the last step computed."""


@dataclass(frozen=True)
class Engine:
    """A named way to compute gradients.

    Attributes:
        name: Short name, used on the command line and in files.
        title: What a reader of the table sees.
        private: Whether the result is a sum of clipped gradients.
        attach: Takes a model of its own and the clipping norm, gives a runner; raises `CannotDo`.
    """

    name: str
    title: str
    private: bool
    attach: Callable[[nn.Module, float], Runner]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a result has an entry for."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _NonPrivate:
    """Ordinary training: one backward of the mean loss."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        del max_grad_norm  # nothing is clipped
        self.model = model

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        per_sample_losses(self.model, batch).mean().backward()

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in trainable(self.model)]


class _Ghostclip:
    """One of ghostclip's strategies, as a user calls it."""

    # The first and the fourth forward are proved, the next one that is is the sixteenth.
    proving_steps = 4

    def __init__(self, model: nn.Module, max_grad_norm: float, *, strategy: str) -> None:
        import ghostclip

        self.model = model
        self.clipper = ghostclip.GhostClipper(model, max_grad_norm=max_grad_norm, strategy=strategy)

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        self.clipper.backward(per_sample_losses(self.model, batch))

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in trainable(self.model)]


class _GhostclipGraph(_Ghostclip):
    """ghostclip's strategy that computes a step by one compiled graph."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        import ghostclip

        super().__init__(model, max_grad_norm, strategy="graph")
        self._step = ghostclip.GraphStep(self.clipper, lambda model, *batch: per_sample_losses(model, batch))

    def prepare(self, batch: Batch) -> None:
        """Compile for such a batch."""
        self.step(batch)

    def step(self, batch: Batch) -> None:
        if not self._step.graphs:
            # The first sum is that of the eager engine, which the graph is held against.
            self._step(*batch)
        self.model.zero_grad(set_to_none=True)
        self._step(*batch)
        if self._step.reasons:
            raise CannotDo(f"computed eagerly: {next(iter(self._step.reasons))}")


NON_PRIVATE = Engine("nonprivate", "PyTorch, not private", False, _NonPrivate)
EAGER = ("bookkeeping", "ghost", "fast", "hooks")
STRATEGIES = (*EAGER, "graph")


def engines() -> list[Engine]:
    """Ordinary training, ghostclip's strategies, and Opacus's two main modes where it is installed."""
    found = [NON_PRIVATE]
    found += [Engine(name, f"ghostclip {name}", True, partial(_Ghostclip, strategy=name)) for name in EAGER]
    found.append(Engine("graph", "ghostclip graph", True, _GhostclipGraph))
    if find_spec("opacus"):
        from benchmarks.peers.opacus import Ghost, Hooks

        found.append(Engine("opacus-hooks", "Opacus hooks", True, Hooks))
        found.append(Engine("opacus-ghost", "Opacus ghost", True, Ghost))
    return found
