"""Store of clipped sums: in ``p.grad``, or, once a private optimizer owns them, where no optimizer sees them.

Before an attempt that may fail half-way a savepoint keeps them as they are.

The model's own ``zero_grad()`` must discard them, too; pickles of models name `_own_zero_grad` by this module.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.ranks import Gathering
from ghostclip.clipping.norms import SharedSamples
from ghostclip.errors import TamperedGradientError


def _own_zero_grad(model: nn.Module) -> Any:
    """Return the method `zero_grad` of a model's class, bound to it."""
    return types.MethodType(type(model).zero_grad, model)


class _DiscardingZeroGrad:
    """Replacement of a model's method ``zero_grad``; a copy or a pickle of the model has its own method instead."""

    def __init__(self, model: nn.Module, discard: Callable[[], Callable[[], None] | None]) -> None:
        self._model = model
        self._discard = discard

    def __call__(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard the clipped sums, and run the model's own ``zero_grad``."""
        discard = self._discard()
        if discard is not None:
            discard()
        _own_zero_grad(self._model)(set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_zero_grad, (self._model,)


class ZeroGrad:
    """Replaces a model's ``zero_grad`` by one that discards clipped sums, and restores it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._installed: _DiscardingZeroGrad | None = None

    def install(self, discard: Callable[[], Callable[[], None] | None]) -> None:
        """Make ``model.zero_grad()`` discard clipped sums, too."""
        # ``discard`` returns what discards them, or None once that is gone.
        self._installed = _DiscardingZeroGrad(self._model, discard)
        self._model.__dict__["zero_grad"] = self._installed

    def uninstall(self) -> None:
        """Restore the model's own method."""
        if self._installed is not None and self._model.__dict__.get("zero_grad") is self._installed:
            del self._model.__dict__["zero_grad"]
        self._installed = None


_FULL_PRECISION = (torch.float32, torch.float64)
# Elements of sums that may lie in one piece of memory, which is held until the last of them is released.
_SHARED: Final = 1 << 18


class Savepoint:
    """Context of an attempt, which can restore the state before it until it ends."""

    def __init__(self, *parts: Callable[[], None], forget: Callable[[], None]) -> None:
        """Hold functions that restore each part of the state, and one that ends the attempt."""
        self._parts = parts  # restore the state
        self._forget = forget

    def restore(self) -> None:
        for part in self._parts:
            part()

    def __enter__(self) -> Savepoint:
        return self

    def __exit__(self, *problem: object) -> None:
        self._forget()


class SumsBefore:
    """The clipped sums at a savepoint, each copied only when something is first added to it."""

    # That is at the end of a backward, when activations have made room, and never if memory runs out before.
    def __init__(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        self._sums = dict(sums)
        self._copies: dict[nn.Parameter, Tensor] = {}  # of sums that were added to since
        self.released = False  # whether the sums were released, so that nothing can be restored

    def before_change(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        """Copy an accumulator that something is about to be added to, if it is one of these."""
        if self._sums.get(parameter) is buffer and parameter not in self._copies:
            self._copies[parameter] = buffer.clone()

    def restored(self) -> dict[nn.Parameter, Tensor]:
        """Return the sums by parameter as they were at the savepoint."""
        self._sums.update(self._copies)
        self._copies.clear()
        return dict(self._sums)

    def give_up(self) -> None:
        """Drop the copies: the sums were released."""
        self.released = True
        self._sums.clear()
        self._copies.clear()


class Delivery(Protocol):
    """Delivery of the clipped sums of whole parameters to the ranks that have their parts."""

    # Every rank delivers every parameter once in a backward, in one order: a missing sum counts as zero.
    def delivers(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is divided among ranks, so that its sum is delivered."""

    def number(self, parameter: nn.Parameter) -> int:
        """Return a parameter's place in the order of delivery."""

    def add(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Add the sum of this rank's samples, of the whole parameter's shape; consumes it."""

    def send(self) -> None:
        """Start the reduce-scatters that are complete so far; the caller must not refer to the sums."""

    def order(self, *, at_once: bool) -> None:
        """Set whether sums may be sent before all are formed, for which ranks must form them in one order."""

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Send the rest, and return every trainable parameter with its sum over all ranks; called on all ranks."""

    def drop(self) -> None:
        """Discard what was not sent."""


class Sharded(Gathering, Protocol):
    """A model whose parameters are divided among several ranks."""

    @property
    def shares(self) -> Any:
        """How the ranks share each batch: a `ghostclip.distributed.sample_ranks.Shares`."""

    @property
    def shared_samples(self) -> SharedSamples | None:
        """The ranks that work on the same samples as this one; None where it has samples of its own."""

    @property
    def delivery(self) -> Delivery:
        """Delivery of clipped sums to the ranks that have the parts."""

    def compare_sums(self, sums: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Compare between ranks, after a proved forward, clipped sums of parameters that should be equal."""

    def rest(self) -> None:
        """Free gathered parameters, so that the model holds those that an optimizer refers to."""


class GradientStore:
    """Accumulators of the clipped sums, by parameter.

    Privacy:
        A sum without noise is never where another optimizer, a logger or a gradient scaler could use or change it:
        what is owned reaches ``p.grad`` as a release only, and who asks for it before is given a copy. What lay in
        ``p.grad`` before is not taken over: nothing tells whether it was changed there (through ``p.grad.data``,
        numpy or a view of its memory).
    """

    # Two modes. By default `p.grad` is the sum: a caller who sets it to None starts a new one (in a float32 buffer
    # beside it for 16-bit parameters). When a private optimizer owns the sums they stay here and `p.grad` is not
    # touched. Of parameters that ranks have in parts a backward makes the sums whole, and delivers each as soon as it
    # is complete: what stays here is this rank's part of the sum over all ranks.
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        present: Mapping[str, nn.Parameter] | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """Hold no sum yet, and leave sums to ``p.grad``."""
        # `present`: the parameters as the model computes with them, where some are in parts.
        self._present = parameters if present is None else present
        self._delivery = delivery
        self._whole: dict[nn.Parameter, Tensor] = {}  # sums of divided parameters in this backward, to be delivered
        self.owned = False  # whether a private optimizer owns the sums
        self.has_sum = False  # whether a backward has completed since the last `reset`
        self.samples_apart = False  # whether per-sample gradients are stored here too, for an exact release
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}  # accumulators that are held here
        self._versions: dict[nn.Parameter, int] = {}  # of ``p.grad`` when a backward had completed
        self._in_progress: dict[nn.Parameter, Tensor] = {}  # accumulators of the backward that runs
        self._sampled: set[nn.Parameter] = set()  # parameters with per-sample gradients in ``p.grad_sample``
        self._samples: dict[nn.Parameter, list[Tensor]] = {}  # those that are stored here
        self._kept: list[SumsBefore] = []  # savepoints in force
        # Their sums live in ``p.grad`` alone: whoever sets that to None has let go of them.
        self._shown: set[nn.Parameter] = set()

    def withhold(self, *, samples: bool) -> None:
        """Keep the sums here for a private optimizer from now on, with ``samples`` per-sample gradients as well."""
        self.owned, self.samples_apart = True, samples

    def buffer(self, name: str) -> tuple[Tensor, bool]:
        """Return a parameter's accumulator, and whether it is new: uninitialised, to be written at once."""
        parameter = self._parameters[name]
        if self._delivery is not None and self._delivery.delivers(parameter):
            return self._buffer_of_whole(name, parameter)
        # Later uses of a shared parameter in the same backward add to the same accumulator.
        buffer = self._in_progress.get(parameter)
        if buffer is not None:
            return buffer, False
        buffer = self._sums.get(parameter) if self.owned else self._free_buffer(parameter)
        is_new = buffer is None
        if buffer is None:
            buffer = self._new(parameter)
        for snapshot in self._kept:
            snapshot.before_change(parameter, buffer)
        self._in_progress[parameter] = buffer
        return buffer, is_new

    def add_several(self, names: Sequence[str], sums: Tensor) -> None:
        """Add the clipped sums ``(L, *P)`` of L parameters of one shape at once (foreach); consumes them."""
        # Where an optimizer owns the sums, slices of a small stack become accumulators: each keeps the stack alive.
        old: list[tuple[Tensor, Tensor]] = []
        new: list[tuple[Tensor, Tensor]] = []
        delivery, accumulators = self._delivery, self._sums
        become = self.owned and sums.numel() <= _SHARED
        for name, part in zip(names, sums.unbind(), strict=True):
            parameter = self._parameters[name]
            if delivery is not None and delivery.delivers(parameter):
                delivery.add(parameter, part)
                continue
            if become and accumulators.setdefault(parameter, part) is part:
                continue
            buffer, is_new = self.buffer(name)
            (new if is_new else old).append((buffer, part))
        if new:
            _torch.copy_all_(*zip(*new, strict=True))
        if old:
            _torch.add_all_(*map(list, zip(*old, strict=True)))

    def add(self, name: str, clipped_sum: Tensor) -> None:
        """Add the clipped sum of a parameter; consumes it, as it may become the accumulator."""
        parameter = self._parameters[name]
        if clipped_sum.is_contiguous() and self._lacks(parameter, clipped_sum.dtype):
            self._sums[parameter] = clipped_sum
            if not self.owned:
                parameter.grad = clipped_sum
            return
        buffer, is_new = self.buffer(name)
        if is_new:
            buffer.copy_(clipped_sum)
        else:
            buffer += clipped_sum

    def _lacks(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Return whether a parameter has no accumulator, and a tensor of this dtype may become it."""
        if self.owned:
            return parameter not in self._sums
        occupied = parameter.grad is not None or parameter in self._in_progress
        alike = parameter.dtype == dtype and dtype in _FULL_PRECISION and type(parameter) is nn.Parameter
        return alike and not occupied and not (self._delivery is not None and self._delivery.delivers(parameter))

    def _buffer_of_whole(self, name: str, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the accumulator for the whole of a divided parameter in this backward, and whether it is new."""
        whole = self._whole.get(parameter)
        if whole is not None:
            return whole, False
        here = _torch.local(self._present[name])
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        whole = self._whole[parameter] = torch.empty(here.shape, dtype=dtype, device=here.device)
        return whole, True

    def fits_at_once(self, elements: int) -> bool:
        """Return whether sums of so many elements may be formed together before they are delivered."""
        return self._delivery is None or elements <= _SHARED // 8

    def in_order(self, names: Sequence[str]) -> Sequence[str]:
        """Return parameters in the order in which their sums are delivered."""
        delivery = self._delivery
        return names if delivery is None else sorted(names, key=lambda name: delivery.number(self._parameters[name]))

    def complete(self, name: str) -> None:
        """Deliver a divided parameter's sum, as nothing more is added to it in this backward."""
        parameter = self._parameters[name]
        if self._delivery is not None and parameter in self._whole:
            self._delivery.add(parameter, self._whole.pop(parameter))
            self._delivery.send()

    def _finish_delivery(self, delivery: Delivery) -> None:
        """Finish the delivery, and add this rank's parts of the sums over all ranks to the accumulators."""
        for parameter in list(self._whole):
            delivery.add(parameter, self._whole.pop(parameter))
        for parameter, part in delivery.finish():
            before = self._sums.get(parameter) if self.owned else self._free_buffer(parameter)
            if before is None:
                self._sums[parameter] = part
                if not self.owned and parameter.dtype in _FULL_PRECISION:
                    parameter.grad = part
                continue
            for snapshot in self._kept:
                snapshot.before_change(parameter, before)
            _torch.local(before).add_(_torch.local(part))

    def drop_if(self, doubt: Tensor) -> None:
        """Zero every sum on the device where ``doubt`` is true, without reading it."""
        shown = {parameter: parameter.grad for parameter in self._shown if parameter.grad is not None}
        alike: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter, total in {**self._sums, **shown}.items():
            for snapshot in self._kept:
                snapshot.before_change(parameter, total)
            local = _torch.local(total)
            base = _torch.base_of(local)
            alike[id(local if base is None else base)].append(local)
        for parts in alike.values():
            base = _torch.base_of(parts[0])
            # Sums that were formed together are all that one tensor holds.
            whole = base is not None and len(parts) > 1 and sum(part.numel() for part in parts) == base.numel()
            for part in [base] if base is not None and whole else parts:
                part.masked_fill_(doubt.to(part.device), 0.0)

    def _free_buffer(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the accumulator behind ``p.grad``, float32 at least; None where the user has set that to None."""
        grad = parameter.grad
        if grad is None:
            return None
        if parameter.dtype in _FULL_PRECISION and grad.is_contiguous():
            return grad
        total = self._sums.get(parameter)
        if total is None or self._versions.get(parameter) != _torch.version(grad):
            total = grad.to(torch.promote_types(parameter.dtype, torch.float32)).contiguous().clone()
            self._sums[parameter] = total
        return total

    def _new(self, parameter: nn.Parameter) -> Tensor:
        """Make an uninitialised accumulator for a parameter."""
        dtype = parameter.dtype
        if dtype in _FULL_PRECISION and type(parameter) is nn.Parameter:
            # The quickest way, of which a small parameter notices a few microseconds.
            buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        else:
            wide = torch.promote_types(dtype, torch.float32)
            buffer = torch.empty(parameter.shape, dtype=wide, device=parameter.device)
        self._sums[parameter] = buffer
        if dtype in _FULL_PRECISION and not self.owned:
            parameter.grad = buffer
        return buffer

    def store_sample_gradients(self, name: str, grad_BP: Tensor) -> None:
        """Leave per-sample gradients ``(B, *P)`` in ``p.grad_sample``, a list once several backwards accumulate."""
        parameter = self._parameters[name]
        if self.samples_apart:
            self._samples.setdefault(parameter, []).append(grad_BP)
            parameter.grad_sample = None  # type: ignore[attr-defined]
            return
        before = getattr(parameter, "grad_sample", None) if parameter in self._sampled else None
        self._sampled.add(parameter)
        if before is None:
            parameter.grad_sample = grad_BP  # type: ignore[attr-defined]
        else:
            earlier = before if isinstance(before, list) else [before]
            parameter.grad_sample = [*earlier, grad_BP]  # type: ignore[attr-defined]

    def take_samples(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return a parameter's per-sample gradients of each backward since the last call, and drop them."""
        if self.samples_apart:
            return self._samples.pop(parameter, [])
        samples = getattr(parameter, "grad_sample", None)
        if samples is None:
            return []
        parameter.grad_sample = None  # type: ignore[attr-defined]
        return samples if isinstance(samples, list) else [samples]

    def drop_stale_samples(self) -> None:
        """Drop per-sample gradients of a finished batch before those of the next are formed."""
        if not self.has_sum:
            self._samples.clear()
        self._hide_samples([p for p in self._sampled if (not self.has_sum if self.owned else p.grad is None)])

    def drop_samples(self) -> None:
        """Drop the per-sample gradients in ``p.grad_sample``; what was summed of them stays."""
        self._hide_samples(list(self._sampled))

    def _hide_samples(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set ``p.grad_sample`` of parameters to None."""
        for parameter in parameters:
            self._sampled.discard(parameter)
            if getattr(parameter, "grad_sample", None) is not None:
                parameter.grad_sample = None  # type: ignore[attr-defined]

    def drop_unowned(self) -> None:
        """Drop float32 sums of 16-bit parameters whose ``p.grad`` the caller has set to None."""
        if self._sums and not self.owned:
            self._sums = {parameter: total for parameter, total in self._sums.items() if parameter.grad is not None}

    def finish(self) -> None:
        """Complete a backward: deliver, and round sums of 16-bit parameters into ``p.grad`` if nobody owns them."""
        self.has_sum = True
        self._in_progress.clear()
        if self._delivery is not None:
            self._finish_delivery(self._delivery)
        if self.owned:
            return
        rounded: list[tuple[Tensor, Tensor]] = []
        for parameter, total in self._sums.items():
            grad = parameter.grad
            if grad is total or (grad is None and parameter.dtype in _FULL_PRECISION):
                continue
            if grad is None:
                grad = parameter.grad = torch.empty_like(total, dtype=parameter.dtype)
            rounded.append((_torch.local(grad), _torch.local(total)))
        if rounded:
            _torch.copy_all_(*zip(*rounded, strict=True))
        for parameter in self._sums:
            if parameter.grad is not None:
                self._versions[parameter] = _torch.version(parameter.grad)
        shown = [parameter for parameter in self._sums if parameter.dtype in _FULL_PRECISION]
        self._shown.update(shown)
        if len(shown) == len(self._sums):
            self._sums.clear()
        else:
            self._sums = {parameter: total for parameter, total in self._sums.items() if parameter not in self._shown}

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, float32 at least; None when nothing contributed."""
        # A copy where the sum is owned, else the accumulator itself, unless `p.grad` was changed since the backward.
        if self.owned:
            total = self._sums.get(parameter)
            return None if total is None else total.clone()
        self._check(parameter)
        return parameter.grad if parameter in self._shown else self._sums.get(parameter)

    def without_sum(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters to whose sums, which an optimizer owns, nothing contributed."""
        # By identity: the hash of a tensor is worked out in Python.
        with_sum = set(map(id, self._sums))
        return [parameter for parameter in parameters if id(parameter) not in with_sum]

    def _check(self, parameter: nn.Parameter) -> None:
        """Refuse a ``p.grad`` that was exchanged or changed since the backward."""
        total, grad = self._sums.get(parameter), parameter.grad
        if total is None or grad is None:
            return
        stranger = parameter.dtype in _FULL_PRECISION and grad is not total
        if stranger or _torch.version(grad) != self._versions.get(parameter, _torch.version(grad)):
            name = next((key for key, value in self._parameters.items() if value is parameter), "?")
            raise TamperedGradientError(
                f"the gradient of parameter '{name}' was changed between backward and step. What is released must "
                "be the clipped sum: set max_grad_norm instead of clipping again, and let the private optimizer scale "
                "and accumulate."
            )

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the accumulators for a release, None where nothing contributed, and drop them."""
        by_id = {id(parameter): total for parameter, total in self._sums.items()}
        sums = [by_id.get(id(parameter)) for parameter in parameters]
        for snapshot in self._kept:
            snapshot.give_up()
        self._sums.clear()
        return sums

    def release_samples(self) -> None:
        """Delete ``grad_sample`` from the parameters."""
        for parameter in self._parameters.values():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def snapshot(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a repeatable function that restores the sums as they are now, and one that ends that.

        Cost:
            A copy of each sum that is added to before the end, on its device: the size of the trainable parameters.
        """
        assert self.owned, "an optimizer runs attempts"
        before, had_sum = SumsBefore(self._sums), self.has_sum
        self._kept.append(before)

        def restore() -> None:
            sums = before.restored()
            self.drop_samples()
            self.reset()
            self._sums.update(sums)
            self.has_sum = had_sum and not before.released

        return restore, lambda: self._kept.remove(before)

    def reset(self) -> None:
        """Drop all sums; what an owner has released into ``p.grad`` stays."""
        if not self.owned:
            for parameter in (*self._sums, *self._parameters.values()):
                parameter.grad = None
            self.drop_samples()
        self._samples.clear()
        self._in_progress.clear()
        self._whole.clear()
        if self._delivery is not None:
            self._delivery.drop()
        self._sums.clear()
        self._shown.clear()
        self._versions.clear()
        self.has_sum = False
