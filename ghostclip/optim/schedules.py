"""Three ways for a value to change from epoch to epoch, each for the noise multiplier and for the clip bound."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError, ResumeError
from ghostclip.optim.dp_optimizer import DPOptimizer
from ghostclip.optim.members import private_optimizer


class Schedule(abc.ABC):
    """Sets one value of a private optimizer after every epoch (or whatever `step()` is called after)."""

    attribute = ""

    # As in torch's schedulers, `last_epoch` is -1 at the beginning; the optimizer's present value is that of this
    # epoch, and the next one's is set at once.
    def __init__(self, optimizer: DPOptimizer, *, last_epoch: int = -1) -> None:
        optimizer = private_optimizer(optimizer)
        if self.attribute == "max_grad_norm" and optimizer.clipper.policy.adaptation is not None:
            raise InvalidOptionError("optimizer with clipping='adaptive': its bound moves by itself; use no schedule.")
        self.optimizer = optimizer
        optimizer.scheduled.add(self.attribute)
        self.last_epoch = last_epoch
        self.step()

    @abc.abstractmethod
    def next_value(self, current: float) -> float:
        """Return the value for epoch `last_epoch`, from that of the epoch before."""

    def step(self) -> None:
        """Go on to the next epoch; nothing changes where that is refused."""
        self.last_epoch += 1
        try:
            setattr(self.optimizer, self.attribute, self.next_value(getattr(self.optimizer, self.attribute)))
        except BaseException:
            self.last_epoch -= 1
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the value in force and the schedule's own numbers; functions are left out."""
        numbers = {name: value for name, value in vars(self).items() if name != "optimizer" and not callable(value)}
        return {**numbers, "value": getattr(self.optimizer, self.attribute)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, and set the optimizer's value."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ResumeError(f"schedule state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        setattr(self.optimizer, self.attribute, state["value"])
        for name in self.state_dict().keys() - {"value"}:
            setattr(self, name, state[name])


class _Exponential(Schedule):
    """Multiplies the value by γ every `step_size` epochs, here every one."""

    step_size = 1

    def __init__(self, optimizer: DPOptimizer, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = _validate.positive(gamma, "gamma")
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self, current: float) -> float:
        changes = self.last_epoch != 0 and self.last_epoch % self.step_size == 0
        return self.gamma * current if changes else current


class _Step(_Exponential):
    """Multiplies the value by γ every `step_size` epochs."""

    def __init__(self, optimizer: DPOptimizer, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        self.step_size = _validate.positive_int(step_size, "step_size")
        super().__init__(optimizer, gamma=gamma, last_epoch=last_epoch)


class _Lambda(Schedule):
    """Multiplies the first value by a function of the epoch; factors do not accumulate."""

    def __init__(self, optimizer: DPOptimizer, *, function: Callable[[int], float], last_epoch: int = -1) -> None:
        self._function = function
        self.base_value = float(getattr(optimizer, self.attribute, 0.0))
        super().__init__(optimizer, last_epoch=last_epoch)

    def next_value(self, current: float) -> float:
        del current
        return self.base_value * self._function(self.last_epoch)


class ExponentialNoise(_Exponential):
    """Multiplies the noise multiplier by γ every epoch; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"


class StepNoise(_Step):
    """Multiplies the noise multiplier by γ every `step_size` epochs; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"


class LambdaNoise(_Lambda):
    """Multiplies the first noise multiplier by a function of the epoch; each step is accounted with the σ in force."""

    attribute = "noise_multiplier"

    def __init__(self, optimizer: DPOptimizer, *, noise_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        super().__init__(optimizer, function=noise_lambda, last_epoch=last_epoch)


class ExponentialGradClip(_Exponential):
    """Multiplies the clip bound (of all groups) by γ every epoch; the noise follows the bound."""

    attribute = "max_grad_norm"


class StepGradClip(_Step):
    """Multiplies the clip bound (of all groups) by γ every `step_size` epochs; the noise follows the bound."""

    attribute = "max_grad_norm"


class LambdaGradClip(_Lambda):
    """Multiplies the first clip bound (of all groups) by a function of the epoch; the noise follows the bound."""

    attribute = "max_grad_norm"

    def __init__(
        self, optimizer: DPOptimizer, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, function=scheduler_function, last_epoch=last_epoch)
