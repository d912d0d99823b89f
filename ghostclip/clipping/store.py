"""Store of clipped sums: in ``p.grad``, or, once a private optimizer owns them, where no optimizer sees them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.gathering import Gathering
from ghostclip.clipping.norms import SharedSamples
from ghostclip.clipping.savepoint import SumsBefore
from ghostclip.errors import TamperedGradientError

_FULL_PRECISION = (torch.float32, torch.float64)
# Elements of sums that may lie in one piece of memory, which is held until the last of them is released.
_SHARED: Final = 1 << 18


class Delivery(Protocol):
    """Brings the clipped sums of whole parameters to the ranks that hold their parts.

    Every rank delivers every parameter once in a backward, in one order: what a rank has no sum of counts as zero.
    """

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is held in parts.

        Args:
            parameter: As an optimizer holds it.

        Returns:
            True if so.
        """

    def number(self, parameter: nn.Parameter) -> int:
        """Return when the turn of a parameter comes.

        Args:
            parameter: As an optimizer holds it.

        Returns:
            A number that is the lower the earlier.
        """

    def add(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Take the sum of this rank's samples.

        Args:
            parameter: As an optimizer holds it.
            whole: Shape of the whole parameter; not used any more by who calls.
        """

    def send(self) -> None:
        """Send the sums whose turn it is; who calls holds none of them."""

    def order(self, *, at_once: bool) -> None:
        """Say whether sums may be sent before all are formed: ranks must form them in one order then.

        Args:
            at_once: Whether they may.
        """

    def finish(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Send what is left; called on all ranks.

        Returns:
            Every trainable parameter with the sum over all ranks, placed as the parameter is.
        """

    def drop(self) -> None:
        """Forget what was not sent."""


class Sharded(Gathering, Protocol):
    """A model whose parameters are held in parts by several ranks."""

    @property
    def shares(self) -> Any:
        """How the ranks share each batch: a `ghostclip.distributed.Shares`."""

    @property
    def shared_samples(self) -> SharedSamples | None:
        """The ranks that work on the same samples as this one; None where it has samples of its own."""

    @property
    def delivery(self) -> Delivery:
        """What brings clipped sums to the ranks that hold the parts."""

    def look_at(self, sums: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Compare, after a forward that was proved, the clipped sums of parameters that ranks should have alike.

        Args:
            sums: Returns this rank's sums by name, None where there is none.
        """

    def rest(self) -> None:
        """See to it that the model has the parameters that an optimizer holds."""


class GradientStore:
    """Accumulators of the clipped sums, by parameter.

    Two modes. By default ``p.grad`` is the truth: a caller who sets it to None starts a new sum (in a float32 buffer
    beside it for 16-bit parameters). When a private optimizer *owns* the sums they stay here and ``p.grad`` is not
    touched.

    Privacy:
        A sum without noise is never where another optimizer, a logger or a gradient scaler could use or change it:
        what is owned reaches ``p.grad`` as a release only, and who asks for it before is given a copy. What lay in
        ``p.grad`` before is not taken over: nothing tells whether it was changed there (through ``p.grad.data``,
        numpy or a view of its memory).

    Of parameters that ranks hold in parts a backward makes the sums whole, and delivers each as soon as it is complete:
    what stays here is this rank's part of the sum over all ranks.

    Attributes:
        owned: Whether a private optimizer owns the sums.
        has_sum: Whether a backward has completed since the last `reset`.
        samples_apart: Whether per-sample gradients are kept here too, as what is released is formed of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        present: Mapping[str, nn.Parameter] | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            parameters: Parameters by name; read when a sum is asked for.
            present: The same as the model computes with them, where some are held in parts.
            delivery: Brings sums to the ranks that hold the parts.
        """
        self._present = parameters if present is None else present
        self._delivery = delivery
        self._whole: dict[nn.Parameter, Tensor] = {}
        self.owned = False
        self.has_sum = False
        self.samples_apart = False
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}
        self._in_progress: dict[nn.Parameter, Tensor] = {}
        self._sampled: set[nn.Parameter] = set()
        self._samples: dict[nn.Parameter, list[Tensor]] = {}
        self._kept: list[SumsBefore] = []
        # Their sums live in ``p.grad`` alone: whoever sets that to None has let go of them.
        self._shown: set[nn.Parameter] = set()

    def own(self, *, samples: bool) -> None:
        """Let an optimizer own the sums from now on; there must be none in ``p.grad``.

        Args:
            samples: Whether it owns per-sample gradients too.
        """
        self.owned, self.samples_apart = True, samples

    def buffer(self, name: str) -> tuple[Tensor, bool]:
        """Return the accumulator of a parameter, and whether it is new.

        Args:
            name: The parameter's name.

        Returns:
            float32 or float64, contiguous, holding the sum so far; or, where there is none yet, whatever its memory
            held, to be written at once.
        """
        parameter = self._parameters[name]
        if self._delivery is not None and self._delivery.takes(parameter):
            return self._buffer_of_whole(name, parameter)
        # Later uses of a shared parameter in the same backward add to the same accumulator.
        buffer = self._in_progress.get(parameter)
        if buffer is not None:
            return buffer, False
        buffer = self._sums.get(parameter) if self.owned else self._free_buffer(parameter)
        is_new = buffer is None
        if buffer is None:
            buffer = self._new(parameter)
        for kept in self._kept:
            kept.before_change(parameter, buffer)
        self._in_progress[parameter] = buffer
        return buffer, is_new

    def add_several(self, names: Sequence[str], sums: Tensor) -> None:
        """Add the clipped sums of several parameters of one shape.

        Args:
            names: Their names.
            sums: Shape ``(L, *P)``, float32 or float64, contiguous, not used any more by who calls; small ones become
                the accumulators where an optimizer owns these.
        """
        old: list[tuple[Tensor, Tensor]] = []
        new: list[tuple[Tensor, Tensor]] = []
        delivery, held = self._delivery, self._sums
        become = self.owned and sums.numel() <= _SHARED
        for name, part in zip(names, sums.unbind(), strict=True):
            parameter = self._parameters[name]
            if delivery is not None and delivery.takes(parameter):
                delivery.add(parameter, part)
                continue
            if become and held.setdefault(parameter, part) is part:
                continue
            buffer, is_new = self.buffer(name)
            (new if is_new else old).append((buffer, part))
        if new:
            _torch.copy_all_(*zip(*new, strict=True))
        if old:
            _torch.add_all_(*map(list, zip(*old, strict=True)))

    def add(self, name: str, own: Tensor) -> None:
        """Add the clipped sum of a parameter.

        Args:
            name: Its name.
            own: Shape of the parameter, float32 or float64, not used any more by who calls: it becomes the accumulator
                where there is none yet.
        """
        parameter = self._parameters[name]
        if own.is_contiguous() and self._lacks(parameter, own.dtype):
            self._sums[parameter] = own
            if not self.owned:
                parameter.grad = own
            return
        buffer, is_new = self.buffer(name)
        if is_new:
            buffer.copy_(own)
        else:
            buffer += own

    def _lacks(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Return whether a parameter has no accumulator yet, and a tensor of a dtype may become it."""
        if self.owned:
            return parameter not in self._sums
        held = parameter.grad is not None or parameter in self._in_progress
        alike = parameter.dtype == dtype and dtype in _FULL_PRECISION and type(parameter) is nn.Parameter
        return alike and not held and not (self._delivery is not None and self._delivery.takes(parameter))

    def _buffer_of_whole(self, name: str, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        whole = self._whole.get(parameter)
        if whole is not None:
            return whole, False
        here = _torch.local(self._present[name])
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        whole = self._whole[parameter] = torch.empty(here.shape, dtype=dtype, device=here.device)
        return whole, True

    def takes_at_once(self, elements: int) -> bool:
        """Return whether the sums of several parameters may be formed together: not where each is sent on at once.

        Args:
            elements: Of all of them.

        Returns:
            True if so.
        """
        return self._delivery is None or elements <= _SHARED // 8

    def in_order(self, names: Sequence[str]) -> Sequence[str]:
        """Return parameters in the order in which their sums are wanted.

        Args:
            names: Their names.

        Returns:
            As they came, or as they are sent on.
        """
        delivery = self._delivery
        return names if delivery is None else sorted(names, key=lambda name: delivery.number(self._parameters[name]))

    def complete(self, name: str) -> None:
        """Note that nothing will be added to a parameter's sum any more in this backward.

        Args:
            name: The parameter's name.
        """
        parameter = self._parameters[name]
        if self._delivery is not None and parameter in self._whole:
            self._delivery.add(parameter, self._whole.pop(parameter))
            self._delivery.send()

    def _take_in(self, delivery: Delivery) -> None:
        """Add this rank's parts of the sums over all ranks to what was accumulated."""
        for parameter in list(self._whole):
            delivery.add(parameter, self._whole.pop(parameter))
        for parameter, part in delivery.finish():
            before = self._sums.get(parameter) if self.owned else self._free_buffer(parameter)
            if before is None:
                self._sums[parameter] = part
                if not self.owned and parameter.dtype in _FULL_PRECISION:
                    parameter.grad = part
                continue
            for kept in self._kept:
                kept.before_change(parameter, before)
            _torch.local(before).add_(_torch.local(part))

    def drop_if(self, doubt: Tensor) -> None:
        """Make every sum zero where something is true, without asking whether it is.

        Args:
            doubt: One bool.
        """
        shown = {parameter: parameter.grad for parameter in self._shown if parameter.grad is not None}
        alike: defaultdict[int, list[Tensor]] = defaultdict(list)
        for parameter, held in {**self._sums, **shown}.items():
            for kept in self._kept:
                kept.before_change(parameter, held)
            own = _torch.local(held)
            base = _torch.base_of(own)
            alike[id(own if base is None else base)].append(own)
        for parts in alike.values():
            base = _torch.base_of(parts[0])
            # Sums that were formed together are all that one tensor holds.
            whole = base is not None and len(parts) > 1 and sum(part.numel() for part in parts) == base.numel()
            for part in [base] if base is not None and whole else parts:
                part.masked_fill_(doubt.to(part.device), 0.0)

    def _free_buffer(self, parameter: nn.Parameter) -> Tensor | None:
        grad = parameter.grad
        if grad is None:
            return None
        if parameter.dtype in _FULL_PRECISION and grad.is_contiguous():
            return grad
        kept = self._sums.get(parameter)
        if kept is None or self._versions.get(parameter) != _torch.version(grad):
            kept = grad.to(torch.promote_types(parameter.dtype, torch.float32)).contiguous().clone()
            self._sums[parameter] = kept
        return kept

    def _new(self, parameter: nn.Parameter) -> Tensor:
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

    def keep_sample_gradients(self, name: str, grad_BP: Tensor) -> None:
        """Leave materialised per-sample gradients in ``p.grad_sample`` (a list once several backwards accumulate).

        Args:
            name: The parameter's name.
            grad_BP: Shape ``(B, *P)``, P the parameter's, float32 or float64.
        """
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
        """Return the per-sample gradients of each backward since they were last taken, and let go of them.

        Args:
            parameter: The parameter.

        Returns:
            Shape ``(B, *P)`` each.
        """
        if self.samples_apart:
            return self._samples.pop(parameter, [])
        found = getattr(parameter, "grad_sample", None)
        if found is None:
            return []
        parameter.grad_sample = None  # type: ignore[attr-defined]
        return found if isinstance(found, list) else [found]

    def drop_stale_samples(self) -> None:
        """Drop per-sample gradients of a batch that is over, before those of the next are formed beside them."""
        if not self.has_sum:
            self._samples.clear()
        self._hide_samples([p for p in self._sampled if (not self.has_sum if self.owned else p.grad is None)])

    def drop_samples(self) -> None:
        """Drop the per-sample gradients in ``p.grad_sample``; what was summed of them stays."""
        self._hide_samples(list(self._sampled))

    def _hide_samples(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self._sampled.discard(parameter)
            if getattr(parameter, "grad_sample", None) is not None:
                parameter.grad_sample = None  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Note that a backward is complete: sums of 16-bit parameters that nobody owns are shown in ``p.grad``."""
        self.has_sum = True
        self._in_progress.clear()
        if self._delivery is not None:
            self._take_in(self._delivery)
        if self.owned:
            return
        rounded: list[tuple[Tensor, Tensor]] = []
        for parameter, kept in self._sums.items():
            grad = parameter.grad
            if grad is kept or (grad is None and parameter.dtype in _FULL_PRECISION):
                continue
            if grad is None:
                grad = parameter.grad = torch.empty_like(kept, dtype=parameter.dtype)
            rounded.append((_torch.local(grad), _torch.local(kept)))
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
            self._sums = {parameter: kept for parameter, kept in self._sums.items() if parameter not in self._shown}

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, float32 at least; None when nothing contributed.

        Args:
            parameter: The parameter.

        Returns:
            Shape of the parameter: a copy where the sum is owned, else the accumulator itself.

        Raises:
            TamperedGradientError: ``p.grad``, which holds the sum where nobody owns it, was changed since the backward.
        """
        if self.owned:
            kept = self._sums.get(parameter)
            return None if kept is None else kept.clone()
        self._check(parameter)
        return parameter.grad if parameter in self._shown else self._sums.get(parameter)

    def without_sum(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters to whose sums, which an optimizer owns, nothing contributed.

        Args:
            parameters: Some parameters.

        Returns:
            Those of them.
        """
        # By identity: the hash of a tensor is worked out in Python.
        held = set(map(id, self._sums))
        return [parameter for parameter in parameters if id(parameter) not in held]

    def _check(self, parameter: nn.Parameter) -> None:
        kept, grad = self._sums.get(parameter), parameter.grad
        if kept is None or grad is None:
            return
        stranger = parameter.dtype in _FULL_PRECISION and grad is not kept
        if stranger or _torch.version(grad) != self._versions.get(parameter, _torch.version(grad)):
            name = next((key for key, value in self._parameters.items() if value is parameter), "?")
            message = (
                f"the gradient of parameter '{name}' was changed between backward and step. What is released must "
                "be the clipped "
                "sum: set max_grad_norm instead of clipping again, and let the private optimizer scale and accumulate."
            )
            raise TamperedGradientError(message)

    def hand_over(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums, which an owner turns into its release, and let go of them all.

        Args:
            parameters: Whose.

        Returns:
            The accumulators themselves, None where nothing contributed.
        """
        held = {id(parameter): own for parameter, own in self._sums.items()}
        sums = [held.get(id(parameter)) for parameter in parameters]
        for kept in self._kept:
            kept.give_up()
        self._sums.clear()
        return sums

    def release_samples(self) -> None:
        """Take ``grad_sample`` off the parameters."""
        for parameter in self._parameters.values():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def snapshot(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what puts the sums, which an optimizer owns, back as they are now, and what ends that.

        Returns:
            A function that may be called repeatedly, and one that lets go of what is kept for it.

        Cost:
            A copy of each sum that is added to before the end, on its device: the size of the trainable parameters.
        """
        assert self.owned, "an optimizer runs attempts"
        kept, had_sum = SumsBefore(self._sums), self.has_sum
        self._kept.append(kept)

        def restore() -> None:
            sums = kept.put_back()
            self.drop_samples()
            self.reset()
            self._sums.update(sums)
            self.has_sum = had_sum and not kept.released

        return restore, lambda: self._kept.remove(kept)

    def reset(self) -> None:
        """Forget all sums; of an owner, its release in ``p.grad`` and ``p.grad_sample`` stay until it drops them."""
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
