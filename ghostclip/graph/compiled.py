"""`CompiledStep`: the private step of one physical batch size, traced, rewritten and compiled as `GraphOptions` say.

A batch of any size is cut into parts of few sizes. The last part is padded by repeating its last sample. A padding
sample has coefficient 0, and its values are those of a sample that counts: it adds exactly nothing to a sum, to counts
or to norms that are looked at.

Compiled graphs lie on disk, beside Inductor's own cache, for the processes that come after. A file is found by the hash
of all that rewriting and compiling read: every node of the traced graph with its operation, arguments, constants'
contents, shapes, strides, dtypes and devices; where samples lie in it; names of parameters; clip groups, bounds and
policy; options and settings of the compiler, autocast, threads; torch, the sources of this package, the device. What
was made of equal things in another process is what would be made here. What has no description in plain values (a
policy of the user's own, a custom operation) is neither kept nor looked for.

Tracing at both batch sizes and the analysis of axes are not left out: a loss that is divided by the number of samples
has, at one size, the graph of one that is divided by a constant. The first batch is compared as ever.

Torch writes and reads the files as those of its own caches, in the user's cache folder. A name ends in the hash of the
content: a file that was cut or changed is passed over.

What a graph was traced for: a batch of another form, or a model that was changed, needs another one. Guarded are:
shapes and dtypes of the batch, its plain values, the model's modules and parameters (by identity) and buffers (number),
of these shape, dtype, device and whether they train, what modules and the loss hold in attributes (numbers, flags,
functions, hooks, tensors, arrays of NumPy, and lists, dicts and objects of such, four deep; attributes that are added;
another object in the place of one), autocast, and how samples are clipped. What a forward reads elsewhere (a global
variable, a closure, a number read off a tensor that is no buffer) is not, and must not change. Where tensors that
samples have in common hold other values than in the trace, the eager engine computes the batch.

Shape letters: B samples, P of a padded part, G clip groups.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import platform
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, fx, nn

from ghostclip import _torch, _tree, _validate
from ghostclip.checks.state import same_content
from ghostclip.errors import InvalidOptionError
from ghostclip.graph.rewrite import Clipping, Regions, private_step, rewritten
from ghostclip.graph.trace import (
    Axes,
    Inputs,
    LossFunction,
    NoGraphError,
    Traced,
    analysed,
    draws,
    first_line,
    inputs_of,
    outputs_of,
    restored,
    trace,
)
from ghostclip.kernels.products import full_precision

_PLAIN_VALUES: Final = (int, float, bool, str, type(None), torch.dtype, torch.device)
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType, partial)
# What is not looked into: it is watched by other means, or nobody's.
_OTHERS: Final = (nn.Module, Tensor, type, ModuleType)
_DEPTH: Final = 4
_MISSING: Final = object()


class Watched:
    """Records a model and its loss as a graph was traced, to see whether they have changed since."""

    def __init__(self, model: nn.Module, names: Sequence[str], loss: Any, constants: Sequence[Tensor]) -> None:
        """Record tables, attributes and the forms of the tensors that the graph is given."""
        # `constants`: tensors that the graph holds; an attribute that had one must still have it.
        self._slots = [_slot(model, name) for name in names]  # (table, key) of what the graph is given
        self._about = [_about(owner[key]) for owner, key in self._slots]  # their forms
        # Modules and parameters, tied ones in each of their places: an optimizer knows them by identity.
        self._objects: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []  # (table or container, its length)
        self._keys: list[tuple[dict[str, Any], frozenset[str]]] = []  # (a module's attributes, their names)
        self._plain: list[tuple[Any, Any, Any]] = []  # (container, key, value) of other values
        self._arrays: list[tuple[Any, Any, Any]] = []  # (container, key, copy) of arrays
        seen = set[int]()
        self._constants = frozenset(map(id, constants))
        self._modules = list(model.modules())
        self._kinds = list(map(type, self._modules))
        for module in self._modules:
            self._sizes += [(table, len(table)) for table in _torch.tables(module)]
            children, parameters, _ = _torch.tables(module)
            self._objects += [(table, key, value) for table in (children, parameters) for key, value in table.items()]
            attributes = vars(module)
            self._keys.append((attributes, frozenset(attributes)))
            seen.update(map(id, _torch.tables(module)))
            self._record(attributes, seen, _DEPTH)
        for each in _behind(loss):
            self._record(getattr(each, "__dict__", {}), seen, _DEPTH)

    def _record(self, container: Any, seen: set[int], depth: int) -> None:
        """Record the values of a list or a dict, nested ones included."""
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, np.ndarray):
                self._arrays.append((container, key, value.copy()))
            elif not (_is_ours(value) or _is_weak(value) or self._is_left_by_forwards(value)):
                # That it is another one is also seen by what it holds.
                self._plain.append((container, key, value))
                if depth and isinstance(value, (list, tuple, dict)):
                    if not isinstance(value, tuple):
                        self._sizes.append((value, len(value)))
                    self._record(value, seen, depth - 1)
                elif depth and hasattr(value, "__dict__") and not isinstance(value, (*_OTHERS, *_FUNCTIONS)):
                    self._record(vars(value), seen, depth - 1)

    def _is_left_by_forwards(self, value: Any) -> bool:
        """Return whether a value is a tensor that the graph does not read, such as the latest activations."""
        return isinstance(value, Tensor) and id(value) not in self._constants

    def tensors(self) -> list[Tensor] | None:
        """Return the current parameters and buffers; None where the model was changed."""
        if list(map(type, self._modules)) != self._kinds or any(len(table) != size for table, size in self._sizes):
            return None
        if any(table.get(key) is not value for table, key, value in self._objects):
            return None
        if any(not _is_ours(attributes[key]) for attributes, keys in self._keys for key in attributes.keys() - keys):
            return None
        for container, key, value in self._plain:
            current = container[key] if isinstance(container, (list, tuple)) else container.get(key, _MISSING)
            if current is not value and _differs(current, value):
                return None
        if any(not np.array_equal(container[key], value) for container, key, value in self._arrays):
            return None
        current = [owner.get(key) for owner, key in self._slots]
        if any(about != _about(tensor) for about, tensor in zip(self._about, current, strict=True)):
            return None
        return current


def _behind(loss: Any) -> list[Any]:
    """Return the objects whose attributes a loss reads: the one that a method is of, what a partial function holds."""
    if isinstance(loss, nn.Module):
        return list(loss.modules())
    if isinstance(loss, partial):
        return [part for item in (loss.func, *loss.args, *loss.keywords.values()) for part in _behind(item)]
    return _behind(loss.__self__) if isinstance(loss, MethodType) else [loss]


def _is_ours(value: Any) -> bool:
    """Return whether an object is one that this package has left on a model, such as the account of its releases."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_weak(value: Any) -> bool:
    """Return whether a list only refers to tensors weakly, as torch's recurrent layers have one."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, ReferenceType) for one in value)


def _differs(current: Any, value: Any) -> bool:
    """Return whether an object was replaced by another that is not its equal."""
    if type(current) is not type(value) or isinstance(value, Tensor):
        return True
    try:
        return bool(current != value)
    except (RuntimeError, ValueError):
        # Tensors or arrays in it have no one answer.
        return True


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table that holds a parameter or buffer, and its key there."""
    path, _, key = name.rpartition(".")
    _, parameters, buffers = _torch.tables(model.get_submodule(path))
    return (parameters if key in parameters else buffers), key


