"""What is held of a factor from its norm to its contraction: the factor itself, its numbers in 16 bits, or on the host.

A factor that is held in 16 bits is rounded before its norm is taken, and it is the rounded one that is contracted: what
is added has the norm that was computed for it. A copy on the host is the factor to the bit.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.clipping.changes import changed_in_place
from ghostclip.errors import TamperedGradientError
from ghostclip.factors import Dense, Factor, Outer
from ghostclip.kernels import products
from ghostclip.planning.timeline import AS_THEY_ARE, ON_THE_WAY, Holding

ROUNDED: Final = torch.bfloat16
"""The type of 16 bits: gradients of 1e-8 are ordinary numbers of it, as in float32; in float16 they are zero."""


class OnHost(NamedTuple):
    """A tensor's copy in pinned memory, and the device that it came from."""

    copy: Tensor
    device: torch.device


@dataclass(frozen=True, eq=False)
class Stored:
    """A factor in another form: its tensors, and a function that makes the factor of them, on their device again."""

    tensors: Sequence[Tensor | OnHost]
    factor_of: Callable[[Sequence[Tensor]], Factor]


HeldFactor: TypeAlias = Factor | Stored


class Keeper:
    """Converts the factors of some parameters to the form in which they are stored, and back."""

    def __init__(self, holding: Holding = AS_THEY_ARE) -> None:
        self._rounded, self._offloaded = holding
        self._copied = _Once()
        self._transfers = _Transfers()

    @property
    def changes(self) -> bool:
        """Whether any factor is stored in another form."""
        return bool(self._rounded or self._offloaded)

    def offloads(self, name: str) -> bool:
        """Return whether a parameter's factors go to the host once their norms are known."""
        return name in self._offloaded

    def rounded(self, name: str, factor: Factor, *, readers: dict[int, int] | None = None, own: bool = False) -> Factor:
        """Return the factor that is measured, stored and contracted: rounded to 16 bits, or the factor itself."""
        # readers: number of uses that read the memory at an address; copies' addresses are added. own: nobody else
        # reads the numbers of a factor that are gradients.
        if name not in self._rounded:
            return factor
        tensors = _tensors_of(factor)
        if not tensors or not all(map(_is_wide, tensors)):
            return factor
        if type(factor) is Dense:
            half_BP = factor.grad_BP.to(ROUNDED)
            return Dense(factor.grad_BP.copy_(half_BP) if own else half_BP)
        assert type(factor) is Outer
        copies = []
        for x_NTF in tensors:
            copies.append(self._copied.of(x_NTF, lambda tensor: products.aligned(tensor.to(ROUNDED))))
            if readers is not None and readers.get(x_NTF.data_ptr(), 0):
                readers[copies[-1].data_ptr()] = readers[x_NTF.data_ptr()]
        return Outer(*copies, shape=factor.shape, slots=factor.slots)

    def stored(self, name: str, factor: Factor) -> HeldFactor:
        """Return the stored form of a factor that `rounded` returned and whose norm was taken."""
        if name not in self._rounded and not self.offloads(name):
            return factor
        tensors = _tensors_of(factor)
        in_half = name in self._rounded and type(factor) is Dense and _is_wide(factor.grad_BP)
        if in_half:
            tensors = [tensor.to(ROUNDED) for tensor in tensors]
        away = self.offloads(name) and all(tensor.is_cuda and _is_whole(tensor) for tensor in tensors)
        if not tensors or not (in_half or away):
            return factor
        held = [self._away(name, tensor) for tensor in tensors] if away else tensors
        return Stored(held, _making(factor))

    def _away(self, name: str, tensor: Tensor) -> OnHost:
        device = tensor.device
        return OnHost(self._copied.of(tensor, lambda one: self._transfers.out(name, one)), device)

    def complete(self) -> None:
        """Note that all factors have arrived."""
        self._copied.clear()
        self._transfers.settle()

    def expect(self, held: Iterator[HeldFactor]) -> None:
        """Note the order in which factors will be asked for."""
        # Each is brought back while the one before is contracted.
        self._transfers.expect(tensor for one in held if isinstance(one, Stored) for tensor in _away_of(one))

    def restored(self, held: HeldFactor) -> Factor:
        """Return the factor whose norm was taken, to the bit, from its stored form."""
        if isinstance(held, Factor):
            return held
        tensors = [self._transfers.back(one) if isinstance(one, OnHost) else one for one in held.tensors]
        self._transfers.fetch_next()
        return held.factor_of(tensors)

    def all_restored(self, held: Mapping[str, Sequence[HeldFactor]]) -> Mapping[str, Sequence[Factor]]:
        """Return a mapping of factors by parameter, each brought back when it is read."""
        return _Restored(self, held)

    def close(self) -> None:
        """Let the device wait for all copies, lest one is written into memory that is used again."""
        self._transfers.close()


