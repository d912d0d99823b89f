"""A pretended CUDA device: real values on the CPU, and an error where a program mixes the two devices.

Tensors stay ordinary tensors of the CPU. A dispatch mode notes for every storage on which device it would lie and
holds each operation to what CUDA would hold it to; `Tensor.device`, `.to` and what reads values on the host answer as
they would there. What C++ makes by itself (a formula of a backward) takes the device of what it is first used with.

What it cannot see: streams, order of execution, kernels' own limits, and branches on `torch.cuda.is_available()`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
# The host waits for the device, to know a value or a shape.
_READS = {
    _aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal, _aten._unique2, _aten.unique_dim,
    _aten.unique_consecutive, _aten.is_nonzero, _aten.item,
}  # fmt: skip
# These move data between devices and may.
_MOVES = {_aten.copy_, _aten._foreach_copy_}
# No CPU scalar stands beside tensors of a GPU in these.
_ALIKE = {
    _aten.cat, _aten.stack, _aten.index_select, _aten.gather, _aten.scatter, _aten.scatter_add, _aten.index_copy,
    _aten.index_add, _aten.embedding, _aten.searchsorted, _aten.isin, _aten.bincount,
}  # fmt: skip
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}
# Sizes of a packed sequence lie on the host wherever its data lie.
_PACKING = {_aten._pack_padded_sequence, _aten._pad_packed_sequence}
# torch 2.15 turns `x[[0, 2]] = 0` into this, with an index that it makes itself.
_OF_SIZES = {
    _aten.index_fill_,
    *_PACKING,
    _aten._pack_padded_sequence_backward,
    _aten.lstm,
    _aten.gru,
    _aten.rnn_tanh,
    _aten.rnn_relu,
}
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "arange", "tensor", "as_tensor", "scalar_tensor", "rand", "randn", "randint"),
    *("randperm", "eye", "linspace", "logspace", "empty_strided", "tril_indices", "triu_indices"),
)
_TENSOR: Any = Tensor
# By storage, of all pretended devices together: a cache that outlives one holds what lies there for the next.
_PLACES: dict[int, torch.device | None] = {}


class MixedDevicesError(RuntimeError):
    """An operation met tensors of two devices."""


class PretendedDevice(TorchDispatchMode):
    """While entered, `cuda:0` is pretended to exist.

    Attributes:
        reads: Where the host read a value of the device, one text for each read, innermost frames last.
        moves: The same of data that went from the host to the device, except to `.to`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.moves: list[str] = []
        self._places = _PLACES
        self._target: torch.device | None = None
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> PretendedDevice:
        """Replace what answers for devices."""
        self._patches = contextlib.ExitStack()
        for target, name, value in self._replaced():
            patch = mock.patch.object(target, name, value, create=True)
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *caught: object) -> None:
        """Put everything back."""
        super().__exit__(*caught)
        self._patches.close()

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        yield _TENSOR, "device", property(self.place)
        yield _TENSOR, "is_cuda", property(lambda tensor: self.place(tensor).type == "cuda")
        yield _TENSOR, "is_cpu", property(lambda tensor: self.place(tensor).type == "cpu")
        for name in ("to", "cpu", "cuda", "numpy", "tolist", "new_tensor", "__deepcopy__"):
            original, own = getattr(_TENSOR, name), getattr(self, f"_{name.strip('_')}")
            yield _TENSOR, name, _named(functools.partial(_called, own, original), original)
        for name in _FACTORIES:
            yield torch, name, _named(functools.partial(self._made, getattr(torch, name)), getattr(torch, name))
        yield torch, "Generator", _Generator
        yield torch.backends.cudnn, "is_acceptable", lambda tensor: False
        for name, value in _OF_CUDA.items():
            yield torch.cuda, name, value

    # ------------------------------------------------------------ where a tensor lies

    def place(self, tensor: Tensor) -> torch.device:
        """Return the device a tensor is pretended to lie on."""
        known = self._known(tensor)
        return known or torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]

    def _known(self, tensor: Tensor) -> torch.device | None:
        key = _storage(tensor)
        return None if key is None else self._places.get(key, CPU)

    def _put(self, tensor: Tensor, place: torch.device | None) -> None:
        key = _storage(tensor)
        if key is None:
            return
        if key not in self._places:
            with torch._C.DisableTorchFunction():
                weakref.finalize(tensor.untyped_storage(), self._places.pop, key, None)
        self._places[key] = place

    # ------------------------------------------------------------ what Python calls

    def _made(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        place = CPU if asked is None else torch.device(asked)
        if place.type not in ("cpu", "cuda"):
            return original(*args, **kwargs)
        if original.__name__ == "as_tensor" and isinstance(args[0], Tensor):
            return args[0] if asked is None else args[0].to(place)
        result = original(*args, **{key: value for key, value in kwargs.items() if key != "device"})
        # A device that was asked of an autograd node is the CPU, whatever is pretended: not to be held against it.
        self._put(result, CUDA if place.type == "cuda" else CPU if asked is None else None)
        return result

    def _to(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            device, dtype = self.place(args[0]), args[0].dtype
        else:
            args = tuple(args[:2]) if not args or not isinstance(args[0], torch.dtype) else args[:1]
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if v is not None})
        options = {"dtype": dtype} if dtype is not None else {}
        if kwargs.get("memory_format") is not None:
            options["memory_format"] = kwargs["memory_format"]
        here = self.place(tensor)
        if device is None or device.type == here.type:
            return original(tensor, **options, copy=copy) if options or copy else tensor
        if device.type not in ("cpu", "cuda"):
            return original(tensor, device=device, **options, copy=copy)
        if here.type == "cuda":
            self.reads.append(_where("to"))
        before, self._target = self._target, torch.device(device.type, 0) if device.type == "cuda" else CPU
        try:
            return original(tensor, **options, copy=True)
        finally:
            self._target = before

    def _cpu(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor.to("cpu", *args, **kwargs)

    def _cuda(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor.to(CUDA)

    def _numpy(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.place(tensor).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return original(tensor, *args, **kwargs)

    def _tolist(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        if self.place(tensor).type == "cuda":
            self.reads.append(_where("tolist"))
        return original(tensor)

    def _new_tensor(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        self._put(result, torch.device(kwargs["device"]) if kwargs.get("device") else self.place(tensor))
        return result

    def _deepcopy(self, original: Callable[..., Any], tensor: Tensor, memo: Any) -> Any:
        result = original(tensor, memo)
        self._put(result, self.place(tensor))
        return result

    # ------------------------------------------------------------ what every operation passes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check where the arguments lie, run the operation, and note where the results lie."""
        kwargs = dict(kwargs or {})
        given = [*_tensors(args), *_tensors(kwargs.values())]
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            kwargs["device"] = CPU
        place = self._place_of(func, args, given, asked)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._put(tensor, place)
        if func.overloadpacket in _PACKING:
            self._put(result[1], CPU)
        return result

    def _place_of(self, func: Any, args: Any, given: list[Tensor], asked: torch.device | None) -> torch.device | None:
        packet = func.overloadpacket
        if self._target is not None and packet is _aten._to_copy:
            return self._target
        if asked is not None and asked.type not in ("cpu", "cuda"):
            return asked
        if packet in _MOVES:
            return self._moved(packet, args)
        if asked is not None and asked.type == "cuda":
            return CUDA
        if packet in _INDEXED:
            return self._indexed(packet, args)
        if packet in _OF_SIZES:
            return self._known(args[0])
        known = {self._known(tensor) for tensor in given} - {None}
        kinds = {place.type for place in known if place is not None}
        if packet in _READS and "cuda" in kinds:
            self.reads.append(_where(str(func)))
        if {"cpu", "cuda"} <= kinds:
            self._check(func, packet, args, given)
        return CUDA if "cuda" in kinds else next(iter(known), None)

    def _check(self, func: Any, packet: Any, args: Any, given: list[Tensor]) -> None:
        on_host = [tensor for tensor in given if self._known(tensor) == CPU]
        written = func._schema.is_mutable and isinstance(args[0], Tensor) and self._known(args[0]) == CPU
        if packet in _ALIKE or written or any(tensor.dim() > 0 for tensor in on_host):
            sizes = [(str(self.place(tensor)), tuple(tensor.shape)) for tensor in given]
            raise MixedDevicesError(f"{func}: {sizes}\n{_where(str(func))}")

    def _moved(self, packet: Any, args: Any) -> torch.device | None:
        if packet is not _aten.copy_:
            return self._known(args[0][0])
        to, origin = self._known(args[0]), self._known(args[1])
        if to is None:
            return origin
        if to.type == "cpu" and origin is not None and origin.type == "cuda":
            self.reads.append(_where("copy_"))
        if to.type == "cuda" and origin == CPU and args[1].dim() > 0:
            self.moves.append(_where("copy_"))
        return to

    def _indexed(self, packet: Any, args: Any) -> torch.device | None:
        own = self._known(args[0])
        for index in args[1]:
            found = None if index is None else self._known(index)
            if own == CPU and found is not None and found.type == "cuda":
                raise MixedDevicesError(
                    f"{packet}: indices of the device for a tensor of the host\n{_where(str(packet))}"
                )
            if own is not None and own.type == "cuda" and index is not None:
                if found == CPU and index.dim() > 0:
                    self.moves.append(_where(str(packet)))
                if index.dtype in (torch.bool, torch.uint8):
                    self.reads.append(_where(f"{packet} of a mask"))
        values = [value for value in args[2:3] if isinstance(value, Tensor)]
        if own is not None and any(self._known(v) not in (own, None) and v.dim() > 0 for v in values):
            raise MixedDevicesError(f"{packet}: values of another device\n{_where(str(packet))}")
        return own


def _storage(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's storage; None where there is none of the CPU."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if torch._C.TensorBase.device.__get__(tensor).type != "cpu" or tensor.layout is not torch.strided:  # type: ignore[attr-defined]
            return None
        return tensor.untyped_storage()._cdata


def _called(own: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return own(original, *args, **kwargs)


def _named(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a plain function of it, so that it binds as a method."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among what an operation is given or returns, in lists as well."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _where(what: str) -> str:
    """Return an operation and the innermost frames of this project and its tests that led to it."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 4:
        code = frame.f_code
        if "/ghostclip/" in code.co_filename and "/site-packages/" not in code.co_filename:
            frames.append(f"{code.co_filename.rpartition('/ghostclip/')[2]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return f"{what} <- {' <- '.join(frames)}"


class _Generator(torch.Generator):
    """A generator of any device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


class _Stream:
    """The one stream, which nobody has to wait for."""

    def wait_stream(self, other: _Stream) -> None: ...


_STREAM = _Stream()
_OF_CUDA: dict[str, Any] = {
    "current_stream": lambda device=None: _STREAM,
    "_lazy_init": lambda: None,
    "synchronize": lambda device=None: None,
    "current_device": lambda: 0,
    "device": _nothing,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
    "is_current_stream_capturing": lambda: False,
    "mem_get_info": lambda device=None: (2**34, 2**35),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}
