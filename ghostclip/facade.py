"""Facades that `PrivacyEngine` hands back in the place of a model and a criterion.

The objects hold no hooks and compute nothing: all of that is the clipper's.

`GradSampleModule` stands for the user's model; it and its base give access to the clipper under Opacus's names.

Criteria whose `loss.backward()` runs what the strategy has: two passes, or forward and backward as one graph.

With one graph, ``criterion(model(x), y).backward()`` stays as it is written: `model(x)` and `criterion(...)` only note
what is to be computed. Whoever looks at an output or a loss before gets its value, computed eagerly, and so is that
batch's backward.

Shape letter: B samples.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final, NoReturn, get_args
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip._validate import defaults, did_you_mean, takes
from ghostclip.clipper import GhostClipper, Strategy
from ghostclip.errors import (
    GhostClipError,
    InvalidOptionError,
    LossReductionError,
    UnsupportedError,
    UnsupportedModelError,
)
from ghostclip.graph import GraphStep
from ghostclip.graph.compiled import autocasts
from ghostclip.graph.takeover import Takeover
from ghostclip.rules import registry
from ghostclip.validation.fixers import ModuleValidator


class PrivateLoss:
    """Per-sample losses of one batch until `backward()` has clipped them; sums and multiples of losses are allowed.

    Privacy:
        `item()` and `detach()` show the exact loss, which is not a private quantity.
    """

    # Numbers may be added and multiplied, losses of the same batch added and subtracted.
    def __init__(self, clipper: GhostClipper, per_sample: torch.Tensor) -> None:
        self._clipper = clipper
        self.per_sample = per_sample

    def backward(self, *, retain_graph: bool | None = None) -> None:
        """Clip every sample's gradient and add their sum to `p.grad`; ``retain_graph`` as for a tensor's."""
        # No graph serves twice whatever was asked: a sample's gradient would be clipped in parts.
        self._clipper.backward(self.per_sample)

    def detach(self) -> torch.Tensor:
        """Return the reduced loss as a scalar tensor without a graph."""
        loss_B = self.per_sample.detach()
        return loss_B.mean() if self._clipper.loss_reduction == "mean" else loss_B.sum()

    def item(self) -> float:
        """Return the reduced loss as a number."""
        return self.detach().item()

    def cpu(self) -> torch.Tensor:
        """Return the value as `detach`, on the CPU, for a log."""
        return self.detach().cpu()

    @property
    def data(self) -> torch.Tensor:
        """The value, as `detach`."""
        return self.detach()

    def mean(self) -> PrivateLoss:
        """Return the loss itself where it is a mean over the samples, as of a criterion with reduction='none'."""
        if self._clipper.loss_reduction == "mean":
            return self
        raise LossReductionError(
            "mean() of the losses of a private criterion, of which loss_reduction='sum' was declared. Pass "
            "loss_reduction='mean', or call backward() on what the criterion returns."
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about the value (`torch.isnan(loss)`); refuse what would lead a gradient through it."""
        given = (tuple(args), dict(kwargs or {}))
        args, kwargs = _tree.mapped(lambda leaf: leaf.detach() if isinstance(leaf, PrivateLoss) else leaf, given)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
            return number_of(result)
        return result

    def _with(self, per_sample: torch.Tensor) -> PrivateLoss:
        """Return a loss of the same batch."""
        return PrivateLoss(self._clipper, per_sample)

    def _after(self, name: str, number: float) -> PrivateLoss:
        """Return the loss after an operation with a number."""
        return self._with(getattr(operator, name)(self.per_sample, number))

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __lt__(self, other: Any) -> bool:
        return self.item() < float(other)

    def __gt__(self, other: Any) -> bool:
        return self.item() > float(other)

    def __iter__(self) -> Iterator[Any]:
        raise LossReductionError(
            "the loss of a private criterion was handed to what takes tensors apart, as a GradScaler does. Leave it "
            "out, which bfloat16 does not need; `item()` and `detach()` return the value."
        )

    def __mul__(self, other: object) -> PrivateLoss:
        return self._after("mul", number_of(other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> PrivateLoss:
        return self._after("truediv", number_of(other))

    def __add__(self, other: object) -> PrivateLoss:
        if isinstance(other, PrivateLoss) and other.per_sample.shape == self.per_sample.shape:
            return self._with(self.per_sample + other.per_sample)
        return self._with(self.per_sample + number_of(other))

    __radd__ = __add__

    def __neg__(self) -> PrivateLoss:
        return self._with(-self.per_sample)

    def __sub__(self, other: object) -> PrivateLoss:
        return self + -(other if isinstance(other, PrivateLoss) else number_of(other))

    def __rsub__(self, other: object) -> PrivateLoss:
        return -self + other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.item():.4f}, samples={self.per_sample.shape[0]})"


