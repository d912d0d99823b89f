"""Compiled graphs on disk, beside Inductor's own cache, for the processes that come after.

A file is found by the hash of all that rewriting and compiling read: every node of the traced graph with its operation,
arguments, constants' contents, shapes, strides, dtypes and devices; where samples lie in it; names of parameters; clip
groups, bounds and policy; options and settings of the compiler, autocast, threads; torch, the sources of this package,
the device. What was made of equal things in another process is what would be made here. What has no description in
plain values (a policy of the user's own, a custom operation) is neither kept nor looked for.

Tracing at both batch sizes and the analysis of axes are not left out: a loss that is divided by the number of samples
has, at one size, the graph of one that is divided by a constant. The first batch is compared as ever.

Torch writes and reads the files as those of its own caches, in the user's cache folder. A name ends in the hash of the
content: a file that was cut or changed is passed over.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.graph.axes import Axes

_log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).resolve().parents[1]
BEGUN: Final = time.time_ns()
_PLAIN: Final = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_NAMESPACES: Final = ("aten", "prims", "prim")


class NoKeyError(Exception):
    """One description may stand for different things in other processes."""


@dataclass(frozen=True)
class CacheEntry:
    """Where a compiled graph is stored: a folder, and the hash of all that the graph follows from."""

    folder: Path
    key: str

    def found(self) -> Callable[..., Any] | None:
        """Return what an earlier process compiled, None where there is nothing usable."""
        try:
            whole = (p for p in self.folder.glob(f"{self.key}-*") if p.name.endswith("-" + _hash(p.read_bytes())))
            path = next(whole, None)
            return None if path is None else _torch.load_compiled(path)
        except Exception as problem:  # noqa: BLE001 - whatever it was, the graph is compiled anew
            _log.info("a compiled graph is passed over (%s: %s)", type(problem).__name__, problem)
            return None

    def keep(self, function: Callable[..., Any]) -> None:
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
    """Describe a value, nodes by their numbers, by text that is the same for equal values in every process."""
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
    if not isinstance(value, Tensor):
        return _plain(value)
    return tuple(value.shape), value.stride(), str(value.dtype), str(value.device)


def _nodes(graph: fx.GraphModule, axes: Axes) -> Iterator[object]:
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
    """Describe torch, the compiler's settings, the processor and all devices of a graph."""
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
