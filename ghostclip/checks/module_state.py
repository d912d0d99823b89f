"""State that a forward can write beside parameters: buffers, counters and caches of modules, and what lies outside.

A forward that is asked about runs more than once. Each of these runs must begin with what the user's own began with,
or a model that does something else in every fifth call would do it in another one; and afterwards the model must be as
the user's own forward left it, whose loss may use what it finds there.

Outside of the modules' tables, the user's hooks and methods may append to a list, count in a global or fill a cache
that came as an argument. What they reach is noted before and put back afterwards: containers, attributes of objects and
of classes, variables of functions, generators, tensors and arrays. Only the user's own code is looked into, and objects
that were handed over as arguments: libraries keep threads and files in theirs.
"""

import pickle
import random
import sys
import sysconfig
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from operator import eq, is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.hooks import is_own

# How many objects are looked at, how long a container is that is looked into, and how many elements are copied in all.
_MAX_OBJECTS: Final = 20_000
_MAX_LENGTH: Final = 4_096
_MAX_ELEMENTS: Final = 1 << 22
_CONTAINERS: Final = (OrderedDict, dict, list, set, deque)
_CALLABLES: Final = (types.MethodType, partial, staticmethod, classmethod, property)
_DATA: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# What stands in a class beside its data.
_DESCRIPTORS: Final = (types.GetSetDescriptorType, types.MemberDescriptorType)
_NO_DATA: Final = (*_CALLABLES, types.FunctionType, types.BuiltinFunctionType, *_DESCRIPTORS)
_TENSORS: Final = (Tensor, nn.Parameter)
# Whose attributes are noted, whoever has written their classes.
_HOLDERS: Final = (nn.Module, torch.utils.data.Dataset, types.SimpleNamespace, UserDict, UserList)
_ABSENT: Final = object()
# What every module has: tables, which are looked after elsewhere, and its mode.
_OWN: Final = frozenset(vars(nn.Module()))


class _Noted(NamedTuple):
    """One recorded value: whether it has changed, and how to restore it."""

    changed: Callable[[], bool]
    put_back: Callable[[], object]