def _about(tensor: Any) -> tuple[Any, ...]:
    """Return what of a tensor a graph depends on."""
    if tensor is None:
        return ()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def form_of(tree: Any) -> Hashable | None:
    """Return what equal batches have in common: structure, plain values, shapes, dtypes; None if incomparable."""
    leaves, structure = _torch.tree_flatten(tree)
    forms: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            forms.append((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN_VALUES):
            forms.append((type(leaf), leaf))
        else:
            return None
    return str(structure), tuple(forms)


def autocasts(kind: str) -> tuple[tuple[str, Any], ...]:
    """Return to which dtype autocast casts on a CPU and on a type of device; False where it is off."""
    return tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for device in sorted({"cpu", kind})
    )


def surroundings(kind: str) -> Hashable:
    """Return what besides batch and model decides on operations: autocast and its dtype, and torch's own modes."""
    return autocasts(kind), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


SOURCES: Final = Path(__file__).resolve().parents[1]
BEGUN: Final = time.time_ns()
_PLAIN: Final = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_NAMESPACES: Final = ("aten", "prims", "prim")


class NoKeyError(Exception):
    """A value has no description that is the same in every process, so that its graph is not cached."""


@dataclass(frozen=True)
class CacheEntry:
    """Where a compiled graph is stored: a folder, and the hash of all that the graph follows from."""

    folder: Path
    key: str

    def load(self) -> Callable[..., Any] | None:
        """Return what an earlier process compiled, None where there is nothing usable."""
        try:
            whole = (p for p in self.folder.glob(f"{self.key}-*") if p.name.endswith("-" + _hash(p.read_bytes())))
            path = next(whole, None)
            return None if path is None else _torch.load_compiled(path)
        except Exception as problem:  # noqa: BLE001 - whatever it was, the graph is compiled anew
            _log.info("a compiled graph is passed over (%s: %s)", type(problem).__name__, problem)
            return None

    def save(self, function: Callable[..., Any]) -> None:
        """Write what `ghostclip._torch.compiled` returned, whole or not at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                path = Path(scratch, "graph")
                _torch.save_compiled(function, path)
                path.replace(self.folder / f"{self.key}-{_hash(path.read_bytes())}")
        except Exception as problem:  # noqa: BLE001 - the graph runs as well without
            _log.info("a compiled graph cannot be kept (%s: %s)", type(problem).__name__, problem)


def entry_of(graph: fx.GraphModule, axes: Axes, *others: object) -> CacheEntry | None:
    """Return where the compiled form of a graph is stored; ``others`` are plain values and objects of this package."""
    # None where torch stores no compiled code, or not all can be described.
    folder = _torch.compiler_cache()
    if folder is None:
        return None
    try:
        parts = list(_nodes(graph, axes)), _plain(others), _here(graph), _sources(SOURCES)
    except (NoKeyError, OSError) as problem:
        _log.info("the compiled graph is not kept: %s", problem)
        return None
    return CacheEntry(Path(folder, "ghostclip"), _hash(repr(parts).encode()))


def _plain(item: Any, numbers: Mapping[fx.Node, int] | None = None) -> Any:
    """Return a description of a value that is equal for equal values in every process; nodes by number."""
    kind = type(item)
    if kind in _PLAIN or kind is torch.memory_format:
        return f"{kind.__name__} {item!r}"
    if isinstance(item, fx.Node) and numbers is not None:
        return f"%{numbers[item]}"
    if isinstance(item, Mapping):
        return kind.__name__, *((_plain(key), _plain(value, numbers)) for key, value in item.items())
    if isinstance(item, (tuple, list)):
        return kind.__name__, *(_plain(each, numbers) for each in item)
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0] and hasattr(item, "__dict__"):
        return kind.__module__, kind.__qualname__, _plain(vars(item))
    raise NoKeyError(f"{kind.__module__}.{kind.__qualname__} has no plain description")


def _form(value: Any) -> object:
    """Return a tensor's shape, strides, dtype and device, or a description of another value."""
    if not isinstance(value, Tensor):
        return _plain(value)
    return tuple(value.shape), value.stride(), str(value.dtype), str(value.device)


