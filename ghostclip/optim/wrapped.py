"""Base of wrappers of a torch optimizer that schedulers, checkpoints and trainers take for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip.errors import CopyError, InvalidOptionError

ACCOUNT_KEY: Final = "ghostclip_account"
"""Key under which a parameter group of a saved state holds the account of a private training."""


class CarriedAccount(Protocol):
    """Account that travels with an optimizer's state."""

    def text(self) -> str:
        """Return it."""

    def load(self, text: str | None) -> None:
        """Continue from what `text` returned, None where the state had none."""


_PARAMS: Final = itemgetter("params")


@torch.enable_grad()
def evaluated(closure: Callable[[], Any]) -> Any:
    """Return what the closure of a step returns, whatever the step itself forbids."""
    return closure()


def _of_wrapped(name: str) -> Any:
    """Return an attribute that is read from, and written to, the wrapped optimizer."""

    def write(wrapper: WrappedOptimizer, value: Any) -> None:
        setattr(wrapper.original_optimizer, name, value)

    return property(attrgetter(f"original_optimizer.{name}"), write)


class WrappedOptimizer(Optimizer):
    """A torch optimizer whose parameters, state and hooks all live in another one.

    `Optimizer.__init__` is not called on purpose: it would make second homes for them. What torch looks up on the
    wrapper (its own hook tables included) is found on the wrapped optimizer through `__getattr__`, so that, for
    instance, `register_step_pre_hook` runs right before the wrapped optimizer's update.

    Args:
        optimizer: The optimizer to wrap.

    Raises:
        InvalidOptionError: If it is not a torch optimizer.
    """

    account: CarriedAccount | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidOptionError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        self.original_optimizer = optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups, in order."""
        return list(chain.from_iterable(map(_PARAMS, self.original_optimizer.param_groups)))

    param_groups: Any = _of_wrapped("param_groups")
    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which a plain optimizer of its kind can load too, with the account.

        Privacy:
            The account's entry in the first parameter group holds the keys that noise and batches follow from: keep the
            state as secret as the data, or take them out with `ghostclip.privacy.optimizer_state.without_keys`.

        Returns:
            The state.
        """
        state = self.original_optimizer.state_dict()
        if self.account is not None and state["param_groups"]:
            state["param_groups"][0][ACCOUNT_KEY] = self.account.text()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; in a training of `PrivacyEngine` with the account and what noise and batches follow from.

        Args:
            state_dict: What `state_dict()` gave.

        Raises:
            ResumeError: If the state holds no account, or one of another mechanism or training; nothing is changed.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        texts = [group.pop(ACCOUNT_KEY, None) for group in groups]
        # Optimizers load by putting new objects in the place of their state and groups.
        inner = self.original_optimizer
        before = [(one, dict(vars(one))) for one in (inner, *getattr(inner, "members", ()))]
        try:
            inner.load_state_dict({**state_dict, "param_groups": groups})
            if self.account is not None:
                self.account.load(next((text for text in texts if text is not None), None))
        except BaseException:
            for one, attributes in before:
                vars(one).update(attributes)
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, if its trainable parameters are clipped and are in no other group of the training.

        Args:
            param_group: As torch takes it.

        Raises:
            UncoveredParameterError: If a trainable parameter of the group is not clipped.
            InvalidOptionError: If another of several optimizers holds one of them.
        """
        params = param_group["params"]
        parameters: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        self._refuse_group(parameters)
        self.original_optimizer.add_param_group({**param_group, "params": parameters})

    def _refuse_group(self, parameters: Sequence[nn.Parameter]) -> None:
        raise NotImplementedError

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse an enabled `torch.amp.GradScaler`, which reads this before it steps; the only place to stop it."""
        raise InvalidOptionError(
            "GradScaler multiplies the loss, so that gradients would be clipped at the wrong norm and unscaled outside "
            "the private step. Use torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False)."
        )

    def __getattr__(self, name: str) -> Any:
        """Look up a missing attribute on the wrapped optimizer."""
        if "original_optimizer" not in self.__dict__:
            raise AttributeError(name)
        if name == "virtual_step":
            raise AttributeError(
                f"{type(self).__name__} has no virtual_step (Opacus 0.x): cut large batches with "
                "ghostclip.BatchMemoryManager."
            )
        return getattr(self.original_optimizer, name)

    def __getstate__(self) -> NoReturn:
        """Refuse copies and pickles: a second one would release from the same clipped sums."""
        raise CopyError(f"{type(self).__name__} cannot be copied or pickled. Save its state_dict() instead.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"