def number_of(other: object) -> float:
    """Return a number that a loss may be added to or multiplied with; refuse any other operand."""
    if isinstance(other, (int, float)):
        return other
    raise LossReductionError(
        f"the loss of a private criterion was combined with a {type(other).__name__}. It holds one loss for each "
        "sample, and takes numbers and losses of the same criterion and batch. Compute further terms in the criterion, "
        "for each sample: make_private(criterion=...) takes any function that returns losses of shape (B,)."
    )


class _Wrapper:
    """Stands for a criterion: what it does not have itself is read and set there (`reduction`, `weight`, `to`, ...)."""

    def __init__(self, clipper: GhostClipper, criterion: Callable[..., Any]) -> None:
        self.clipper, self.criterion = clipper, criterion

    def __getattr__(self, name: str) -> Any:
        if "criterion" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.criterion, name)

    def __setattr__(self, name: str, value: Any) -> None:
        criterion = self.__dict__.get("criterion")
        if name in self.__dict__ or not hasattr(criterion, name):
            super().__setattr__(name, value)
        else:
            setattr(criterion, name, value)


class PrivateCriterion(_Wrapper):
    """Calls the user's criterion per sample."""

    # A module with a `reduction` (all of torch's losses) is asked for unreduced values, which are averaged or summed
    # over the positions of one sample as its own reduction says. Positions that equal its `ignore_index` count neither
    # in the sum nor in the divisor, so that a sample's loss never depends on another sample. For the same reason class
    # weights multiply, but the batch's total weight does not divide. Any other callable must return one loss per
    # sample.
    def __init__(self, clipper: GhostClipper, criterion: Callable[..., torch.Tensor]) -> None:
        reduction = getattr(criterion, "reduction", None)
        if reduction in ("mean", "sum") and reduction != clipper.loss_reduction:
            raise LossReductionError(
                f"criterion {type(criterion).__name__}(reduction={reduction!r}): the loss was declared with "
                f"loss_reduction={clipper.loss_reduction!r}. Say the same in both."
            )
        super().__init__(clipper, criterion)
        self._is_users = type(criterion).__module__ != nn.modules.loss.__name__
        self.deferral: Deferral | None = None  # None where losses are computed at once

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> PrivateLoss:
        """Return the loss of a batch; ``shape`` is `[B, T, ...]` of an output that was flattened to `[B·T, ...]`."""
        if self.deferral is not None:
            deferred = self.deferral.loss(args, kwargs if shape is None else {**kwargs, "shape": tuple(shape)})
            if deferred is not None:
                return deferred
            args, kwargs = resolved((args, kwargs))
        return PrivateLoss(self.clipper, self.per_sample(*args, shape=shape, **kwargs))

    def per_sample(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> torch.Tensor:
        """Return the losses of a batch's samples, `[B]`, from the criterion's arguments."""
        losses = self._losses(args, kwargs, shape)
        if self._is_users:
            self._note(losses, args, kwargs, shape)
        return losses

    def _note(self, losses: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int] | None) -> None:
        """Let the clipper know how losses were computed."""
        if shape is None:
            self.clipper.know_loss(
                losses, lambda *other, **named: self._losses(other, named, None), args, kwargs, criterion=self.criterion
            )
            return
        # Positions lie behind the samples for it, so that samples can be exchanged.
        flat = [
            isinstance(leaf, Tensor) and leaf.shape[:1] == (shape[0] * shape[1],)
            for leaf in _tree.leaves((args, kwargs))
        ]

        def changed(change: Callable[[Tensor], Tensor], arguments: Any) -> Any:
            numbers = iter(flat)
            return _tree.mapped(lambda leaf: change(leaf) if next(numbers) else leaf, arguments)

        def again(*args: Any, **kwargs: Any) -> torch.Tensor:
            samples = next(len(leaf) for leaf in itertools.compress(_tree.leaves((args, kwargs)), flat))
            args, kwargs = changed(lambda leaf: leaf.flatten(0, 1), (args, kwargs))
            return self._losses(args, kwargs, (samples, *shape[1:]))

        arguments = changed(lambda leaf: leaf.unflatten(0, shape[:2]), (args, kwargs))
        self.clipper.know_loss(losses, again, *arguments, criterion=self.criterion)

    def _losses(self, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int] | None) -> torch.Tensor:
        values = self._unreduced(args, kwargs)
        if not isinstance(values, torch.Tensor) or values.dim() == 0:
            raise LossReductionError(
                f"criterion {self._name()}: returned {values!r:.60}, not one loss per sample. Use a criterion whose "
                "`reduction` is all that reduces (one that adds up others has theirs), or one that returns a tensor "
                "whose first axis is the batch; or leave criterion= out: a mean over samples is clipped as it is."
            )
        keep = self._counted(values, args, kwargs)
        if shape is not None and values.shape[0] == shape[0] * shape[1]:
            values = values.reshape(shape[0], shape[1], *values.shape[1:])
            keep = None if keep is None else keep.reshape(values.shape)
        return self._per_sample(values, keep)

    def _unreduced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the criterion without its reduction, which is restored afterwards."""
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        reduction = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = reduction

    def _counted(self, values: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return a mask of the positions that count in a mean where the criterion ignores some, None if all count."""
        ignored = getattr(self.criterion, "ignore_index", None)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is None or not isinstance(target, torch.Tensor) or target.shape != values.shape:
            return None
        return target != ignored

    def _per_sample(self, values: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """Reduce unreduced losses `[B, ...]` over all axes but the batch."""
        if values.dim() == 1:
            return values
        axes = tuple(range(1, values.dim()))
        if self.clipper.loss_reduction == "sum":
            return values.sum(dim=axes)
        if keep is None:
            return values.mean(dim=axes)
        return values.sum(dim=axes) / keep.sum(dim=axes).clamp(min=1)

    def _name(self) -> str:
        """Return the criterion's name for messages."""
        return getattr(self.criterion, "__name__", type(self.criterion).__name__)


class KnownCriterion(_Wrapper):
    """A criterion of the user's own, which returns what it returns, and of which the clipper knows how."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the criterion returns."""
        loss = self.criterion(*args, **kwargs)
        if isinstance(loss, Tensor):
            self.clipper.know_loss(loss, self.criterion, args, kwargs, criterion=self.criterion)
        return loss


# Methods of a tensor that only say how it lies: noted, and computed with the rest.
_NOTED: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "float", "contiguous"}
)


