"""Where in a model samples start to mix: the first module whose output for one sample follows another sample.

The model runs on the batch and once more with one sample replaced by another; forward hooks note what goes into and
comes out of every module. Whatever changes outside that sample's rows is mixed.

Shape letter: B samples.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.nodes import edge_of
from ghostclip.capture.row_maps import candidates
from ghostclip.capture.sample_axis import sample_axis_at
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.checks.module_state import restored

# Samples that are replaced in turn; which of them others follow is not known beforehand.
_MAX_REPLACED: Final = 8
_SEED: Final = 20240
# Tensors that all samples share, although they may be as long as a batch: masks of positions, matrices of a graph.
SHARED: Final = _torch.weak_table()


@dataclass(frozen=True)
class DependenceStart:
    """Where samples start to mix."""

    path: str  # path of the module (empty for the model itself)
    module: nn.Module
    before: str  # set where its own code mixes between two of its children: path of the child that is handed mixed rows
    shape: tuple[int, ...]  # shape of the first mixed tensor
    batch_size: int  # B
    sample: int  # the sample that was replaced, and whose replacement others follow

    @property
    def place(self) -> str:
        """The module's path and type."""
        return f"{self.path or 'model'} ({type(self.module).__name__})"

    def describe(self) -> str:
        """Return where it is, for the middle of a sentence."""
        if self.before:
            return f"the forward of {self.place} itself, before it calls {self.before!r}"
        itself = " itself" if next(self.module.children(), None) is not None else ""
        return f"{'the forward of ' if itself else ''}{self.place}{itself}, whose output has shape {self.shape}"

    def remedy(self) -> str:
        """Return what can be done about it, by what kind of module it is."""
        kind = type(self.module).__name__
        if isinstance(self.module, _torch.AnyBatchNorm) or "BatchNorm" in kind:
            return "Replace it by GroupNorm (ModuleValidator.fix does), or put it in eval mode."
        if hasattr(self.module, "batch_first") or "ttention" in kind:
            return (
                "It works across the batch: give it its axes in the order it expects, and say batch_first alike to the "
                "module and to ghostclip."
            )
        if self.shape == (self.batch_size, self.batch_size) and not self.before:
            return (
                "Its output compares every sample with every other, as contrastive objectives do: a sample has no "
                "gradient of its own there. Train on a loss of each sample's own outputs."
            )
        return "Compute each sample's output from its own rows (no mean, norm, sort or roll over the batch axis)."


@dataclass(frozen=True)
class _Event:
    """Tensors that went into or came out of one call of a module."""

    path: str
    module: nn.Module
    is_output: bool  # else its inputs
    tensors: list[Tensor]


# By path, whether it is an output, and the number of the module's call.
_Events = dict[tuple[str, bool, int], _Event]


@dataclass(frozen=True)
class _Replaced:
    """Which sample of the batch was replaced."""

    sample: int
    batch_size: int
    axis: int


def dependence_start(
    model: nn.Module, run: Callable[[Any], object], batch: Any, *, batch_size: int, axis: int
) -> DependenceStart | None:
    """Find where samples start to mix."""
    # Hooks are on the model only while this runs; its buffers may be updated. `run` is called with the global random
    # state at the same place each time. None also where that cannot be told.
    if batch_size < 2:
        return None
    base = _trace(model, run, batch)
    starts: list[tuple[int, DependenceStart]] = []
    for sample in spread_out(batch_size, _MAX_REPLACED):
        changed = replaced(batch, sample, batch_size=batch_size, axis=axis)
        start = _first_mixed(base, _trace(model, run, changed), replaced=_Replaced(sample, batch_size, axis))
        if start is not None:
            starts.append(start)
    return min(starts, key=lambda item: item[0])[1] if starts else None


def replaced(batch: Any, sample: int, *, batch_size: int, axis: int) -> Any:
    """Return a batch in which one sample is a copy of the next one."""
    order = list(range(batch_size))
    order[sample] = (sample + 1) % batch_size
    return taken(batch, order, batch_size=batch_size, axis=axis)


