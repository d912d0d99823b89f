"""Gates that are closed: what a model multiplies by zero, or by a number that has not learned yet, shows nothing.

``x + gate * x.mean(0)`` keeps samples apart as long as the gate is zero, be it a parameter (ReZero, LayerScale, a
projection or an adapter that starts at zero), a buffer, or a number that a schedule changes; the graph is the same
before and after. To see what lies behind, a forward is run with every gate open: a parameter, a buffer or another
tensor of a module that holds one value everywhere holds others, and zeros among the factors of sums and products are
one half. Samples that are computed by themselves stay so whatever these values are.

The samples that are replaced are *loud* in these runs, several times as large as any of the batch may be: what only the
largest of all decides (one scale for the whole batch, a threshold) would be the same for copies of samples that stay.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch

# Each with the places and names of its factors. ``beta`` is none of them: what it multiplies may never have been set.
_FACTORS: Final[dict[str, tuple[Sequence[int], Sequence[str]]]] = {
    "mul": ((0, 1), ()),
    "lerp": ((2,), ("weight",)),
    "add": ((), ("alpha",)),
    "sub": ((), ("alpha",)),
    "rsub": ((), ("alpha",)),
    "addcmul": ((), ("value",)),
    "addcdiv": ((), ("value",)),
    "addmm": ((), ("alpha",)),
    "addmv": ((), ("alpha",)),
    "addbmm": ((), ("alpha",)),
    "baddbmm": ((), ("alpha",)),
}
_OPEN: Final = 0.5


class OpenGates(_torch.DispatchMode):
    """While it is entered, the gates of a model are open: see the module's docstring."""

    def __init__(self, model: nn.Module) -> None:
        # What the model holds is put back at the end, without a trace in its tensors' versions.
        super().__init__()
        self._model = model
        # makes rows of a table, which were looked up by ids, louder where they are of samples that are to be
        self.louder: Callable[[Tensor, Tensor], Tensor] | None = None
        self._closed: list[tuple[Tensor, Tensor, float, int]] = []

    def __enter__(self) -> "OpenGates":
        """Open them."""
        for number, tensor in enumerate(_tensors_of(self._model)):
            # In place, unseen by graphs that keep it: it is put back before their backward.
            part = _torch.part_of(tensor).data
            value = _only_value(part)
            if value is not None:
                part.copy_(_others(part, value, seed=number))
                self._closed.append((tensor, part, value, _torch.version(tensor)))
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        """Close them."""
        super().__exit__(*problem)
        self._close(self._closed)

    def leave_written(self) -> bool:
        """Close gates that the forward writes to, and which another run would find as they were; return whether any."""
        written = [gate for gate in self._closed if _torch.version(gate[0]) != gate[-1]]
        self._closed = [gate for gate in self._closed if _torch.version(gate[0]) == gate[-1]]
        self._close(written)
        return bool(written)

    @staticmethod
    def _close(gates: Sequence[tuple[Tensor, Tensor, float, int]]) -> None:
        for _, part, value, _ in gates:
            part.fill_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation, with factors that are zero opened."""
        indices, names = _FACTORS.get(func.overloadpacket.__name__.rstrip("_"), ((), ()))
        if indices:
            args = tuple(_opened(value) if index in indices else value for index, value in enumerate(args))
        if names and kwargs:
            kwargs = {name: _opened(value) if name in names else value for name, value in kwargs.items()}
        result = func(*args, **(kwargs or {}))
        if self.louder is not None and func.overloadpacket is torch.ops.aten.embedding:
            return self.louder(result, args[1])
        return result


def _opened(factor: Any) -> Any:
    if isinstance(factor, Tensor):
        is_number = factor.dim() == 0 and factor.is_floating_point()
        return torch.where(factor == 0, _OPEN, factor) if is_number else factor
    # Not the 0 of `x.sum() * 0`, which stands in code for a zero of x's kind.
    return _OPEN if isinstance(factor, float) and factor == 0 else factor


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Go through what a model's modules hold, each tensor once."""
    seen = set[int]()
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    for tensor in (*model.parameters(), *model.buffers(), *attributes):
        plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_inference()
        plain = plain and tensor.device.type != "meta" and not _torch.is_wrapped(tensor)
        if id(tensor) not in seen and plain and tensor.element_size() > 1:
            seen.add(id(tensor))
            yield tensor


def _only_value(tensor: Tensor) -> float | None:
    """Return the one finite value that a tensor holds everywhere; None where there is none."""
    if not tensor.numel() or 0 in tensor.stride():
        return None
    first, last = (float(tensor[(index,) * tensor.dim()]) for index in (0, -1))
    if first != last:
        return None
    least, most = torch.aminmax(tensor)
    return first if float(least) == float(most) and abs(first) < float("inf") else None


def _others(like: Tensor, value: float, *, seed: int) -> Tensor:
    """Return values that differ from one and, of a vector, lie on one side of it: a variance stays positive."""
    # A product of numbers for each place along every axis, so that next to nothing is drawn. A matrix adds up as many
    # as it has columns: its entries have both signs, and are smaller the more there are.
    generator = torch.Generator().manual_seed(seed)
    off = torch.full((), 0.5 * max(1.0, abs(value)))
    for axis, size in enumerate(like.shape):
        drawn = torch.rand(size, generator=generator) + 0.5
        if like.dim() > 1 and axis:
            drawn = torch.where(torch.rand(size, generator=generator) < 0.5, -drawn, drawn) / size**0.5
        off = off.to(like.device) * drawn.to(like.device).view(
            [size if axis == one else 1 for one in range(like.dim())]
        )
    return (value + off).to(like.dtype)
