"""The loop that a combination of choices describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.habits import (
    AFTER_STEP,
    BEFORE_FORWARD,
    BEFORE_STEP,
    HABITS,
    LOADERS,
    OPTIMIZERS,
    ORDINARY,
    SOURCES,
    UNEVEN_LOADERS,
    UNEVEN_SOURCES,
    UNSEEN_LOADERS,
    WRAPPERS,
)
from benchmarks.loops.losses import LOSSES
from tests.loops.loop import Loop
from tests.loops.world import World

# Options of `make_private`, and whether the loop drives the clipper itself.
STRATEGIES: dict[str, tuple[dict[str, Any], bool]] = {
    ORDINARY: ({}, False),
    "clipper.backward": ({}, True),
    "hooks": ({"grad_sample_mode": "hooks"}, False),
    "ghost": ({"grad_sample_mode": "ghost"}, True),
    "ghost, loss.backward()": ({"grad_sample_mode": "ghost"}, False),
    "fast": ({"grad_sample_mode": "fast"}, True),
    "unwrapped": ({"wrap_model": False}, False),
    "per layer": ({"clipping": "per_layer"}, False),
    "shuffled": ({"poisson_sampling": False}, False),
    "no probe": ({"probe": False}, False),
}
ZEROS = (
    ORDINARY,
    "after the step",
    "of the model",
    "of the bare model",
    "set_to_none=False",
    "p.grad = None",
    "p.grad.zero_()",
    "never",
    "between backward and step",
    "of the model, between backward and step",
)
# How gradients come about, and how many backward passes a step then adds up.
BACKWARDS: dict[str, int] = {
    ORDINARY: 1,
    "torch.autograd.backward": 1,
    "with retain_graph": 1,
    "twice through one graph": 2,
    "in two terms": 2,
    "in halves": 2,
    "of a loss times two": 1,
    "of a loss over two": 1,
    "two losses apart": 2,
    "two batches to a step": 2,
    "by torch.autograd.grad": 1,
    "in a closure": 1,
    "through a scaler": 1,
    "through a scaler that is off": 1,
    "left out once": 1,
    "an exception before the step": 1,
    "an exception in the forward": 1,
    "thrown away and made again": 1,
    "on inputs of random labels as well": 2,
}
# See `Loop.uneven` and `Loop.unseen`.
UNEVEN_BACKWARDS = {
    "left out once": "leaves out the second batch",
    "an exception before the step": "throws the second batch away after its backward",
    "an exception in the forward": "throws the second batch away in its forward",
}
UNSEEN_BACKWARDS = {
    "on inputs of random labels as well": "pairs inputs with other records' labels before the model",
}
UNCHECKED = "mixes records, and has switched the checks off (probe=False)"
RANKS = (ORDINARY, "two")
AXES: dict[str, tuple[str, ...]] = {
    "source": tuple(SOURCES),
    "loader": tuple(LOADERS),
    "loss": tuple(ORDINARY if name == "mean" else name for name in LOSSES),
    "optimizer": tuple(OPTIMIZERS),
    "wrapper": tuple(WRAPPERS),
    "habit": tuple(HABITS),
    "zeros": ZEROS,
    "backward": tuple(BACKWARDS),
    "strategy": tuple(STRATEGIES),
    "ranks": RANKS,
}
# Where the reference of the loss does not say what the sum has to be.
_NO_REFERENCE = {
    "optimizer": {"the last layer"},
    "wrapper": {"with a new head"},
    "habit": {
        "a parameter is frozen later",
        "a parameter is unfrozen later",
        "a parameter is exchanged",
        "C is raised",
    },
    "backward": {"in two terms", "of a loss times two", "of a loss over two", "two losses apart"}
    | {"on inputs of random labels as well", "twice through one graph"},
    "strategy": {"per layer"},
}
_CLIPS = (1.0, 0.2)


@dataclass(frozen=True)
class Combination:
    """One loop of the search: what differs from the ordinary, by axis. Callable, so that ranks can import it."""

    choices: tuple[tuple[str, str], ...]
    seed: int

    def __getitem__(self, axis: str) -> str:
        return dict(self.choices).get(axis, ORDINARY)

    @property
    def name(self) -> str:
        """What differs, in words."""
        return ", ".join(f"{axis}: {choice}" for axis, choice in self.choices) or ORDINARY

    def loop(self) -> Loop:
        """Return the loop that the oracle measures."""
        loss = LOSSES[_loss_name(self)]
        return Loop(
            self.name,
            self.name,
            self,
            ranks=1 if self["ranks"] == ORDINARY else 2,
            reduction=loss.reduction,
            sampling="shuffled" if self["strategy"] == "shuffled" else "poisson",
            passes=BACKWARDS[self["backward"]],
            clips=_CLIPS if self["ranks"] == ORDINARY else _CLIPS[:1],
            uneven=UNEVEN_LOADERS.get(self["loader"])
            or UNEVEN_SOURCES.get(self["source"])
            or UNEVEN_BACKWARDS.get(self["backward"])
            or loss.uneven,
            unseen=loss.unseen
            or UNSEEN_LOADERS.get(self["loader"])
            or UNSEEN_BACKWARDS.get(self["backward"], "")
            or (UNCHECKED if self["strategy"] == "no probe" and loss.reference is None else ""),
        )

    def __call__(self, world: World) -> None:
        """Train for an epoch."""
        world.seed = self.seed
        _Training(self, world).run()


def _loss_name(combination: Combination) -> str:
    return "mean" if combination["loss"] == ORDINARY else combination["loss"]


class _Training:
    """The loop that a combination describes."""

    def __init__(self, combination: Combination, world: World) -> None:
        self.choice, self.world = combination, world
        self.loss = LOSSES[_loss_name(combination)]
        known = all(combination[axis] not in choices for axis, choices in _NO_REFERENCE.items())
        known = known and not combination.loop().unseen
        reference = self.loss.reference(world) if self.loss.reference and known else None
        self.bare = world.watch(self.loss.make, reference)
        optimizer = OPTIMIZERS[combination["optimizer"]](list(self.bare.parameters()))
        own = world.loader(self.loss.data(world), **SOURCES[combination["source"]])
        options, self.two_pass = STRATEGIES[combination["strategy"]]
        made = world.private(self.bare, optimizer, own, loss_reduction=self.loss.reduction, **options)
        private, self.optimizer, loader = made[0], made[1], made[-1]
        if not isinstance(private, nn.Module):  # wrap_model=False hands back a handle
            private = self.bare
        self.model = WRAPPERS[combination["wrapper"]](private, self.bare)
        self.batches = LOADERS[combination["loader"]](loader, own, self.optimizer)

    def run(self) -> None:
        """Go through the batches."""
        self.moment, self.habit = HABITS[self.choice["habit"]]
        for step, (x, y) in enumerate(self.batches):
            self._acts(BEFORE_FORWARD, step)
            if self.choice["backward"] == "two batches to a step" and step % 2 == 0:
                self._backward(self._value(x, y))
                continue
            self._zero(before=True)
            if self.choice["backward"] == "two batches to a step":
                self._backward(self._value(x, y))
                self._step(step)
            else:
                self._one(x, y, step)
            self._zero(before=False)

    def _one(self, x: Tensor, y: Tensor, step: int) -> None:
        kind = self.choice["backward"]
        if kind == "in a closure":

            def closure() -> Tensor:
                self.optimizer.zero_grad()
                value = self._value(x, y)
                value.backward()
                return value

            self._acts(BEFORE_STEP, step)
            self.optimizer.step(closure)
            self._acts(AFTER_STEP, step)
            return
        try:
            self._gradients(kind, x, y, step)
        except _Interrupted:
            return
        if kind == "through a scaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        self._step(step)

    def _step(self, step: int) -> None:
        if self.choice["zeros"] == "between backward and step":
            self.optimizer.zero_grad()
        if self.choice["zeros"] == "of the model, between backward and step":
            self.model.zero_grad()
        self._acts(BEFORE_STEP, step)
        self.optimizer.step()
        self._acts(AFTER_STEP, step)

    def _gradients(self, kind: str, x: Tensor, y: Tensor, step: int) -> None:
        """One way to come to gradients."""
        if kind == "in halves":
            middle = len(x) // 2
            self._backward(self._value(x[:middle], y[:middle]))
            self._backward(self._value(x[middle:], y[middle:]))
        elif kind == "an exception in the forward" and step == 1:
            self._interrupted(x)
        elif kind == "thrown away and made again":
            self._backward(self._value(x, y))
            self.optimizer.zero_grad()
            self._backward(self._value(x, y))
        elif kind in ("two losses apart", "on inputs of random labels as well"):
            self._backward(self._value(x, y))
            self._backward(self._value(x.flip(1) if kind == "two losses apart" else x.roll(1, 0), y))
        elif not (kind == "left out once" and step == 1):
            self._of_one_loss(kind, self._value(x, y), step)

    def _of_one_loss(self, kind: str, value: Tensor, step: int) -> None:
        if kind in ("twice through one graph", "in two terms"):
            first, second = (0.3, 0.7) if kind == "in two terms" else (1.0, 1.0)
            (first * value).backward(retain_graph=True)
            (second * value).backward()
        elif kind == "torch.autograd.backward":
            torch.autograd.backward([value])
        elif kind == "with retain_graph":
            value.backward(retain_graph=True)
        elif kind == "by torch.autograd.grad":
            parameters = [p for p in self.bare.parameters() if p.requires_grad]
            for p, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                p.grad = gradient
        elif kind.startswith("through a scaler"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "through a scaler")
            self.scaler.scale(value).backward()
        else:
            self._backward(value * {"of a loss times two": 2.0, "of a loss over two": 0.5}.get(kind, 1.0))
            if kind == "an exception before the step" and step == 1:
                raise _Interrupted

    def _interrupted(self, x: Tensor) -> None:
        handle = self.bare[-1].register_forward_pre_hook(_raise)  # type: ignore[operator, index]
        try:
            self.model(x)
        finally:
            handle.remove()

    def _value(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss.batch(self.model, x, y)

    def _backward(self, value: Tensor) -> None:
        if self.two_pass:
            self.optimizer.clipper.backward(value)
        else:
            value.backward()

    def _acts(self, moment: str, step: int) -> None:
        if moment == self.moment:
            self.habit(self.world, self.bare, self.optimizer, step)

    def _zero(self, *, before: bool) -> None:
        kind = self.choice["zeros"]
        if before == (kind == "after the step"):
            return
        if kind in (ORDINARY, "after the step"):
            self.optimizer.zero_grad()
        elif before:
            self._zero_otherwise(kind)

    def _zero_otherwise(self, kind: str) -> None:
        if kind == "of the model":
            self.model.zero_grad()
        elif kind == "of the bare model":
            self.bare.zero_grad()
        elif kind == "set_to_none=False":
            self.optimizer.zero_grad(set_to_none=False)
        elif kind.startswith("p.grad"):
            for p in self.bare.parameters():
                if p.grad is not None:
                    p.grad = None if kind == "p.grad = None" else p.grad.zero_()


class _Interrupted(Exception):
    """What goes wrong in the middle of a loop, and is caught by it."""


def _raise(*_: Any) -> None:
    raise _Interrupted