def taken(batch: Any, samples: Sequence[int], *, batch_size: int, axis: int, folded: bool = False) -> Any:
    """Return some samples of a batch, the batch axis kept, those without B samples as they are."""
    # `folded`: of an input with several rows for each sample, one sample's after another's, their rows are taken.

    def pick(leaf: Any) -> Any:
        batch_axis = batch_axis_of(leaf, batch_size=batch_size, axis=axis)
        if batch_axis is not None:
            return of_samples(leaf, samples, batch_axis)
        rows = rows_of_each(leaf, batch_size=batch_size, axis=axis) if folded else 0
        return of_samples(leaf, [sample * rows + row for sample in samples for row in range(rows)], 0) if rows else leaf

    return _tree.mapped(pick, batch)


def record_shared(batch: Any, size: int | None, seen: set[tuple[int, ...]], whose: int = 0) -> None:
    """Record tensors that all samples share in `SHARED`: they were as long beside another number of samples."""
    # `seen`: by place and shape those of earlier batches; added to.
    for place, tensor in enumerate(_tree.tensors(batch)):
        key = whose, place, *tensor.shape
        if key in seen:
            SHARED[tensor] = None
        elif tensor in SHARED or (size and tensor.dim() and size not in tensor.shape and len(tensor) % size):
            seen.add(key)


def batch_axis_of(leaf: Any, *, batch_size: int, axis: int) -> int | None:
    """Return the axis of size B of an input: as the graph shows it, the expected one, or 0; None without one."""
    if not isinstance(leaf, (Tensor, np.ndarray)) or (isinstance(leaf, Tensor) and leaf in SHARED):
        return None
    # The graph shows it of states of a recurrent layer (layers, B, ...) that another forward made.
    shown = sample_axis_at(edge_of(leaf)) if getattr(leaf, "grad_fn", None) is not None else None
    first = axis if shown is None or shown.order is not None or shown.axis < 0 else shown.axis
    for candidate in (first, axis, 0):
        if candidate < leaf.ndim and leaf.shape[candidate] == batch_size:
            return candidate
    return None


# Others have no sums, or none of real numbers.
_SUMMED: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


class Alike(NamedTuple):
    """How many samples have the same row of a tensor as each of them."""

    numbers: int  # entries of a row
    like_B: Tensor

    @property
    def all(self) -> bool:
        """Whether they are all alike, so that exchanging them shows nothing."""
        return bool(self.like_B.min() == len(self.like_B))


def alike(tensors: Iterable[tuple[Tensor, int | None]]) -> list[Alike]:
    """Return how many samples are alike in tensors, given with the samples' axis, that are outside of the graph."""
    found = list[Alike]()
    for tensor, axis in tensors:
        other = tensor.requires_grad or tensor.is_meta or tensor.layout is not torch.strided
        if axis is not None and type(tensor) is Tensor and tensor.dtype in _SUMMED and not other:
            rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
            # By place, as rows of one number among zeros have one sum.
            weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float32, device=rows.device).sqrt()
            _, kinds, counts = (rows * weights).sum(1).unique(return_inverse=True, return_counts=True)
            found.append(Alike(rows.shape[1], counts[kinds]))
    return found


def rare_sample(found: Iterable[Alike]) -> int:
    """Return the sample that is least like others where most are alike in something; -1 for none."""
    uneven = [one.like_B for one in found if one.like_B.max() > one.like_B.min()]
    return int(max(uneven, key=lambda like_B: int(like_B.max())).argmin()) if uneven else -1


def rows_of_each(leaf: Any, *, batch_size: int, axis: int) -> int:
    """Return how many rows every sample may have along the first axis of an input without a batch axis; 0 for none."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) % batch_size:
        return 0
    return 0 if batch_axis_of(leaf, batch_size=batch_size, axis=axis) is not None else len(leaf) // batch_size


def of_samples(leaf: Any, samples: Sequence[int], axis: int) -> Any:
    """Return the rows of some samples of a tensor or an array, outside the graph; repetitions are copies."""
    if isinstance(leaf, np.ndarray):
        return leaf.take(samples, axis)
    if leaf.is_nested:
        rows = leaf.detach().unbind()
        taken = torch.nested.as_nested_tensor([rows[sample] for sample in samples], layout=leaf.layout)
        return taken.requires_grad_(leaf.requires_grad)
    taken = leaf.detach().index_select(axis, torch.tensor(samples, device=leaf.device))
    return taken.requires_grad_(leaf.requires_grad)


def with_lists(tree: Any, samples: Sequence[int], *, batch_size: int, axis: int) -> Any:
    """Return inputs with every list of as many values as there are samples read as one value for each."""
    # `samples`: those that are left, in what order. Lists of containers, and of tensors that have an axis for samples
    # themselves, stay as they are.
    if isinstance(tree, dict):
        return type(tree)((k, with_lists(v, samples, batch_size=batch_size, axis=axis)) for k, v in tree.items())
    if type(tree) not in (list, tuple):
        return tree
    if is_of_samples(tree, batch_size=batch_size, axis=axis):
        return type(tree)([tree[sample] for sample in samples])
    return type(tree)([with_lists(item, samples, batch_size=batch_size, axis=axis) for item in tree])


def has_lists(tree: Any, *, batch_size: int, axis: int) -> bool:
    """Return whether `with_lists` would find any."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif type(tree) in (list, tuple) and is_of_samples(tree, batch_size=batch_size, axis=axis):
        return True
    return type(tree) in (list, tuple) and any(has_lists(item, batch_size=batch_size, axis=axis) for item in tree)