class Reachable:
    """The state of everything mutable that some objects reach, at one moment."""

    def __init__(self, roots: Iterable[Any], *, arguments: Iterable[Any] = (), known: Iterable[Any] = ()) -> None:
        """Record the state of all that roots and arguments reach, up to limits of number and size."""
        # `roots`: functions, classes and objects that are looked into as far as they are the user's; `arguments`:
        # whoever has written their classes. `known`: somebody else looks after them.
        self._noted: list[_Noted] = []  # everything recorded
        self._generators: list[_Noted] = []  # those of them that are generators
        self._names: set[tuple[int, str]] = set()  # (table, name) of globals that are recorded
        self._elements = 0  # copied so far
        # Held, so that their numbers stay their own.
        self._seen: dict[int, Any] = {id(item): item for item in known}
        pending = deque(chain(((item, True) for item in arguments), ((item, False) for item in roots)))
        most = len(self._seen) + _MAX_OBJECTS
        while pending and len(self._seen) < most:
            item, passed = pending.popleft()
            if not isinstance(item, _DATA) and id(item) not in self._seen:
                self._seen[id(item)] = item
                pending.extend((part, passed) for part in self._record(item, passed=passed))

    def changed(self) -> bool:
        """Return whether anything is not as it was; generators do not count."""
        return any(noted.changed() for noted in self._noted)

    def drawn(self) -> bool:
        """Return whether a number was drawn from a generator."""
        return any(noted.changed() for noted in self._generators)

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        for noted in self._noted:
            if noted.changed():
                noted.put_back()

    def _record(self, item: Any, *, passed: bool) -> Iterable[Any]:
        """Record one object's state, and return the objects that it refers to."""
        for kinds, record in _BY_KIND:
            if isinstance(item, kinds):
                return record(self, item)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(item, (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState)):
            return self._of_numpy(item, is_array=isinstance(item, numpy.ndarray))
        module = type(item).__module__
        if isinstance(item, _HOLDERS) or _is_users(module) or (passed and not _is_pythons(module)):
            slots = [name for kind in type(item).__mro__ for name in _slots_of(kind)]
            return [*(self._attribute(item, name) for name in slots), getattr(item, "__dict__", None), type(item)]
        return ()

    def _add(self, read: Callable[[], Any], write: Callable[[Any], object], *, same: Callable[..., Any] = is_) -> Any:
        """Record a value with how it is read, written and compared; return it."""
        value = read()
        self._noted.append(_Noted(lambda: not same(read(), value), lambda: write(value)))
        return value

    def _may_copy(self, elements: int) -> bool:
        """Return whether so many more elements may be copied, and count them."""
        fits = self._elements + elements <= _MAX_ELEMENTS
        self._elements += elements * fits
        return fits

    def _attribute(self, item: Any, name: str) -> Any:
        """Record an attribute and return its value; None where there is none."""
        if getattr(item, name, _ABSENT) is _ABSENT:
            return None
        return self._add(lambda: getattr(item, name, _ABSENT), partial(setattr, item, name))

    def _of_tensor(self, tensor: Tensor) -> Iterable[Any]:
        """Record a copy of a tensor, compared by version."""
        if type(tensor) in _TENSORS and not tensor.is_inference() and self._may_copy(tensor.numel()):
            value = tensor.detach().clone()
            self._add(partial(_torch.version, tensor), lambda _: tensor.detach().copy_(value))
        return ()

    def _of_numpy(self, item: Any, *, is_array: bool) -> Iterable[Any]:
        """Record an array, or the state of a NumPy generator."""
        if not is_array:
            bits = getattr(item, "bit_generator", None)
            read, write = (
                (partial(item.get_state, legacy=False), item.set_state)
                if bits is None
                else (lambda: bits.state, partial(setattr, bits, "state"))
            )
            return self._of_stream(read, write, lambda now, value: pickle.dumps(now) == pickle.dumps(value))
        if item.flags.writeable and not item.dtype.hasobject and self._may_copy(item.size):
            value = item.copy()
            self._add(item.tobytes, lambda _: item.__setitem__(..., value), same=eq)
        return ()

    def _of_container(self, box: Any) -> Iterable[Any]:
        """Record the elements of a list, dict, set or deque, and return them."""
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(box, kind))

        def read() -> list[Any]:
            return list(chain.from_iterable(kind.items(box))) if isinstance(box, dict) else list(kind.__iter__(box))

        def write(parts: list[Any]) -> None:
            kind.clear(box)
            if isinstance(box, dict):
                kind.update(box, zip(parts[::2], parts[1::2], strict=True))
            else:
                (kind.update if isinstance(box, set) else kind.extend)(box, parts)

        parts = self._add(read, write, same=lambda now, value: len(now) == len(value) and all(map(is_, now, value)))
        return [*(parts if len(parts) <= _MAX_LENGTH else ()), getattr(box, "__dict__", None)]

    def _of_cell(self, cell: types.CellType) -> Iterable[Any]:
        """Record a variable of a closure, and return its value."""
        try:
            return (self._add(lambda: cell.cell_contents, partial(setattr, cell, "cell_contents")),)
        except ValueError:
            # Nothing is in it yet.
            return ()

    def _of_function(self, function: types.FunctionType) -> Iterable[Any]:
        """Record the variables that a function's code names: its closure, and globals of the user's modules."""
        reached: list[Any] = list(function.__closure__ or ())
        if not _is_users(function.__module__):
            return reached
        reached += [function.__defaults__, function.__kwdefaults__, vars(function)]
        names = set(_names_in(function.__code__))
        modules = [value for name in names if isinstance(value := function.__globals__.get(name), types.ModuleType)]
        for table in (function.__globals__, *(vars(module) for module in modules if _is_users(module.__name__))):
            for name in sorted(names & table.keys()):
                if (id(table), name) not in self._names and not isinstance(table[name], types.ModuleType):
                    self._names.add((id(table), name))
                    reached.append(self._add(partial(table.get, name, _ABSENT), partial(table.__setitem__, name)))
        return reached

    def _of_class(self, kind: type) -> Iterable[Any]:
        """Record the attributes of a class of the user's, and return them with its bases."""
        if not _is_users(kind.__module__):
            return ()
        table = dict(vars(kind))
        for name, value in table.items():
            if not (isinstance(value, _NO_DATA) or name.startswith(("__", "_abc_"))):
                self._attribute(kind, name)
        return [*table.values(), *kind.__bases__]

    def _of_callable(self, item: Any) -> Iterable[Any]:
        """Return the parts of a bound method, partial or property."""
        return [getattr(item, name, None) for name in ("__self__", "__func__", "func", "args", "keywords", "fget")]

    def _of_stream(self, read: Any, write: Any, same: Callable[[Any, Any], bool]) -> Iterable[Any]:
        """Record the state of a random generator."""
        self._add(read, write, same=same)
        self._generators.append(self._noted[-1])
        return ()


# How objects are noted, by their kind; the first that fits.
_BY_KIND: Final[tuple[tuple[Any, Callable[[Any, Any], Iterable[Any]]], ...]] = (
    (Tensor, Reachable._of_tensor),
    (_CONTAINERS, Reachable._of_container),
    (tuple, lambda _, item: item),
    (types.CellType, Reachable._of_cell),
    (types.FunctionType, Reachable._of_function),
    (_CALLABLES, Reachable._of_callable),
    (type, Reachable._of_class),
    (torch.Generator, lambda found, one: found._of_stream(one.get_state, one.set_state, torch.equal)),
    (random.SystemRandom, lambda *_: ()),  # it has no state
    (random.Random, lambda found, one: found._of_stream(one.getstate, one.setstate, eq)),
)