def _nodes(graph: fx.GraphModule, axes: Axes) -> Iterator[object]:
    """Yield a description of every node of a graph, with where its samples lie."""
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    for node in numbers:
        values = [_form(leaf) for leaf in _torch.tree_leaves(node.meta.get("val"))]
        lies = node in axes.layouts, _plain(axes.layouts.get(node)), node in axes.depends, node in axes.summed
        yield node.op, _target(node, graph), _plain((node.args, node.kwargs), numbers), values, lies


def _target(node: fx.Node, graph: fx.GraphModule) -> object:
    """Describe the operation of a node: one of torch's own, or a constant by its content."""
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op == "get_attr" and type(tensor := operator.attrgetter(target)(graph)) is Tensor:
        content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
        return _form(tensor), _hash(content.numpy().tobytes())
    if getattr(target, "namespace", None) in _NAMESPACES or target is operator.getitem:
        return str(target)
    raise NoKeyError(f"{node.op} {target} is no operation of torch's own")


def _here(graph: fx.GraphModule) -> object:
    """Return a description of torch, the compiler's settings, the processor and the graph's devices."""
    values = (leaf for node in graph.graph.nodes for leaf in _torch.tree_leaves(node.meta.get("val")))
    environment: list[object] = [torch.__version__, torch.version.git_version, _torch.compiler_settings()]
    environment += [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    for device in sorted({str(leaf.device) for leaf in values if isinstance(leaf, Tensor)} - {"cpu"}):
        if not device.startswith("cuda"):
            raise NoKeyError(f"{device} is not told from others of its kind")
        environment += [device, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
    return environment


def _sources(folder: Path) -> str:
    """Return a hash of all sources of a package, which must be those that the process has loaded."""
    paths = sorted(folder.rglob("*.py"))
    if not paths or max(path.stat().st_mtime_ns for path in paths) > BEGUN:
        raise NoKeyError(f"sources in {folder} are not there, or have changed since the process began")
    return _hash(repr([(str(path.relative_to(folder)), _hash(path.read_bytes())) for path in paths]).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
BACKENDS: Final = ("inductor", "aten")
_SMALLER = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of the strategy "graph"; none changes what is released.

    Attributes:
        sizes: Physical batch sizes that graphs are compiled for; a batch is cut into parts of these, the last one
            padded. None for the size of the first batch and a quarter of it.
        check_every: Compare the graph with the eager engine on every k-th physical batch of a size beside the first
            one; 0 for the first alone.
        backend: "inductor", "aten" (the graph runs operation by operation), or what takes a graph and example inputs
            and returns a function.
        mode: A mode of ``torch.compile`` for Inductor, such as "max-autotune"; None for its default.
        most: Graphs that are compiled before other shapes stay eager.
        cache: Whether what Inductor compiled is kept in the folder of its cache and found there by later processes.
            With CUDA graphs it never is.

    Raises:
        InvalidOptionError: If one of them is out of range.
    """

    sizes: tuple[int, ...] | None = None
    check_every: int = 0
    backend: str | Backend = "inductor"
    mode: str | None = None
    most: int = 8
    cache: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            _validate.choice(self.backend, "backend", BACKENDS)
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 2):
            raise InvalidOptionError(f"sizes={self.sizes!r}: give physical batch sizes of 2 or more.")
        if self.check_every < 0 or self.most < 1:
            raise InvalidOptionError(f"check_every={self.check_every}, most={self.most}: must be at least 0 and 1.")
        if self.mode is not None and self.backend != "inductor":
            raise InvalidOptionError(f"mode={self.mode!r} is an option of backend='inductor' only.")

    def compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph.

        Args:
            graph: Functional aten operations.
            inputs: Tensors of the shapes that it is for.

        Returns:
            What takes such tensors and returns its outputs.
        """
        if callable(self.backend):
            return self.backend(graph, inputs)
        if self.backend == "aten":
            return graph
        return _torch.compiled(graph, inputs, self.inductor())

    def inductor(self) -> dict[str, Any]:
        """Return the options for Inductor."""
        # Random operations stay those of the generator, so that seeds mean what they mean without compiling.
        # Sizes and strides are those of its inputs: the batch is of one form and contiguous, parameters are watched.
        return {
            "fallback_random": True,
            "size_asserts": False,
            "alignment_asserts": False,
            "cpp.threads": _torch.compile_threads(),
            **(_torch.inductor_options(self.mode) if self.mode else {}),
        }

    def has_regions(self) -> bool:
        """Return whether parts that recur are compiled once."""
        return self.backend == "inductor" and _torch.region_call() is not None

    def uses_cuda_graphs(self) -> bool:
        """Return whether a GPU runs a step as one CUDA graph."""
        return self.backend == "inductor" and bool(self.inductor().get("triton.cudagraphs"))

    def saves(self) -> bool:
        """Return whether compiled graphs are kept on disk."""
        return self.cache and self.backend == "inductor" and not self.uses_cuda_graphs()


class Part(NamedTuple):
    """Part of a batch: its first sample, number of samples, and size with padding."""

    start: int
    samples: int
    size: int


class Sizes:
    """Physical batch sizes that graphs are compiled for, and how a batch is cut into them."""

    def __init__(self, sizes: Sequence[int] | None, *, grows: bool = False) -> None:
        self._fixed = sizes is not None and not grows
        self._sizes = sorted(set(sizes or ()), reverse=True)

    @property
    def all(self) -> tuple[int, ...]:
        """The sizes, the largest first."""
        return tuple(self._sizes)

    def parts(self, samples: int) -> list[Part]:
        """Return the parts of a batch, the largest first; only the last one is padded."""
        if not self._fixed and (not self._sizes or samples >= 2 * self._sizes[0]):
            self._sizes = sorted({max(2, samples), max(2, -(-samples // _SMALLER))}, reverse=True)
        parts: list[Part] = []
        start = 0
        while start < samples:
            size = self._next(samples - start)
            count = min(size, samples - start)
            parts.append(Part(start, count, size))
            start += count
        return parts

    def _next(self, left: int) -> int:
        """Return the size of the next part: the largest that is filled, or a smaller one that takes all as cheaply."""
        filled = next((size for size in self._sizes if size <= left), self._sizes[-1])
        in_several = -(-left // filled) * filled
        return next((size for size in reversed(self._sizes) if left <= size <= in_several), filled)


def part_of(tree: Any, part: Part, whole: int, axis_of: Callable[[Any], int | None], *, padded: bool) -> Any:
    """Return some samples of a batch in the same containers; with ``padded``, the last one repeated to the size."""
    size = part.size if padded else part.samples

    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        axis = axis_of(leaf)
        if axis is None:
            return leaf.contiguous() if padded else leaf
        rows = leaf if part.samples == whole else leaf.narrow(axis, part.start, part.samples)
        if size > part.samples:
            last = rows.narrow(axis, part.samples - 1, 1)
            more = last.expand(*last.shape[:axis], size - part.samples, *last.shape[axis + 1 :])
            rows = torch.cat([rows, more], axis)
        return rows.contiguous() if padded else rows

    return _tree.mapped(taken, tree)


@dataclass(frozen=True)
class Outcome:
    """Results of a graph for one physical batch, without padding."""

    certain_B: Tensor  # samples whose norms are finite and certain
    losses_B: Tensor
    norm_GB: list[Tensor]
    coef_GB: list[Tensor]
    sums: dict[str, Tensor]  # the clipped sum of every trainable parameter, by name
    extra: list[Any]  # what the loss function returned beside the losses, in a list; empty for nothing
    as_traced: bool  # whether branches on data went the way that the graph goes


class CompiledStep:
    """The private step of one physical batch size as one compiled graph."""

    def __init__(  # noqa: PLR0913 - each is a part of what is compiled
        self,
        model: nn.Module,
        loss: LossFunction,
        tree: Any,
        axis_of: Callable[[Any], int | None],
        clipping: Clipping,
        options: GraphOptions,
        *,
        reads: Any = None,
        refuses: Callable[[fx.GraphModule], str | None] = lambda _: None,
        branches: Sequence[bool] | None = None,
    ) -> None:
        # `reads`: an object whose attributes the loss reads. `refuses`: returns why a graph that is not on disk is not
        # compiled. `branches`: which way branches on data go, where that is settled.
        # Nobody may listen to the model's forwards. `tree` is a batch (args, kwargs) of the size; `axis_of` returns the
        # sample axis of a tensor of it.
        inputs = inputs_of(model, tree, axis_of)
        # samples of a physical batch, padding included
        self.size = next(
            x.shape[axis] for x, axis in zip(inputs.tensors, inputs.in_batch, strict=True) if axis is not None
        )
        more = part_of(tree, Part(0, self.size, self.size + 1), self.size, axis_of, padded=True)
        axes_of_more = iter(inputs.in_batch)
        # the graph of forward, loss and backward that it was made of
        self.joint = trace(model, loss, inputs, branches, reads)
        self.branches = self.joint.branches
        grown = trace(model, loss, inputs_of(model, more, lambda _: next(axes_of_more)), self.branches, reads)
        axes = analysed(self.joint, grown, inputs, self.size)
        self._extra_axes = _extra_axes(self.joint, axes, len(inputs.trainable))
        self._trainable, self._extra = inputs.trainable, self.joint.extra
        self._groups = len(clipping.layout.bounds)
        self._in_batch, constants = inputs.in_batch, _constants(self.joint.graph)
        self._watched = Watched(model, (*inputs.trainable, *inputs.held), reads, constants)
        # What samples have in common, and how often it had been written to.
        self._common = [x.detach().clone() for x in self._shared(inputs.tensors)]
        self._constants = [(x, _torch.known_version(x)) for x in constants]
        self.random = draws(self.joint.graph)  # whether it draws random numbers
        self.key = ""  # of what is on disk; empty where nothing is
        self._refuses = refuses
        self._is_overwritten = options.uses_cuda_graphs()
        flat = inputs.flat(model)
        valid_B = torch.ones(self.size, dtype=torch.bool, device=flat[0].device)
        # the graph of the private step: functional aten operations; None where its compiled form was on disk
        self.graph: fx.GraphModule | None = None
        self._run = self._compiled([valid_B, *flat], axes, inputs, clipping, options)
        # whether it was compared with the eager engine
        self.verified, self.runs = False, 0
        # The policy and what the loss reads are told from others by their identity, which must not be given anew.
        self._kept = clipping, reads
        self._valid: dict[int, Tensor] = {self.size: valid_B}

    def _compiled(
        self, flat: list[Tensor], axes: Axes, inputs: Inputs, clipping: Clipping, options: GraphOptions
    ) -> Callable[..., Any]:
        """Return the compiled step, from disk where an equal one was compiled before."""
        about = inputs.trainable, inputs.held, inputs.in_batch, surroundings(flat[0].device.type)
        entry = entry_of(self.joint.graph, axes, *about, clipping, options.inductor()) if options.saves() else None
        with torch.no_grad(), full_precision():
            loaded = None if entry is None else entry.load()
        refused = None if loaded is not None else self._refuses(self.joint.graph)
        if refused is not None:
            raise NoGraphError(refused)
        made = self._made(flat, axes, inputs, clipping, options) if loaded is None else loaded
        if entry is not None:
            self.key = entry.key
            if loaded is None:
                entry.save(made)
        return made

    def _made(
        self, flat: list[Tensor], axes: Axes, inputs: Inputs, clipping: Clipping, options: GraphOptions
    ) -> Callable[..., Any]:
        """Rewrite and compile the graph; without regions where these fail."""

        def made(regions: Regions | None) -> Callable[..., Any]:
            self.graph = rewritten(private_step(self.joint, axes, inputs, clipping, regions), flat, regions)
            with torch.no_grad(), full_precision():
                return options.compiled(self.graph, flat)

        if options.has_regions():
            try:
                return made(Regions())
            except Exception as problem:  # noqa: BLE001 - it is tried in another way
                _log.info("a step is compiled without regions (%s)", first_line(problem))
        try:
            return made(None)
        except NoGraphError:
            raise
        except Exception as problem:
            raise NoGraphError(f"it cannot be compiled ({type(problem).__name__}: {first_line(problem)})") from problem

    def _shared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a batch that have no sample axis."""
        return [x for x, axis in zip(tensors, self._in_batch, strict=True) if axis is None]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all that samples share holds the values that it had in the trace."""
        # A factor on all losses may follow the batch: the eager engine compares it with earlier steps.
        unchanged = all(_torch.known_version(constant) == version for constant, version in self._constants)
        return unchanged and all(map(same_content, self._shared(tensors), self._common))

    def run(self, tensors: Sequence[Tensor], count: int) -> Outcome | None:
        """Compute a padded physical batch of which the first ``count`` samples count."""
        # None where the model is no longer what the graph was traced on.
        model_tensors = self._watched.tensors()
        if model_tensors is None:
            return None
        self.runs += 1
        with torch.no_grad(), full_precision(), _torch.overrides_off():
            outputs = self._run(self._valid_B(count), *model_tensors, *tensors)
            # The next run of a CUDA graph writes to the same memory.
            certain_B, losses_B, *rest = [x.clone() for x in outputs] if self._is_overwritten else outputs
        groups, names = self._groups, self._trainable
        last, flags = 2 * groups + len(names), [rest.pop() for _ in self.branches][::-1]
        short = count < self.size
        norm_GB, coef_GB = (
            [part_B[:count] for part_B in parts] if short else parts
            for parts in (rest[:groups], rest[groups : 2 * groups])
        )
        extra = [
            x if axis is None or not short else x.narrow(axis, 0, count)
            for x, axis in zip(rest[last:], self._extra_axes, strict=True)
        ]
        sums = dict(zip(names, rest[2 * groups : last], strict=True))
        as_traced = [bool(flag) for flag in flags] == list(self.branches)
        return Outcome(
            certain_B[:count], losses_B[:count], norm_GB, coef_GB, sums, restored(self._extra, extra), as_traced
        )

    def _valid_B(self, count: int) -> Tensor:
        """Return which rows of a padded batch are samples."""
        valid_B = self._valid.get(count)
        if valid_B is None:
            whole = self._valid[self.size]
            valid_B = self._valid[count] = torch.arange(self.size, device=whole.device) < count
        return valid_B


def _constants(graph: fx.GraphModule) -> list[Tensor]:
    """Return the tensors that a graph holds: neither the model's own nor given."""
    held = (getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr")
    return [value for value in held if isinstance(value, Tensor)]


def _extra_axes(traced: Traced, axes: Axes, trainable: int) -> list[int | None]:
    """Return the sample axes of the loss function's other results."""
    sample_axes: list[int | None] = []
    outputs = outputs_of(traced.graph)
    for node in outputs[1 + trainable : len(outputs) - len(traced.branches)]:
        layout = axes.layouts.get(node)
        if (layout is None and node in axes.depends) or (layout is not None and layout.rows > 1):
            raise NoGraphError("what its loss function returns beside the losses has no axis of one entry per sample")
        sample_axes.append(None if layout is None else layout.axis)
    return sample_axes
