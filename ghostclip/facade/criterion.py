"""Criteria whose `loss.backward()` runs what the strategy has: two passes, or forward and backward as one graph.

With one graph, ``criterion(model(x), y).backward()`` stays as it is written: `model(x)` and `criterion(...)` only note
what is to be computed. Whoever looks at an output or a loss before gets its value, computed eagerly, and so is that
batch's backward.

Shape letters: B samples, `...` positions of one sample.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.errors import GhostClipError, LossReductionError
from ghostclip.graph import GraphStep
from ghostclip.graph.guards import autocasts
from ghostclip.graph.takeover import Takeover

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper


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
