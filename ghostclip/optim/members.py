"""Several optimizers over one model, as for Muon on the matrices and AdamW on the rest: one release for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ghostclip.errors import InvalidOptionError
from ghostclip.optim.checks import initialises_state, refuse_uncovered
from ghostclip.optim.dp_optimizer import DPOptimizer
from ghostclip.optim.wrapped import CarriedAccount, WrappedOptimizer, evaluated


def _of_members(said: str, read: Callable[[JoinedOptimizer], Any]) -> Any:
    """Return a property read from all joined optimizers, which refuses to be set."""

    def write(joined: JoinedOptimizer, value: Any) -> None:
        del joined, value
        raise InvalidOptionError(f"{said} one of the optimizers.")

    return property(read, write)


class JoinedOptimizer(Optimizer):
    """Several torch optimizers over disjoint parameters as one: all their parameter groups, one step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # `Optimizer.__init__` is not called: groups and states live in the members.
        if not optimizers:
            raise InvalidOptionError("optimizer=[]: give at least one optimizer.")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InvalidOptionError(
                    f"optimizer: expected torch.optim.Optimizer objects, got {type(optimizer).__name__}."
                )
        self.members = list(optimizers)
        ids = [id(p) for group in self.param_groups for p in group["params"]]
        if len(ids) != len(set(ids)):
            raise InvalidOptionError("optimizer=[...]: two of them hold the same parameter. Give each its own.")

    param_groups: Any = _of_members(
        "param_groups: set them on",
        lambda joined: [group for member in joined.members for group in member.param_groups],
    )
    state: Any = _of_members(
        "state: load it into",
        lambda joined: {p: state for member in joined.members for p, state in member.state.items()},
    )
    defaults: Any = _of_members("defaults: set them on", lambda own: own.members[0].defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let all members update their parameters; return the closure's result."""
        loss = None if closure is None else closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Empty the gradients of all members."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the members' states under `members`, with the groups of all of them."""
        states = [member.state_dict() for member in self.members]
        groups = [group for state in states for group in state["param_groups"]]
        return {"state": {}, "param_groups": groups, "members": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the members' states."""
        states = state_dict.get("members", [])
        if len(states) != len(self.members):
            raise InvalidOptionError(
                f"state of {len(states)} optimizers: {len(self.members)} were made private together. Load a state "
                "that they have saved."
            )
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        """Refuse hooks of the joined optimizer, whose members are stepped one by one."""
        if name.startswith("_optimizer_"):
            raise InvalidOptionError("hooks of several optimizers: register them on one of the optimizers.")
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.members))})"


class MemberOptimizer(WrappedOptimizer):
    """One of several optimizers of a private training; each is stepped, zeroed, scheduled and saved by itself.

    The first `step()` after a backward releases the gradients of all members at once and is the one entry in the
    account; it updates this member's parameters, and each other member's `step()` applies its part of that release.

    Privacy:
        One Gaussian mechanism for each draw, on the clipped sum over the parameters of all members together.

    Attributes:
        release: The private optimizer of all members, which draws noise and is accounted.

    Args:
        optimizer: The member's own optimizer.
        release: The private optimizer around a `JoinedOptimizer` that holds it.
    """

    def __init__(self, optimizer: Optimizer, release: DPOptimizer) -> None:
        super().__init__(optimizer)
        self.release = release
        self._rounds_applied = 0

    @property
    def account(self) -> CarriedAccount | None:  # type: ignore[override]  # set on the private optimizer alone
        """The account that travels with each member's state."""
        return self.release.account

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the logical batch if no member has, and update this member's parameters.

        Args:
            closure: Evaluates the model once, calls backward and returns the loss.

        Returns:
            What the closure returned, or None without one.

        Raises:
            MissingGradientError: If no clipped gradient was made since the last release, and this member has applied
                that one already.
        """
        loss = None if closure is None else evaluated(closure)
        release = self.release
        if release.is_idle and initialises_state(self.original_optimizer):
            release.apply_to(self.original_optimizer)
            return loss
        if self._rounds_applied == release.rounds or release.has_untaken_backward:
            release.begin_round()
        self._rounds_applied = release.rounds
        if release.round_has_released:
            release.apply_to(self.original_optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step, of all members, and this one's last release in `p.grad`.

        Args:
            set_to_none: Whether gradients become None or zeros, as in torch.
        """
        self.release.discard()
        self.original_optimizer.zero_grad(set_to_none=set_to_none)

    def _refuse_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that nobody clips, or that another member holds."""
        refuse_uncovered(self.release.clipper, parameters)
        existing = {id(p) for p in self.release.params}
        if any(id(p) in existing for p in parameters):
            raise InvalidOptionError("add_param_group: one of the optimizers holds one of these parameters already.")

    def __getattr__(self, name: str) -> Any:
        """Look up a missing attribute on the member's own optimizer, and then on the private one."""
        if "release" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original_optimizer if name in vars(self.original_optimizer) else self.release, name)


def release_of(optimizer: Any) -> Any:
    """Return what releases for an optimizer that `make_private` returned, also in a wrapping or a list of several."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, WrappedOptimizer):
        optimizer = inner
    if isinstance(optimizer, (list, tuple)) and optimizer and isinstance(optimizer[0], MemberOptimizer):
        return optimizer[0].release
    return optimizer.release if isinstance(optimizer, MemberOptimizer) else optimizer


def private_optimizer(optimizer: Any) -> DPOptimizer:
    """Return what releases, as `release_of` does; refuse an optimizer that is not private."""
    releasing = release_of(optimizer)
    if not isinstance(releasing, DPOptimizer):
        raise InvalidOptionError(
            f"optimizer: expected the one that make_private() returned, got {type(releasing).__name__}."
        )
    return releasing