def _slots_of(kind: type) -> Iterator[str]:
    """Yield the names of a class's slots, mangled as attributes are."""
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else tuple(slots):
        if name not in ("__dict__", "__weakref__"):
            yield f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Return the names of globals and attributes in a function's code, and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@cache
def _is_pythons(module: str) -> bool:
    """Return whether a module is torch's, ours or Python's own."""
    top = module.partition(".")[0]
    return top in ("torch", "ghostclip") or (top in sys.stdlib_module_names and top != "__main__")


@cache
def _is_users(module: str | None) -> bool:
    """Return whether a module is the user's: neither Python's, torch's, ours nor an installed package's."""
    if module is None or _is_pythons(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    package_dirs = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "site-packages", "dist-packages")
    return not any(part in file for part in package_dirs)


class ModuleState:
    """The buffers and attributes of a model's modules at one moment, and what their code reaches outside of them."""

    def __init__(self, model: nn.Module, *, arguments: Iterable[Any] = (), outside: bool = True) -> None:
        """Record buffers, attributes and what the modules' code reaches."""
        # `arguments`: objects that its forward is called with; tensors are kept by whoever hands out copies of them.
        # `outside`: what lies outside the modules counts.
        self._model, self._hooks = model, _hooks_of(model)
        modules = list(model.modules())
        self._tables = [(table, dict(table)) for table in map(_torch.buffer_table, modules)]  # of buffers
        self._attributes = [(namespace, _attributes_of(namespace)) for namespace in map(vars, modules)]
        values = [value for _, saved in self._attributes for value in saved.values()]
        data = (one for one in values if isinstance(one, Tensor) and not (one.requires_grad or one.is_inference()))
        self._tensors = [(one, one.detach().clone(), _torch.version(one)) for one in (*model.buffers(), *data)]
        looked_after = [*modules, *model.parameters(), *(one for one, _, _ in self._tensors)]
        self._held = Reachable(values, known=looked_after)
        # Quantised weights hand their scales over to the module in its first forward, which is no memory of a batch.
        self._beside = Reachable(filter(None, map(vars, model.parameters())), known=looked_after)
        hooks = [hook for module in modules for hook in _torch.hooks_of(module) if not is_own(hook)] if outside else []
        kinds = dict.fromkeys(map(type, modules)) if outside else ()
        self._outside = Reachable([*kinds, *hooks], arguments=arguments, known=[*looked_after, *values])

    def restore(self) -> None:
        """Put everything back, in place where it was changed in place."""
        for buffers, before in self._tables:
            # One that is assigned anew is another object; one that was made since would not be made again.
            for name in buffers.keys() - before.keys():
                del buffers[name]
            buffers.update(before)
        # Whoever sets hooks in a first forward notes in an attribute that they are set, and would set them again.
        if _hooks_of(self._model) == self._hooks:
            for namespace, before in self._attributes:
                for name in _attributes_of(namespace).keys() - before.keys():
                    del namespace[name]
                namespace.update(before)
        for reached in (self._held, self._beside, self._outside):
            reached.restore()
        for tensor, value, version in self._tensors:
            # A backward refuses what was written to since the forward, be it the same value.
            if _torch.version(tensor) != version:
                _torch.write_uncounted_(tensor, value, version)

    def changed(self) -> bool:
        """Return whether anything is not as it was, in the modules or outside of them."""
        return self.changed_inside() or self._outside.changed()

    def drawn(self) -> bool:
        """Return whether a number was drawn from a generator, in the modules or outside of them."""
        return self._held.drawn() or self._outside.drawn()

    def changed_inside(self) -> bool:
        """Return whether anything in the modules is not as it was."""
        if self._held.changed() or any(_torch.version(one) != version for one, _, version in self._tensors):
            return True
        tables = [*self._tables, *((_attributes_of(namespace), before) for namespace, before in self._attributes)]
        return any(
            now.keys() != before.keys()
            or any(now[name] is not value for name, value in before.items() if name not in _torch.FLAT_WEIGHTS)
            for now, before in tables
        )


@contextmanager
def restored(model: nn.Module, *, arguments: Iterable[Any] = ()) -> Iterator[None]:
    """Put a model's buffers and attributes back afterwards, and what objects among ``arguments`` hold."""
    state = ModuleState(model, arguments=arguments)
    try:
        yield
    finally:
        state.restore()


def _hooks_of(model: nn.Module) -> int:
    """Return how many hooks a model's modules have, without the library's own."""
    return sum(not is_own(hook) for module in model.modules() for hook in _torch.forward_hooks(module))


def _attributes_of(namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if name not in _OWN}