class _Restored(Mapping[str, Sequence[Factor]]):
    """Factors by parameter, brought back one parameter at a time."""

    def __init__(self, keeper: Keeper, held: Mapping[str, Sequence[HeldFactor]]) -> None:
        self._keeper, self._held = keeper, held

    def __getitem__(self, name: str) -> Sequence[Factor]:
        return [self._keeper.restored(one) for one in self._held[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class _Once:
    """Copies of tensors, one for all with the same numbers: layers that read one input share one copy of it."""

    # The memory that a copy was made of may be freed, and another tensor lie there: a copy counts for as long as the
    # storage lives unchanged.
    def __init__(self) -> None:
        self._made: dict[Any, tuple[ReferenceType[torch.UntypedStorage], int, Tensor]] = {}

    def of(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a tensor's copy, made now or earlier."""
        storage = tensor.untyped_storage()
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        alive, version, made = self._made.get(key, (None, 0, tensor))
        if alive is None or alive() is not storage or version != _torch.version(tensor):
            made = copy(tensor)
            self._made[key] = ref(storage), _torch.version(tensor), made
        return made

    def clear(self) -> None:
        """Drop all copies, so that each lives no longer than the factors that refer to it."""
        self._made.clear()


class _Leaving(NamedTuple):
    """A tensor that is being copied to the host."""

    name: str
    tensor: Tensor
    version: int
    here: Any
    copied: Any


class _Transfers:
    """Copies to pinned memory and back on a stream of their own, in parallel to the device's work."""

    # A tensor that leaves stays alive until the stream that it arrived on waits for the copy, so that nothing is
    # written there before; one that comes back is memory of the stream that asks for it, which waits before it reads.
    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._leaving: deque[_Leaving] = deque()
        self._expected: deque[OnHost] = deque()
        self._coming: dict[int, tuple[Tensor, Any]] = {}
        self._back: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def _beside(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def out(self, name: str, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host."""
        here, beside = _torch.current_stream(tensor.device), self._beside(tensor.device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            copy.copy_(tensor, non_blocking=True)
            copied = beside.record_event()
        self._leaving.append(_Leaving(name, tensor, _torch.version(tensor), here, copied))
        self.settle(ON_THE_WAY)
        return copy

    def settle(self, at_most: int = 0) -> None:
        """Release tensors that have left until at most so many are still on their way."""
        while len(self._leaving) > at_most:
            name, tensor, version, here, copied = self._leaving.popleft()
            here.wait_event(copied)
            if _torch.version(tensor) != version:
                raise TamperedGradientError(changed_in_place(name))

    def expect(self, order: Iterator[OnHost]) -> None:
        """Note the order in which tensors will be asked for, and begin with the first."""
        self._expected = deque(order)
        self.fetch_next()

    def fetch_next(self) -> None:
        """Begin to bring back the next tensors in the expected order: those of one factor."""
        while self._expected and len(self._coming) < ON_THE_WAY:
            self._fetch(self._expected.popleft())

    def _fetch(self, held: OnHost) -> None:
        key = id(held.copy)
        if key in self._coming or key in self._back:
            return
        here, beside = _torch.current_stream(held.device), self._beside(held.device)
        tensor = torch.empty(held.copy.shape, dtype=held.copy.dtype, device=held.device)
        # The memory may have been used here until now.
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            tensor.copy_(held.copy, non_blocking=True)
            self._coming[key] = tensor, beside.record_event()

    def back(self, held: OnHost) -> Tensor:
        """Return a tensor on its device."""
        key = id(held.copy)
        present = self._back.get(key)
        if present is not None:
            return present
        self._fetch(held)
        tensor, arrived = self._coming.pop(key)
        _torch.current_stream(held.device).wait_event(arrived)
        self._back[key] = tensor
        return tensor

    def close(self) -> None:
        """Let the present stream of each device wait for all copies, and release everything."""
        for device, beside in self._streams.items():
            _torch.current_stream(device).wait_stream(beside)
        self._leaving.clear()
        self._expected.clear()
        self._coming.clear()


def _away_of(stored: Stored) -> Iterator[OnHost]:
    return (one for one in stored.tensors if isinstance(one, OnHost))


def _tensors_of(factor: Factor) -> list[Tensor]:
    """Return the tensors of a factor that can be stored in another form; none for other factors."""
    if type(factor) is Dense:
        return [factor.grad_BP]
    return [factor.a_NTI, factor.g_NTO] if type(factor) is Outer else []


def _making(factor: Factor) -> Callable[[Sequence[Tensor]], Factor]:
    if type(factor) is Dense:
        return lambda tensors: Dense(tensors[0])
    assert type(factor) is Outer
    shape, slots = factor.shape, factor.slots
    return lambda tensors: Outer(tensors[0], tensors[1], shape=shape, slots=slots)


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and _is_whole(tensor)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether every number has memory of its own: a copy of an expanded tensor would take more."""
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