def is_of_samples(values: Sequence[Any], *, batch_size: int, axis: int) -> bool:
    """Return whether a list may hold one value for each sample: a number, a string, a tensor or an array of its own."""
    # Not where values are containers, or hold samples along an axis.
    plain = len(values) == batch_size and not any(isinstance(value, (list, tuple, Mapping)) for value in values)
    return plain and any(batch_axis_of(value, batch_size=batch_size, axis=axis) is None for value in values)


@contextmanager
def same_randomness(device_tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Start the global generators at a fixed place, and put them back afterwards."""
    # `device_tensors`: on their devices the generators matter as well.
    all_devices = {tensor.device for tensor in device_tensors}
    devices = sorted(device.index or 0 for device in all_devices if device.type == "cuda")
    with torch.random.fork_rng(devices=devices):
        if any(device.type not in ("cpu", "cuda", "meta") for device in all_devices):
            torch.manual_seed(_SEED)
        # Otherwise not `torch.manual_seed`, which sets every GPU's generator, those that are not put back as well.
        torch.default_generator.manual_seed(_SEED)
        for index in devices:
            with torch.cuda.device(index):
                torch.cuda.manual_seed(_SEED)
        yield


def spread_out(batch_size: int, most: int) -> list[int]:
    """Return so many samples at most, in order: all, or the first, the last and some between."""
    steps = min(batch_size, most)
    return sorted({round(step * (batch_size - 1) / max(1, steps - 1)) for step in range(steps)})


def _trace(model: nn.Module, run: Callable[[Any], object], batch: Any) -> _Events:
    """Run a model on a batch with fixed random numbers, and record what goes into and out of every module."""
    events: _Events = {}
    calls: Counter[tuple[str, bool]] = Counter()

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        is_output = bool(output)
        calls[path, is_output] += 1
        # Cloned, since later operations may change them in place.
        tensors = [leaf.detach().clone() for leaf in _tree.leaves(output or (args, kwargs)) if _is_plain(leaf)]
        events[path, is_output, calls[path, is_output]] = _Event(path, module, is_output, tensors)

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(record, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(record, path), with_kwargs=True))
    try:
        with same_randomness(model.parameters()):
            run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return events


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, TrackedTensor) and not leaf.is_sparse


def _first_mixed(base: _Events, changed: _Events, *, replaced: _Replaced) -> tuple[int, DependenceStart] | None:
    """Return the first event of the base run that is mixed and stays so, with its number."""
    events = list(base.values())
    # Data may decide which modules run: what has no counterpart cannot be compared.
    mixed = [_mixed_shape(event, changed.get(key), replaced) for key, event in base.items()]
    for number, event in enumerate(events):
        shape = mixed[number]
        if shape and not _undone(event, events[number + 1 :], mixed[number + 1 :]):
            return number, _start(event, events, shape, replaced)
    return None


def first_difference(
    model: nn.Module,
    run: Callable[[Any], object],
    batches: tuple[Any, Any],
    differs: Callable[[Tensor, Tensor], bool | None],
) -> str:
    """Say where runs on two batches come apart first, as what they hold is compared."""
    # `model`, `run`: as for `dependence_start`. `differs` compares a value of the first run with one of the second.
    # Returns text for the middle of a sentence; '' where no module shows it.
    base, other = (_trace(model, run, batch) for batch in batches)
    # What is run is the model's forward, whose own hooks tell nothing.
    base.setdefault(("", False, 0), _Event("", model, False, []))
    for key, event in base.items():
        tensors = other[key].tensors if key in other else []
        if len(tensors) == len(event.tensors) and any(map(differs, event.tensors, tensors)):
            shape = tuple(event.tensors[0].shape)
            return _start(event, list(base.values()), shape, _Replaced(0, 0, 0)).describe()
    return ""


def _undone(event: _Event, later: Sequence[_Event], mixed: Sequence[tuple[int, ...] | None]) -> bool:
    """Return whether an outer module returns rows in order again, so that an event inside it (experts) is no mixing."""
    seen = {event.path} if event.is_output else set()
    for other, shape in zip(later, mixed, strict=True):
        around = not other.path or event.path == other.path or event.path.startswith(f"{other.path}.")
        if other.is_output and around and other.path not in seen:
            seen.add(other.path)
            if shape == ():
                return True
    return False


def _start(event: _Event, events: Sequence[_Event], shape: tuple[int, ...], replaced: _Replaced) -> DependenceStart:
    """Return the description of where samples mix, from the first mixed event."""
    if event.is_output:
        return DependenceStart(event.path, event.module, "", shape, replaced.batch_size, replaced.sample)
    # Mixed rows that are handed to a child were mixed by the code around it.
    parents = {item.path: item.module for item in events}
    outer = event.path.rpartition(".")[0]
    while outer not in parents and outer:
        outer = outer.rpartition(".")[0]
    module = parents.get(outer, event.module)
    return DependenceStart(outer, module, event.path, shape, replaced.batch_size, replaced.sample)


def _mixed_shape(event: _Event, other: _Event | None, replaced: _Replaced) -> tuple[int, ...] | None:
    """Return the shape of an event's first mixed tensor, () where rows kept apart, None where that cannot be told."""
    if other is None or len(other.tensors) != len(event.tensors):
        return None
    pairs = zip(event.tensors, other.tensors, strict=True)
    by_tensor = [(tuple(first.shape), _is_mixed(first, second, replaced)) for first, second in pairs]
    told = [mixed for _, mixed in by_tensor if mixed is not None]
    return next((shape for shape, mixed in by_tensor if mixed), () if told else None)


def _is_mixed(first: Tensor, second: Tensor, replaced: _Replaced) -> bool | None:
    """Return whether a tensor changed in rows of other samples than the replaced one; None where rows are unknown."""
    if first.shape != second.shape or first.dtype != second.dtype or first.numel() == 0:
        return None
    maps = candidates(first.shape, replaced.batch_size, axis=replaced.axis) if first.dim() else []
    if not maps:
        return None
    differs = _differs(first, second)
    splits = (row_map.split(differs, first.dim(), replaced.batch_size) for row_map in maps)
    touched = ({row for row, rows_T in enumerate(rows_BT) if rows_T.any()} for rows_BT in splits)
    return bool(differs.any()) and not any(rows <= {replaced.sample} for rows in touched)


def _differs(first: Tensor, second: Tensor) -> Tensor:
    """Return where two runs differ by more than another order of summation would explain."""
    if not (first.is_floating_point() or first.is_complex()):
        return first != second
    scale = first.abs().nan_to_num(nan=0.0, posinf=0.0).amax()
    allowed = scale * torch.finfo(first.dtype).eps ** 0.75
    return ~torch.isclose(first, second, rtol=0.0, atol=float(allowed), equal_nan=True)


def where_dependence_starts(model: nn.Module, module: nn.Module, inputs: Any, *, batch_size: int, axis: int) -> str:
    """Say where a forward that was found to mix samples starts to do so, and what to do."""
    # Returns sentences for an error message; where the place is not known, none is guessed.
    with torch.no_grad(), restored(model):
        try:
            start = dependence_start(model, lambda i: module(*i[0], **i[1]), inputs, batch_size=batch_size, axis=axis)
        except Exception:  # noqa: BLE001 - refused anyway: what it does on other samples must not hide why
            start = None
    if start is None:
        return (
            "Where it starts does not show in the outputs of its modules; ghostclip.validate(model, batch, loss_fn) "
            "looks closer. Compute each sample's output from its own rows."
        )
    return f"It starts in {start.describe()}. {start.remedy()}"