class Deferral:
    """Defers calls of a private model and its criterion to one compiled step."""

    def __init__(self, clipper: GhostClipper, criterion: PrivateCriterion, takeover: Takeover) -> None:
        self._clipper, self._criterion = clipper, criterion
        self.step = GraphStep(clipper, self._losses, takeover=takeover)

    def defers(self, model: nn.Module) -> bool:
        """Return whether a call of the model is deferred."""
        return model.training and torch.is_grad_enabled() and self._clipper.attached

    def output(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredOutput:
        """Record a call of the model and return a deferred output."""
        return DeferredOutput(DeferredCall(self._clipper.model, tuple(args), dict(kwargs)))

    def per_sample(self, loss: DeferredLoss) -> Tensor:
        """Compute losses ``(B,)`` eagerly, with a graph."""
        args, kwargs = resolved(loss.given)
        return _changed(self._criterion.per_sample(*args, **kwargs), loss.changes)

    def loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredLoss | None:
        """Record a call of the criterion and return a deferred loss; None if the output is known or another model's."""
        arguments = tuple(args), dict(kwargs)
        leaves = _tree.leaves(arguments)
        calls = {leaf.call for leaf in leaves if isinstance(leaf, DeferredOutput)}
        call = calls.pop() if len(calls) == 1 else None
        if call is None or call.known or call.model is not self._clipper.model:
            return None
        return DeferredLoss(self, self._clipper, call, arguments, _Moment(self._clipper.model, leaves))

    def compute(self, loss: DeferredLoss) -> Tensor:
        """Compute a batch's losses ``(B,)`` and add its clipped sum."""
        call, paths, tensors = loss.call, [], list[Tensor]()

        def taken(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            return None if isinstance(leaf, Tensor) else leaf

        def noted(leaf: Any) -> Any:
            if not isinstance(leaf, DeferredOutput):
                return leaf
            paths.append(leaf.path)
            return f"{_HERE}{len(paths) - 1} {leaf.path and _tree.mapped(taken, leaf.path)!r}"

        # An output is a plain value among the arguments, and says how it is reached: graphs are compiled for these.
        arguments = _tree.mapped(noted, loss.given)
        self._paths, self.step.reads = paths, self._criterion.criterion
        for moment in (call.moment, loss.moment):
            moment.refuse_changes(self._clipper.model)
        with autocast(call.moment.autocast):
            beside = loss.changes, tensors, loss.moment.autocast
            losses_B, output = self.step(call.args, call.kwargs, arguments, beside)
        call.computed(output)
        return losses_B

    def _losses(self, model: nn.Module, args: Any, kwargs: Any, arguments: Any, beside: Any) -> tuple[Tensor, Any]:
        changes, tensors, casts = beside
        output, rest, paths = model(*args, **kwargs), iter(tensors), self._paths
        if tensors:
            paths = _tree.mapped(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, paths)
        with autocast(casts):
            positional, named = _from_values(arguments, lambda number: _followed(output, paths[number]))
            losses_B = self._criterion.per_sample(*positional, **named)
        return _changed(losses_B, changes), output if isinstance(output, Tensor) else None


def _changed(losses_B: Tensor, changes: Sequence[tuple[str, float]]) -> Tensor:
    """Apply the arithmetic that was done with a loss."""
    for name, number in changes:
        losses_B = getattr(operator, name)(losses_B, number)
    return losses_B


_HERE: Final = "\0output"


def _from_values(arguments: Any, value: Callable[[int], Any]) -> Any:
    def back(leaf: Any) -> Any:
        placed = isinstance(leaf, str) and leaf.startswith(_HERE)
        return value(int(leaf[len(_HERE) :].partition(" ")[0])) if placed else leaf

    return _tree.mapped(back, arguments)


_OFF: Final = (("cpu", False), ("cuda", False))


def autocast(states: Any) -> AbstractContextManager[Any]:
    """Return a context in which autocast is what it was, by type of device: a dtype, or False where it was off."""
    if states is _OFF and not _torch.any_autocast():
        return nullcontext()
    entered = ExitStack()
    for kind, dtype in states:
        entered.enter_context(torch.autocast(kind, dtype=dtype or None, enabled=bool(dtype)))
    return entered


class _Moment:
    """The state in which a call was written, which is computed later."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        # `leaves`: of the call's arguments.
        is_on = _torch.any_autocast()
        self.autocast: Any = autocasts(next(model.parameters()).device.type) if is_on else _OFF
        self._training = model.training
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions = _torch.versions(self._inputs)

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse a batch or a model that was changed since."""
        if model.training != self._training or _torch.versions(self._inputs) != self._versions:
            raise GhostClipError(
                "a tensor of the batch was changed in place, or the model's training mode, between a call and its "
                "backward(), which computes both as one graph. Change a copy, or do it after backward()."
            )


class DeferredCall:
    """A deferred call of the model."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = _tree.leaves((args, kwargs))
        if DeferredOutput in map(type, leaves):
            # Another private model's.
            args, kwargs = resolved((args, kwargs))
        self.model, self.args, self.kwargs = model, args, kwargs
        self.moment = _Moment(model, leaves)
        self.known = False  # whether its output was computed by itself, eagerly
        self._done = False
        self._value: Any = None

    def computed(self, value: Any) -> None:
        """Set the output that was computed with the backward, without a graph; None where it was not stored."""
        self._done, self._value = True, value

    def value(self) -> Any:
        """Return the output: computed now if it is unknown, without gradients after its backward."""
        if self._value is None:
            with torch.set_grad_enabled(not self._done and torch.is_grad_enabled()), autocast(self.moment.autocast):
                self._value = self.model(*self.args, **self.kwargs)
            self.known = not self._done
        return self._value


@_tree.leaf
class DeferredOutput:
    """Placeholder for the output of a private model until its loss goes backward."""

    # Attributes and items of it, and views of these, are placeholders too. Any other use computes it, eagerly if its
    # backward has not run. `path`: how it follows from the model's output.
    def __init__(self, call: DeferredCall, path: tuple[Any, ...] = ()) -> None:
        self.call, self.path = call, path

    def resolve(self) -> Any:
        """Return the value that it stands for."""
        return _followed(self.call.value(), self.path)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = _tree.mapped(_resolved, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredOutput(self.call, (*self.path, ("attribute", name)))

    def __getitem__(self, key: Any) -> Any:
        key = _tree.mapped(lambda one: torch.as_tensor(one) if isinstance(one, np.ndarray) else _resolved(one), key)
        return DeferredOutput(self.call, (*self.path, ("item", key)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value; a method that only changes a tensor's view is recorded."""
        args, kwargs = _tree.mapped(_resolved, (args, kwargs))
        method = self.path[-1] if self.path else ("", "")
        if method[0] == "attribute" and method[1] in _NOTED and not self.call.known:
            return DeferredOutput(self.call, (*self.path, ("call", (args, kwargs))))
        return self.resolve()(*args, **kwargs)

    __hash__ = object.__hash__


def _on_values(operation: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """Return a method that computes an operation on the values of its operands."""

    def method(*operands: Any) -> Any:
        return operation(*map(_resolved, reversed(operands) if reflected else operands))

    return method


_BUILT_IN: Final[tuple[Callable[..., Any], ...]] = (iter, len, bool, int, float, repr)
for _function in _BUILT_IN:
    setattr(DeferredOutput, f"__{_function.__name__}__", _on_values(_function))
for _name in ("index", "neg", "contains", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(DeferredOutput, f"__{_name}__", _on_values(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(DeferredOutput, f"__{_name}__", _on_values(getattr(operator, _name)))
    setattr(DeferredOutput, f"__r{_name}__", _on_values(getattr(operator, _name), reflected=True))


def _resolved(item: Any) -> Any:
    return item.resolve() if isinstance(item, DeferredOutput) else item


def resolved(tree: Any) -> Any:
    """Return nested containers with deferred outputs replaced by their values."""
    return _tree.mapped(_resolved, tree)


def _followed(value: Any, path: Sequence[Any]) -> Any:
    for kind, what in path:
        if kind == "attribute":
            value = getattr(value, what)
        elif kind == "item":
            value = value[what]
        else:
            value = value(*what[0], **what[1])
    return value


class DeferredLoss(PrivateLoss):
    """The losses of one batch, computed with its backward as `backward()` is called."""

    def __init__(
        self,
        deferral: Deferral,
        clipper: GhostClipper,
        call: DeferredCall,
        # arguments of the criterion, deferred outputs among them
        arguments: Any,
        moment: _Moment,
        # arithmetic on the loss: names of operators with numbers
        changes: tuple[tuple[str, float], ...] = (),
    ) -> None:
        self._deferral, self._clipper = deferral, clipper
        self.call, self.given, self.moment, self.changes = call, arguments, moment, changes
        self._computed: Tensor | None = None
        self._gone_back = False

    @property
    def per_sample(self) -> Tensor:  # type: ignore[override]
        """The losses, `[B]`: without a graph after `backward()`, computed eagerly before."""
        if self._computed is None:
            self._computed = self._deferral.per_sample(self)
        return self._computed

    def backward(self, *, retain_graph: bool | None = None) -> None:
        """Clip every sample's gradient and add their sum to `p.grad`; once only."""
        if self._gone_back:
            raise GhostClipError("a second backward() of the same loss: its samples would be clipped twice.")
        self._gone_back = True
        if self._computed is not None or self.call.known:
            self._clipper.backward(self.per_sample)
        else:
            self._computed = self._deferral.compute(self)

    def _after(self, name: str, number: float) -> PrivateLoss:
        if self._computed is not None:
            return super()._after(name, number)
        changes = (*self.changes, (name, number))
        return DeferredLoss(self._deferral, self._clipper, self.call, self.given, self.moment, changes)


_log = logging.getLogger(__name__)


SHARDED: Final = (
    "how a model is sharded over devices is no mode here. Shard it (fully_shard, parallelize_module), then choose a "
    "mode as on one device: grad_sample_mode='ghost' for two passes"
)
NO_OP: Final = (
    "it trains without clipping while the account goes on. Use the plain model and optimizer to compare with "
    "training without privacy"
)
REFUSED_MODES: Final = {"ghost_fsdp": SHARDED, "ghost_tp": SHARDED, "no_op": NO_OP}
"""Values of `grad_sample_mode` that are refused by name."""

_STRATEGY_OF: Final[dict[str, Strategy]] = {
    **{name: name for name in get_args(Strategy)},
    # Opacus's other ways to fill p.grad_sample; what is in it is the same.
    "functorch": "hooks",
    "ew": "hooks",
}
MODES: Final = tuple(_STRATEGY_OF)


def mode_of(grad_sample_mode: str, compile: bool | None) -> str:  # noqa: A002, FBT001 - torch's word
    """Return the mode that a choice about compiling stands for."""
    fits = {True: ("auto", "graph"), False: tuple(mode for mode in MODES if mode != "graph")}
    if compile is not None and grad_sample_mode in MODES and grad_sample_mode not in fits[compile]:
        raise InvalidOptionError(
            f'compile={compile} with grad_sample_mode={grad_sample_mode!r}: only "auto" leaves it open whether the '
            "step is compiled. Leave one of them out."
        )
    return "graph" if compile else grad_sample_mode


def strategy_of(grad_sample_mode: str) -> Strategy:
    """Return the strategy of a mode; Opacus's "functorch" and "ew" stand for "hooks"."""
    if grad_sample_mode in REFUSED_MODES:
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: {REFUSED_MODES[grad_sample_mode]}.")
    if grad_sample_mode not in _STRATEGY_OF:
        listed, meant = ", ".join(map(repr, MODES)), did_you_mean(grad_sample_mode, MODES, otherwise=".")
        raise InvalidOptionError(f"grad_sample_mode={grad_sample_mode!r}: must be one of {listed}{meant}")
    return _STRATEGY_OF[grad_sample_mode]


# Those that a facade was made for, so that an optimizer finds the clipper of its parameters.
_IN_USE: weakref.WeakSet[GhostClipper] = weakref.WeakSet()


def clipper_of(parameters: Sequence[nn.Parameter]) -> GhostClipper:
    """Return the clipper whose facade has an optimizer's parameters."""
    wanted = {id(p) for p in parameters if p.requires_grad}
    for clipper in _IN_USE:
        if wanted & {id(p) for p in clipper.trainable_parameters()}:
            return clipper
    raise InvalidOptionError(
        "optimizer: no GradSampleModule holds its parameters, so nobody clips their gradients. Wrap the model first "
        "(GradSampleModule(model)), pass clipper=, or use PrivacyEngine.make_private."
    )


class ClipperHandle:
    """The part of a facade that is about clipping.

    Attributes:
        clipper: The clipper, or None in a copy of a facade.
        GRAD_SAMPLERS: Registered samplers of gradients by module class.
        NORM_SAMPLERS: Registered samplers of norms by module class.
    """

    clipper: GhostClipper | None
    _hooks_enabled = True
    GRAD_SAMPLERS = registry.GRAD_SAMPLERS
    NORM_SAMPLERS = registry.NORM_SAMPLERS

    @property
    def batch_first(self) -> bool:
        """Whether the leading axis of the model's inputs is the batch; a copy, which has no clipper, does not say."""
        return self._attached().batch_first

    @property
    def loss_reduction(self) -> str:
        """The declared reduction of the loss, "mean" or "sum"; a copy, which has no clipper, does not say."""
        return self._attached().loss_reduction

    @property
    def max_grad_norm(self) -> float:
        """C, which the clip policy holds."""
        return self._attached().policy.max_grad_norm

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """Norm of every sample's whole gradient in the last backward, `[B]`. Not private."""
        return self._attached().per_sample_norms

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped."""
        return list(self._attached().trainable_parameters())

    @property
    def hooks_enabled(self) -> bool:
        """What `disable_hooks()` or `enable_hooks()` has said last; gradients are clipped until `remove_hooks()`."""
        return self._hooks_enabled and self.clipper is not None and self.clipper.attached

    def get_norm_sample(self) -> torch.Tensor:
        """Return the norms of the last backward.

        Returns:
            Shape `[B]`. Not private.
        """
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> torch.Tensor:
        """Return the share that the last backward kept of every sample's gradient.

        Returns:
            Shape `[B]`, or `[B, groups]`. Not private.
        """
        return self._attached().clip_coefficients

    def remove_hooks(self) -> None:
        """Detach the clipper from the model."""
        if self.clipper is not None:
            _IN_USE.discard(self.clipper)
            self.clipper.remove()

    cleanup = remove_hooks

    def set_grad_sample_to_none(self) -> None:
        """Drop the per-sample gradients of the last backward; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            p.grad_sample = None  # type: ignore[attr-defined]

    def del_grad_sample(self) -> None:
        """Take the attribute `grad_sample` off the parameters; the clipped sums stay."""
        for p in self._attached().trainable_parameters():
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def allow_grad_accumulation(self) -> None:
        """Nothing to allow: several backwards before a step are always possible, and accounted as what they are."""

    def forbid_grad_accumulation(self) -> None:
        """Nothing to forbid: k backwards before a step are accounted as what they are, and warned of."""

    def disable_hooks(self) -> None:
        """Warn that nothing is switched off; `hooks_enabled` is False from now on.

        Privacy:
            A gradient that is not clipped per sample never reaches a parameter while the model is private.
        """
        warnings.warn(
            "disable_hooks(): nothing is switched off. Evaluation and gradients of inputs leave no state; a backward "
            "to parameters is still clipped and counts. For gradients that are not private use to_standard_module(), "
            "or a copy of the model.",
            stacklevel=2,
        )
        self.__dict__["_hooks_enabled"] = False

    def enable_hooks(self) -> None:
        """Let `hooks_enabled` be True again; see `disable_hooks`."""
        self.__dict__["_hooks_enabled"] = True

    def add_hooks(self, *, strict: bool = True, force_functorch: bool = False) -> NoReturn:
        """Refuse to attach again: an optimizer holds on to the clipper that it was made with.

        Args:
            strict: As Opacus takes it.
            force_functorch: As Opacus takes it.

        Raises:
            InvalidOptionError: Always.
        """
        raise InvalidOptionError(
            "add_hooks(): a clipper is attached once, when the model is wrapped. After remove_hooks() make the model "
            "private again: engine.make_private, or GradSampleModule(model)."
        )

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Say whether a module can be clipped as far as its class tells.

        Args:
            module: The module.

        Returns:
            False for one that mixes samples.
        """
        return not cls.validate(module)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedError]:
        """Check a model for modules that mix samples; see `ghostclip.validate` for a check that runs it.

        Args:
            module: The model.
            strict: Raise what was found instead of returning it.

        Returns:
            One error for each module that cannot be trained privately.
        """
        return ModuleValidator.validate(module, strict=strict)

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """List the modules that own trainable parameters.

        Args:
            module: The model.

        Yields:
            The modules.
        """
        for part in module.modules():
            if any(p.requires_grad for p in part.parameters(recurse=False)):
                yield part

    def _attached(self) -> GhostClipper:
        if self.clipper is None:
            # A copy of a facade is the model alone, which has no such attribute.
            raise AttributeError("batch_first, loss_reduction and clipping belong to the original, not to a copy of it")
        return self.clipper


# Options of a clipper that a facade makes; `force_functorch` has no effect.
_WRAPPING: Final = defaults({"batch_first": True, "loss_reduction": "mean", "strict": True, "force_functorch": False})


def attached_clipper(
    m: nn.Module, options: dict[str, Any], *, strategy: Strategy = "hooks", max_grad_norm: float | None = None
) -> GhostClipper:
    """Attach a clipper; without a bound it clips nothing yet, or by 1 in two passes, and leaves plain gradients."""
    if options["strict"]:
        ModuleValidator.validate(m, strict=True)
    bound = math.inf if strategy in ("hooks", "auto", "bookkeeping") else 1.0
    clipper = GhostClipper(
        m, max_grad_norm=bound if max_grad_norm is None else max_grad_norm, strategy=strategy,
        batch_first=options["batch_first"], loss_reduction=options["loss_reduction"],
    )  # fmt: skip
    if max_grad_norm is None:
        clipper.leave_plain_gradients()
    return clipper


_PREFIX = "_module."
# Copies that were said to be ordinary models.
_TOLD: WeakSet[GradSampleModule] = WeakSet()


class GradSampleHooks(ClipperHandle):
    """Handle that `make_private(wrap_model=False)` returns instead of a model, and that ends the clipping."""

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, clipper: GhostClipper | None = None, options: dict[str, Any]) -> None:
        self._module = m
        self.clipper = clipper or attached_clipper(m, options)
        _IN_USE.add(self.clipper)


class GradSampleModule(ClipperHandle, nn.Module):
    """Stands for a model whose gradients are clipped per sample.

    Every attribute is the model's own (`config`, `generate`, `save_pretrained`, a submodule by its name), assignments
    reach the model, and `state_dict()` has the model's keys unchanged. States with Opacus's `_module.` prefix load too.
    A copy (as an exponential moving average makes one) or a pickle carries the model alone: its `clipper` is None.

    Without a clipper it makes one that leaves every sample's gradient in `p.grad_sample` and, until a private optimizer
    takes them over, in `p.grad` what autograd computes.

    Args:
        m: The model.
        clipper: The clipper attached to the model already; it says what the options do.
        options: `batch_first`, whether the leading axis of the model's inputs is the batch; `loss_reduction`, "mean" or
            "sum", as the loss is reduced over the batch; `strict`, whether modules that `ModuleValidator` finds are
            refused at once (what cannot be clipped exactly is refused when it runs, whatever this says);
            `force_functorch`, of no effect: per-sample gradients are the same however they are formed.

    Example:
        >>> wrapped = ghostclip.GradSampleModule(model)
        >>> criterion(wrapped(x), y).backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([8, 8, 4])
    """

    # A context of every private forward, one of every forward, which sees its errors, and what lets the model and its
    # criterion compute forward, loss and backward as one graph, once that takes over.
    around: Callable[[], AbstractContextManager[None]] | None
    watch: Callable[[], AbstractContextManager[None]] | None
    deferral: Deferral | None

    @takes(*_WRAPPING)
    def __init__(self, m: nn.Module, *, clipper: GhostClipper | None = None, options: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["clipper"] = attached = clipper or attached_clipper(m, options)
        _IN_USE.add(attached)
        self.__dict__["deferral"] = self.__dict__["around"] = self.__dict__["watch"] = None
        self.train(m.training)
        self.add_module("_module", m)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            *args: The model's own arguments.
            **kwargs: The model's own keyword arguments.

        Returns:
            What the model returns.
        """
        if self.deferral is not None and self.deferral.defers(self):
            return self.deferral.output(args, kwargs)
        if self.clipper is None and self.training and torch.is_grad_enabled() and self not in _TOLD:
            _TOLD.add(self)
            _log.warning(
                "a copy of a private %s is an ordinary model: no clipper is attached to it, and what trains it is not "
                "private",
                type(self._module).__name__,
            )
        clips = self.clipper is not None and self.clipper.attached and self.training and torch.is_grad_enabled()
        around = self.around if clips else None
        with (self.watch or nullcontext)(), (around or nullcontext)():
            return self._module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step, per-sample gradients included.

        Args:
            set_to_none: Whether gradients become None or zeros, as in torch.
        """
        self._module.zero_grad(set_to_none)
        for p in self._module.parameters():
            if getattr(p, "grad_sample", None) is not None:
                p.grad_sample = None

    @property
    def compile(self) -> Any:
        """The model's own `compile`: it runs as it is while the clipper is attached, and compiled without."""
        return self._module.compile

    def to_standard_module(self) -> nn.Module:
        """Detach the clipper and return the model as it was.

        Returns:
            The model.
        """
        self.remove_hooks()
        return self._module

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state under the model's own keys.

        Args:
            destination: Where to add it, as torch takes it.
            prefix: What every key begins with.
            keep_vars: Whether tensors stay attached to the graph.

        Returns:
            The state.
        """
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load a state with the model's own keys, or with Opacus's `_module.` prefix.

        Args:
            state_dict: The state.
            strict: Whether missing or unexpected keys are an error.
            assign: Whether tensors are taken over instead of copied into.

        Returns:
            Missing and unexpected keys, as torch returns them.
        """
        state = {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}
        return self._module.load_state_dict(state, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        """Look up on the model the attributes that the facade lacks."""
        module = _torch.child_of(self, "_module")
        if module is None:
            raise AttributeError(name)
        return module if name == "_module" else getattr(module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return a part of a model that is a container of modules."""
        return self._module[key]

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign to the model; a layer or parameter set here would neither be run nor clipped."""
        # What wraps a method of the facade (a `forward` under autocast, a compiled call) stays with the facade: on the
        # model it would call itself.
        if name == "__class__":
            raise UnsupportedModelError(
                f"{value.__name__} in place of a private model's class: a model is divided (fully_shard) before its "
                "optimizer is made. Divide the model, build the optimizer from its parameters, then call make_private."
            )
        on_facade = name in self.__dict__ or name == "training" or _is_method(type(self), name)
        if on_facade or getattr(value, "__self__", None) is self or _torch.child_of(self, "_module") is None:
            super().__setattr__(name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __getstate__(self) -> dict[str, Any]:
        """Leave the clipper out of copies and pickles: a second model must not write into the first one's sums."""
        return {**super().__getstate__(), "clipper": None, "deferral": None, "around": None, "watch": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _is_method(kind: type, name: str) -> bool:
    """Return whether a class defines a name itself, as anything but a property."""
    return hasattr(kind, name) and not isinstance(getattr(kind, name), property)


def _with_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put our keys where torch looks for them when the module is part of another one."""
    inside = prefix + _PREFIX
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(inside)]:
        state_dict[inside + key[len(prefix) :]] = state_dict.pop(key)
