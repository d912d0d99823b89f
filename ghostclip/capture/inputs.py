"""What a model's inputs say of a forward: the number of samples, packed sequences, bags, and dummies for empty batches.

*Packed sequences*: the rows of all steps lie one after the other; step t has those of the sequences that are at least
so long, in the order in which the sequences were packed, longest first. Row by row that says the position of a sequence
in the packed batch; which sample stands there is the order in which the padded batch was sorted before.

*Bags*: flat ids with offsets, as `nn.EmbeddingBag` takes them. A bag is a sample, whatever the number of ids.

*Rows outside the graph* (`RowTracker`): data that a model puts into another order before any parameter meets it. Rows
of tensors in the graph are followed through autograd. Token ids, and whatever else autograd does not track, are not
there: a model that sorts its batch by length, drops rows or repeats them would have its rows counted to the wrong
samples. While a forward runs, every selection along the batch axis of such a tensor is therefore seen, and its result
carries the sample of each row. What cannot be followed is of *unknown order*: meeting a parameter, it makes the forward
one that is proved by evidence. It also numbers the calls, for the layouts that a resized forward has shown.

Seeing every function of a forward costs as much as a small layer does. Where a watched forward has shown that data
reaches parameters as it came in (token ids, images; as they are or reshaped), later ones are not watched. Where it has
shown that other data does, but nothing in another order (what frozen layers compute before the first adapter), later
ones are watched until as often. One in which something else meets a parameter all the same is run once more, and
watched.

Shape letters: N ids, B bags (samples), K ids of the longest bag.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip._tree import leaves as leaves_of
from ghostclip.capture.call_sites import Calls, Key, Resized
from ghostclip.capture.nodes import under_checkpoint
from ghostclip.capture.sample_axis import (
    INDEX_KEY,
    LOST,
    ROWS_KEY,
    UNKNOWN_ORDER,
    SampleAxis,
    columns_of,
    is_written,
    sample_axis_at,
    set_metadata,
)
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.errors import BatchAxisError, UnsupportedModelError

# Where keyword inputs begin: their order says nothing.
_MAIN_INPUTS: Final = ("input_ids", "inputs_embeds", "pixel_values", "input_features")
_NO_SAMPLES: Final = (
    "the model was called without a tensor that has a batch axis, so the number of samples is unknown. Call it with "
    "tensors, or with tuples, lists and dicts of them (torch.from_numpy for arrays); a data class is looked into once "
    "it is registered: torch.export.register_dataclass(YourBatch)."
)


def positions(batch_sizes: Tensor) -> Tensor:
    """Return the position in the packed batch of every row, ``(rows,)``, on the CPU."""
    sizes = batch_sizes.cpu()
    starts = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)


def rows_of(packed: PackedSequence) -> Tensor:
    """Return the sample of every row of a packed batch from outside the model, ``(rows,)``, on the CPU."""
    # Without `sorted_indices`, samples stand in order.
    position = positions(packed.batch_sizes)
    return position if packed.sorted_indices is None else packed.sorted_indices.cpu()[position]


def packed_inputs(tree: Any) -> Iterator[PackedSequence]:
    """Yield the packed sequences among a model's inputs, in order."""
    for leaf in leaves_of(tree, is_leaf=is_packed):
        if is_packed(leaf):
            yield leaf


def is_packed(item: Any) -> bool:
    """Return whether an input is a packed sequence, which counts as one."""
    return isinstance(item, PackedSequence)


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
    """Return the number of samples in a model's inputs: the batch axis of the first tensor."""
    if args and type(args[0]) is Tensor and args[0].dim() > axis:
        return args[0].shape[axis]
    first = [kwargs[key] for key in _MAIN_INPUTS if key in kwargs] if kwargs else []
    for tree in (args, first, kwargs):
        for leaf in leaves_of(tree, is_leaf=is_packed):
            if is_packed(leaf):
                return int(leaf.batch_sizes[0])
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[axis if axis < leaf.dim() else 0]
    raise BatchAxisError(_NO_SAMPLES)


def with_dummy(item: Any, axis: int) -> Any:
    """Return zeros for one dummy sample instead of a tensor without samples; anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    batch_axis = axis if axis < item.dim() else 0
    if item.shape[batch_axis] != 0:
        return item
    shape = list(item.shape)
    shape[batch_axis] = 1
    return item.new_zeros(shape)


def without_dummy(item: Any, axis: int) -> Any:
    """Return a tensor of one sample without its dummy, a view of size 0; anything else as it is."""
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    batch_axis = axis if axis < item.dim() else 0
    return item.narrow(batch_axis, 0, 0) if item.shape[batch_axis] == 1 else item


class Bags:
    """Finds flat ids and offsets among a model's inputs, and gives checks one row per sample instead."""

    def __init__(self, model: nn.Module) -> None:
        """Look for embedding bags in a model."""
        bags = [module for module in model.modules() if isinstance(module, nn.EmbeddingBag)]
        self._any = bool(bags)  # whether there is an embedding bag
        self._closed = any(bag.include_last_offset for bag in bags)  # offsets end with the number of ids

    def batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
        """Return the number of samples in a model's inputs: of bags, where ids are flat, else as `batch_size_of`."""
        bags = self._find(_torch.tree_flatten((args, dict(kwargs)))[0]) if self._any else None
        if bags is None:
            return batch_size_of(args, kwargs, axis)
        if self._closed:
            raise BatchAxisError(
                "nn.EmbeddingBag(include_last_offset=True) with flat ids: there are more offsets than samples. "
                "Build it with include_last_offset=False and pass offsets[:-1]."
            )
        return len(bags[1])

    def as_rows(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return a forward on flat ids as one on a matrix with a row per sample, whose rows may be exchanged."""
        # All three as they are where no ids are flat.
        if not self._any:
            return module, args, kwargs
        leaves, tree = _torch.tree_flatten((args, dict(kwargs)))
        bags = self._find(leaves)
        if bags is None:
            return module, args, kwargs
        first, offsets = bags
        flat = _OnRows(module, leaves, tree, offsets)
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(leaves[first])])])
        longest = int((ends - offsets).max()) if len(offsets) else 0
        index_BK = offsets.unsqueeze(1) + torch.arange(longest, device=offsets.device)
        rows = list(leaves)
        rows[first] = index_BK.masked_fill(index_BK >= ends.unsqueeze(1), -1)
        inputs = _torch.tree_unflatten(rows, tree)
        return flat, inputs[0], inputs[1]

    def _find(self, leaves: list[Any]) -> tuple[int, Tensor] | None:
        """Return (index of the ids, offsets) among flat inputs, or None: offsets begin with 0 and never fall."""
        first = next((index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), -1)
        if first < 0 or not _is_flat(leaves[first]):
            return None
        count = len(leaves[first])
        offsets = [leaf for leaf in leaves[first + 1 :] if _is_flat(leaf) and _are_offsets(leaf, count)]
        return (first, offsets[0]) if len({len(leaf) for leaf in offsets}) == 1 else None


def as_flat(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Undo `Bags.as_rows`, for whichever rows are left."""
    if not isinstance(module, _OnRows):
        return module, args, kwargs
    inputs = module.flat(args, kwargs)
    return module.inner[0], inputs[0], inputs[1]


def batch_as_rows(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]
) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
    """Return a batch and its loss function with a row per sample in the place of flat ids."""
    # Both as they are where no ids are flat.
    on_rows, inputs, _ = Bags(model).as_rows(model, (batch,), {})
    if not isinstance(on_rows, _OnRows):
        return batch, loss_fn
    return inputs[0], lambda model, rows: loss_fn(model, on_rows.flat((rows,), {})[0][0])


class _OnRows(nn.Module):
    """Runs a module that takes flat ids on a matrix of indices into them, `[B, K]` with -1 where there is none."""

    def __init__(self, module: nn.Module, leaves: list[Any], tree: _torch.TreeSpec, offsets: Tensor) -> None:
        """Store where ids, offsets and weights of bags lie among the flattened inputs."""
        super().__init__()
        # In a tuple: not a part of this one.
        self.inner = (module,)
        self._tree = tree
        self._first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._offsets = next(index for index, leaf in enumerate(leaves) if leaf is offsets)
        count = len(leaves[self._first])
        # Weights of the look-ups are as long as the ids; what is as long is taken for them.
        self._flat = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() == 1 and len(leaf) == count and index != self._offsets
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.flat(args, kwargs)
        return self.inner[0](*inputs[0], **inputs[1])

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return inputs with flat ids and offsets."""
        leaves = _torch.tree_flatten((args, dict(kwargs)))[0]
        index_BK = leaves[self._first]
        real_BK = index_BK >= 0
        chosen_N = index_BK[real_BK]
        for index, leaf in self._flat.items():
            leaves[index] = leaf[chosen_N]
        counts_B = real_BK.sum(1)
        leaves[self._offsets] = (counts_B.cumsum(0) - counts_B).to(leaves[self._offsets].dtype)
        return _torch.tree_unflatten(leaves, self._tree)


def _is_flat(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.dtype in {torch.int64, torch.int32}


def _are_offsets(leaf: Tensor, count: int) -> bool:
    """Return whether integers begin with 0 and never fall or exceed the number of ids, as offsets of bags do."""
    if len(leaf) == 0:
        return count == 0
    return bool((leaf[0] == 0) & (leaf.diff() >= 0).all() & (leaf[-1] <= count))


_PICKS = {
    torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select, torch.flip, torch.Tensor.flip, torch.roll,
    torch.Tensor.roll, torch.repeat_interleave, torch.Tensor.repeat_interleave, torch.Tensor.flipud, torch.flipud,
}  # fmt: skip
# They return pieces of a tensor; the place of the axis among their arguments.
_PIECES = {
    torch.split: 2, torch.Tensor.split: 2, torch.chunk: 2, torch.Tensor.chunk: 2, torch.tensor_split: 2,
    torch.Tensor.tensor_split: 2, torch.split_with_sizes: 2, torch.Tensor.split_with_sizes: 2, torch.narrow: 1,
    torch.Tensor.narrow: 1, torch.unbind: 1, torch.Tensor.unbind: 1,
}  # fmt: skip
# They pick entries by a tensor of as many axes.
_GATHERS = {
    torch.gather, torch.Tensor.gather, torch.take_along_dim, torch.Tensor.take_along_dim, torch.masked_select,
    torch.Tensor.masked_select,
}  # fmt: skip
# They change the order of rows by what is in them.
_SORTS = _GATHERS | {
    torch.sort, torch.Tensor.sort, torch.topk, torch.Tensor.topk, torch.msort, torch.Tensor.msort, torch.unique,
    torch.Tensor.unique, torch.scatter, torch.Tensor.scatter, torch.unique_consecutive, torch.Tensor.unique_consecutive,
}  # fmt: skip
# They pick rows by a tensor; the place of the index among their arguments.
_INDEXED = {
    torch.Tensor.__getitem__: 1, torch.index_select: 2, torch.Tensor.index_select: 2, torch.gather: 2,
    torch.Tensor.gather: 2,
}  # fmt: skip
_TURNS = {
    torch.transpose, torch.Tensor.transpose, torch.permute, torch.Tensor.permute, torch.t, torch.Tensor.t,
    torch.swapaxes, torch.Tensor.swapaxes, torch.movedim, torch.Tensor.movedim,
    torch.Tensor.T.__get__, torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
_FOLDS = {torch.reshape, torch.Tensor.reshape, torch.flatten, torch.Tensor.flatten}
_JOINS = {torch.cat, torch.concat, torch.concatenate}
_PACKING = {_torch.PACK, _torch.PAD}
_PRODUCTS = {
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm, torch.Tensor.mm,
    torch.bmm, torch.Tensor.bmm, torch.einsum, torch.tensordot, torch.addmm, torch.Tensor.addmm,
}  # fmt: skip
_PLACES = _PRODUCTS | {torch.stack}
# They write rows into others where an index says.
_WRITES = {
    torch.index_add, torch.Tensor.index_add, torch.Tensor.index_add_, torch.index_put, torch.Tensor.index_put,
    torch.Tensor.index_put_, torch.index_copy, torch.Tensor.index_copy, torch.Tensor.index_copy_,
    torch.Tensor.__setitem__,
}  # fmt: skip
_SEEN = _PICKS | _PIECES.keys() | _SORTS | _PACKING | _PLACES | _WRITES | _FOLDS
# Whatever may put rows into another order.
_MOVING = frozenset(_SEEN | _TURNS | _JOINS | {torch.where})
_OURS = frozenset({TrackedTensor, Tensor, torch.nn.Parameter})
# They hand values on without their gradient.
_LEAVING = frozenset(
    {torch.detach, torch.Tensor.detach, torch.detach_, torch.Tensor.detach_, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
)


_RAGGED = (
    "a parameter meets a nested tensor in {}: no rule follows its ragged rows. Pad it in the forward, "
    "x.to_padded_tensor(0), and leave the padding out by a mask."
)


class _TensorTable:
    """A value by tensor, as long as the tensor lives; it costs nothing until anything is stored."""

    def __init__(self) -> None:
        self.stored = False  # whether anything was ever stored; most models leave the order of their rows alone
        self._known: Any = None  # the table, once anything is stored

    def __setitem__(self, tensor: Tensor, value: Any) -> None:
        if not self.stored:
            self.stored, self._known = True, _torch.weak_table()
        self._known[tensor] = value

    def __contains__(self, tensor: Tensor) -> bool:
        return self.stored and tensor in self._known

    def get(self, tensor: Tensor) -> Any:
        return self._known.get(tensor) if self.stored else None


class RowTracker(TorchFunctionMode):
    """Active during a forward; knows the sample of every row of data that was put into another order."""

    def __init__(self) -> None:
        """Start without a forward, every table empty."""
        super().__init__()
        self.always = self.missed = self.detaches = False  # whether every forward is watched
        self._watched = True  # whether this mode is active in the running forward
        # Whether a forward was watched, and whether one of them changed the order of rows.
        self._seen, self._changed = False, False
        self.odd = False  # whether the data of the latest query is not as it came into the model
        self._count = self._counted = 0  # calls that may move rows: in all, and at the latest query
        # How often the running forward has asked about data that is not as it came, and the last watched one, in which
        # nothing else was to be seen: then the rest of a forward is as if it were not watched.
        self._asked, self._last_asked = 0, -1
        self._noted = self._over = False  # whether something was stored on nodes; whether watching ended early
        self._may_end = True  # not where some forward has asked more often than the one before
        self._came_in: dict[int, int] = {}  # versions of the model's inputs, by `id`
        self._rows = _TensorTable()  # the sample of each row, of tensors whose rows lie in another order
        # Of padded batches with their sequences on axis 1, about to be packed: the sample of each.
        self._columns = _TensorTable()
        # Those whose rows were taken for the samples' because there are as many; positions may be, or a constant table.
        self._guessed = _TensorTable()
        # Inputs whose samples were put behind their positions, and then folded with these.
        self._alternating = _TensorTable()
        self._dummy = False  # whether a dummy sample stands in for an empty batch
        self._inputs: Sequence[Tensor] = ()  # of the running forward, as the next two
        self._batch_size = 0
        self._axis = 0
        self.resized: Resized | None = None  # the forward that runs, with another number of samples
        self._calls = Calls()  # numbers the calls of the running forward
        self.key: Key = ()  # of the running call
        self._depth = 0  # nesting of rewritten operations, inside of which rows are not followed
        self.active = False  # whether a forward is running

    def begin(
        self,
        batch_size: int,
        axis: int,
        inputs: Sequence[Tensor] = (),
        *,
        dummy: bool = False,
        resized: Resized | None = None,
        watched: bool = True,
    ) -> None:
        """Follow the rows of a new forward."""
        # `resized` is the same forward with another number of samples, if there is one; `watched` overrides what
        # earlier forwards have shown.
        self._watched = watched or self.always or self._changed or not self._seen
        if watched or self.always or resized is not None or not self._seen:
            self._last_asked = -1
        self._asked, self._noted, self._over = 0, False, False
        self.missed = self.odd = False  # whether the latest forward should have been watched and was not
        self._count = self._counted = 0
        self._came_in = {id(tensor): _torch.version(tensor) for tensor in inputs}
        self.resized, self._calls, self.key, self._depth = resized, Calls(), (), 0
        for table in (self._rows, self._columns, self._guessed, self._alternating):
            table.stored = False
        self._batch_size, self._axis, self._inputs, self._dummy = batch_size, axis, inputs, dummy
        self.active = True
        if self._watched:
            _torch.begin_mode(self)

    def renew(self) -> None:
        """Watch forwards as those of a new model."""
        self._seen = self._changed = self.detaches = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Yield while operations inside the running call have keys of their own; rows are not followed there."""
        if self.resized is None:
            yield
            return
        self._depth += 1
        try:
            with self._calls.inside(self.key), self:
                yield
        finally:
            self._depth -= 1

    def end(self) -> None:
        """Stop watching; the samples of tensors that still live stay known until the next forward."""
        if self._watched and self.active:
            self._seen = True
            self._changed |= self._rows.stored or self._columns.stored
            if not self._over:
                self._last_asked = -1 if self._has_noted() or self.resized is not None else self._asked
        self._inputs, self._came_in, self.active = (), {}, False
        _torch.end_mode(self)

    def samples_of(self, tensor: Tensor, *, constant: bool = False) -> Tensor | None:
        """Return the sample of each row of a tensor outside the graph, int64."""
        # None where rows are in the samples' own order, `UNKNOWN_ORDER` where unknown. `constant`: shapes have shown
        # that it does not grow with the batch.
        if tensor.requires_grad:
            return None
        if self._batch_size > 1 and self.active and not (constant or self._is_as_it_came(tensor)):
            self._changed = self.odd = True
            if not self._watched or self._over:
                self.missed, self._may_end = True, self._may_end and not self._over
                return UNKNOWN_ORDER
            self._asked += 1
            self._over = self._may_end and self._asked == self._last_asked and not self._has_noted()
        return self._rows.get(tensor) if self._rows.stored else None

    def _has_noted(self) -> bool:
        """Return whether the running forward did anything with rows that is to be remembered."""
        tables = self._rows, self._columns, self._guessed, self._alternating
        return self._noted or any(table.stored for table in tables)

    def calls_since(self) -> int:
        """Return how many functions that may move rows were called since one ran on data that is not as it came."""
        calls, self._counted, self.odd = self._count - self._counted, self._count, False
        return calls

    def _is_as_it_came(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an input of the model, or one of another shape on all of its memory."""
        whole: Tensor | None = tensor
        if id(tensor) not in self._came_in:
            whole = _torch.base_of(tensor)
            if whole is None or id(whole) not in self._came_in or whole.numel() != tensor.numel():
                return False
            if not (whole.is_contiguous() and tensor.is_contiguous()):
                return False
        return _torch.version(tensor) == self._came_in[id(whole)]

    def admit(self, packed: PackedSequence) -> None:
        """Store the samples of the rows of a packed sequence that is an input of the model."""
        self._store_samples(packed.data, rows_of(packed))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any torch function and record what it does to the order of rows."""
        kwargs = kwargs or {}
        if self._over:
            return func(*args, **kwargs)
        # whether a forward took values out of the graph: then gradients need not be those of its outputs
        self.detaches = self.detaches or _detaches(func, args)
        ours = _OURS.issuperset(types)
        if not ours and TrackedTensor in types and any(tensor.is_nested for tensor in _tree.tensors((args, kwargs))):
            raise UnsupportedModelError(_RAGGED.format(func.__name__))
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if self.resized is not None:
            self.key = self._calls.key(func)
        self._count += func in _MOVING and not self._depth
        # Inside of vmap no tensor has the samples' axis.
        if (func not in _SEEN and not self._rows.stored) or self._depth or _torch.transform() is not None:
            if ours and TrackedTensor in types and not _torch.active_modes():
                # Whom torch would ask next.
                return TrackedTensor.__torch_function__(func, types, args, kwargs)
            return func(*args, **kwargs)
        if func == _torch.PACK and self._dummy:
            # The function refuses a sample of length 0.
            args = (args[0], args[1].clamp(min=1), *args[2:])
        result = func(*args, **kwargs)
        if self._batch_size > 1:
            with _torch.overrides_off():
                if func in _PACKING:
                    self._changed = True
                    (self._packed if func == _torch.PACK else self._unpacked)(args, result)
                else:
                    self._track(func, args, kwargs, result)
        return result

    def _track(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Store which samples the rows of a function's result belong to."""
        base: Any = args[0] if args else kwargs.get("input")
        node: Any = result.grad_fn if func in _INDEXED and isinstance(result, Tensor) else None
        if node is not None and under_checkpoint():
            # Whoever asks the node would have the checkpoint run its part again, in the middle of the forward.
            set_metadata(node, INDEX_KEY, _index(func, base, args, kwargs))
            self._changed = self._noted = True
        written = base if func is torch.Tensor.__setitem__ else result
        into = written.grad_fn if isinstance(base, Tensor) and isinstance(written, Tensor) else None
        if into is not None and is_written(into) and not under_checkpoint():
            # Rows in the graph, written among others, which may have an order that the graph does not have.
            set_metadata(into, *((INDEX_KEY, None) if self._rows.get(base) is None else (ROWS_KEY, LOST)))
            self._noted = True
        if func is torch.Tensor.__setitem__:
            if _scatters(args[1], args[2]) and self._order_before(base) is not None:
                self._rows[base] = UNKNOWN_ORDER
            return
        outputs = [tensor for tensor in _tree.tensors(result) if tensor.dim() and not tensor.requires_grad]
        if not outputs:
            return
        if isinstance(base, Tensor) and self._track_selection(func, base, args, kwargs, outputs):
            return
        if func in _PLACES and self._loses_order(func, _tree.tensors((args, kwargs)), outputs[0]):
            self._store_order(outputs, UNKNOWN_ORDER, None)
            return
        if func in _JOINS and self._axis == 0 and kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0:
            self._store_order(outputs, self._joined(args[0] if args else kwargs["tensors"]), None)
            return
        tensors = _tree.tensors((args, kwargs))
        marked = [rows for tensor in tensors if (rows := self._rows.get(tensor)) is not None]
        if marked:
            # Rows in another order beside rows as they came.
            marked += [rows for tensor in tensors if tensor.dim() and (rows := self._beside(tensor)) is not None]
            same = all(rows is not UNKNOWN_ORDER and torch.equal(rows, marked[0]) for rows in marked)
            known = marked[0] if same and func not in _TURNS else UNKNOWN_ORDER
            self._store_order(outputs, known, None, guessed=any(tensor in self._guessed for tensor in tensors))

    def _track_selection(
        self,
        func: Callable[..., Any],
        base: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
    ) -> bool:
        """Store the samples of rows that a call picks, sorts, folds or splits; False where it does neither."""
        if func in _PICKS:
            self._track_pick(func, args, kwargs, outputs)
        elif func in _SORTS or func in _WRITES:
            moved = self._order_before(base) is not None or (func in _GATHERS and self._may_be_folded(base))
            if moved and outputs[0].is_floating_point() == base.is_floating_point():
                self._rows[outputs[0]] = UNKNOWN_ORDER
        elif func in _FOLDS:
            return self._track_fold(base, outputs[0])
        else:
            return func in _PIECES and self._track_pieces(func, args, kwargs, outputs)
        return True

    def _is_followed(self, base: Tensor) -> bool:
        """Return whether the rows of a tensor are known from where it came from, not from their number alone."""
        return self._is_as_it_came(base) if self._rows.get(base) is None else base not in self._guessed

    def _beside(self, tensor: Tensor) -> Tensor | None:
        """Return the sample of each row of data in the samples' own order; None where it is no such data."""
        is_data = not tensor.requires_grad and self._rows.get(tensor) is None and id(tensor) in self._came_in
        return self._in_batch_order(tensor) if is_data else None

    def _loses_order(self, func: Callable[..., Any], tensors: Sequence[Tensor], output: Tensor) -> bool:
        """Return whether data is stacked, or multiplied from the left (`P @ x`): nobody knows the order of its rows."""
        if self._axis or not output.dim() or output.shape[0] != self._batch_size:
            return False
        if func is torch.stack:
            return all(not tensor.requires_grad for tensor in tensors)
        # The left factor keeps its rows, a permutation matrix orders those of the right one.
        named = func in (torch.einsum, torch.tensordot)
        factors = [factor for factor in tensors[1:] if not factor.requires_grad and (factor.dim() == 2 or named)]
        return any(factor.dim() > 0 and self._in_batch_order(factor) is not None for factor in factors)

    def _track_pick(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        """Store the samples of the rows that an index, flip or roll selects."""
        base = args[0] if args else kwargs["input"]
        if "index" in kwargs:
            args, kwargs = (base, *args[1:], *(kwargs[name] for name in ("dim", "index") if name in kwargs)), {}
        self._track_columns(func, args, outputs[0])
        before = self._order_before(base)
        if before is not None:
            rows, guessed = _picked(func, before, args, kwargs, axis=self._axis), not self._is_followed(base)
            self._store_order(outputs, rows, self._in_batch_order(base), guessed=guessed)
        elif self._may_be_folded(base) and _chooses(args[1:]):
            self._store_order(outputs, UNKNOWN_ORDER, None)

    def _track_pieces(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> bool:
        """Store the samples of pieces along the batch axis; False along another one, where rows stay together."""
        base, position = args[0] if args else kwargs["input"], _PIECES[func]
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        # Loops over positions, and over the rows of constant tables, take apart what may have as many rows.
        rows = self._order_before(base) if dim % max(1, base.dim()) == self._axis and self._is_followed(base) else None
        if rows is None:
            return False
        if rows is UNKNOWN_ORDER or self._axis:
            self._store_order(outputs, UNKNOWN_ORDER, None)
            return True
        # Of the rows' numbers the first axis, however it was named.
        split_args = [0 if number == position else item for number, item in enumerate(args)][1:]
        named = {key: 0 if key == "dim" else value for key, value in kwargs.items() if key != "input"}
        pieces = _tree.tensors(func(rows, *split_args, **named))
        for output, piece in zip(outputs, pieces, strict=True):
            self._store_order([output], piece.reshape(-1), None)
        return True

    def _packed(self, args: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        """Store the samples of the rows of a padded batch that was packed."""
        padded, _, batch_first = args
        axis = 0 if batch_first else 1
        if padded.requires_grad:
            order = columns_of(padded, axis, self._batch_size)
        else:
            order = self._rows.get(padded) if batch_first else self._columns.get(padded)
            if order is None and self._rows.get(padded) is None and padded.shape[axis] == self._batch_size:
                order = torch.arange(self._batch_size)
        known = UNKNOWN_ORDER if order is None or order is UNKNOWN_ORDER else order.cpu()[positions(result[1])]
        self._store_samples(result[0], known)

    def _unpacked(self, args: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        """Store the order of samples in a packed batch that was padded again."""
        data, padded, axis = args[0], result[0], 0 if args[2] else 1
        rows = self._samples_in(data)
        if rows is None or rows is UNKNOWN_ORDER:
            return
        order = rows[: padded.shape[axis]]
        if padded.requires_grad or axis == 0:
            self._store_samples(padded, order, axis=axis)
        else:
            self._columns[padded] = order

    def _samples_in(self, tensor: Tensor) -> Tensor | None:
        """Return the sample of every row of a tensor on its first axis, `UNKNOWN_ORDER` or None as it is known."""
        if not tensor.requires_grad:
            return self._rows.get(tensor)
        rows = sample_axis_at((tensor.grad_fn, tensor.output_nr))
        return rows.samples() if rows is not None and not rows.axis else None

    def lay_beside(self, data: Tensor, states: Any) -> None:
        """Record that constant states, those before the first step of a cell, have their rows where its input has."""
        rows = self._samples_in(data)
        constants = [state for state in _tree.tensors(states) if not state.requires_grad and state.dim()]
        for state in constants:
            if rows is not None and not self._is_as_it_came(state):
                known = rows if rows is UNKNOWN_ORDER else rows.to(state.device)
                self._store_order([state], known, self._in_batch_order(state))

    def _store_samples(self, tensor: Tensor, rows: Tensor, *, axis: int = 0) -> None:
        """Store the sample of each row of a tensor, on its node if it is in the graph."""
        node: Any = tensor.grad_fn
        if not tensor.requires_grad:
            self._rows[tensor] = rows
        elif node is not None and rows is not UNKNOWN_ORDER:
            set_metadata(node, ROWS_KEY, SampleAxis(axis, 1, len(rows), 1, rows, self._batch_size))

    def _track_columns(self, func: Callable[..., Any], args: tuple[Any, ...], output: Tensor) -> None:
        """Record the samples of sequences on axis 1: as the packing of a batch sorts them, or of ``x[None, index]``."""
        if func is torch.Tensor.index_select and args[1:2] == (1,) and args[0].shape[1] == self._batch_size:
            self._columns[output] = args[2].cpu()
        index = args[1] if func is torch.Tensor.__getitem__ and not self._axis else ()
        if isinstance(index, tuple) and index[:1] == (None,):
            rows, picked = self._order_before(args[0]), index[1] if len(index) > 1 else None
            if rows is not None and rows is not UNKNOWN_ORDER and isinstance(picked, Tensor) and picked.dim() == 1:
                self._columns[output] = rows[picked.to(rows.device)]

    def _order_before(self, base: Tensor) -> Tensor | None:
        """Return the sample of each row of a tensor that is about to be reordered; None where it has no such rows."""
        if base.requires_grad or base.dim() == 0:
            return None
        rows = self._rows.get(base)
        if rows is None:
            rows = self._in_batch_order(base)
        return rows if rows is not None else self._folded(base)

    def _folded(self, base: Tensor) -> Tensor | None:
        """Return the sample of each row of ``x.reshape(-1, d)``; None where ``x`` is no input, or one turned around."""
        fold, rows = self.fold_of(base), base.shape[0]
        if not fold:
            return None
        place = torch.arange(rows, device=base.device)
        return place % self._batch_size if fold == "minor" else place // (rows // self._batch_size)

    def fold_of(self, tensor: Tensor) -> str:
        """Return how positions and samples of an input were folded into rows outside the graph; empty if unknown."""
        if not tensor.dim() or tensor.layout != torch.strided or self._rows.get(tensor) is not None:
            return ""
        if tensor in self._alternating:
            return "minor"
        if self._axis or tensor.shape[0] % self._batch_size or not tensor.is_contiguous():
            return ""
        for whole in (_torch.base_of(tensor), *self._inputs):
            if whole is None or not whole.is_contiguous() or whole.data_ptr() != tensor.data_ptr():
                continue
            if whole.numel() == tensor.numel() and self._in_batch_order(whole) is not None:
                return "major"
        return ""

    def _track_fold(self, base: Tensor, folded: Tensor) -> bool:
        """Store how axes of an input were folded into rows; False where no samples were stored."""
        whole, size = _torch.base_of(base), self._batch_size
        if base in self._columns and list(base.shape[:2]) == [1, *folded.shape[:1]]:
            self._rows[folded] = self._columns.get(base)
            return True
        if whole is None or id(whole) not in self._came_in or self._axis or not folded.dim():
            return False
        turned = base.shape[1:2] == whole.shape[:1] == (size,) and base.stride(1) == whole.stride(0) != base.stride(0)
        if turned and folded.shape[0] == base.shape[0] * size and whole.numel() == base.numel():
            self._alternating[folded] = True
        return False

    def _may_be_folded(self, base: Tensor) -> bool:
        """Return whether rows outside the graph may be several of each sample, in an order that is not known."""
        rows = base.shape[0] if base.dim() > 1 and not base.requires_grad else 0
        return rows > self._batch_size and rows % self._batch_size == 0

    def _joined(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the sample of each row of concatenated parts; None where no part was reordered."""
        if all(self._rows.get(part) is None for part in parts):
            return None
        rows = [self._order_before(part) for part in parts]
        known = [part for part in rows if part is not None and part is not UNKNOWN_ORDER]
        return torch.cat(known) if len(known) == len(parts) else UNKNOWN_ORDER

    def _in_batch_order(self, base: Tensor) -> Tensor | None:
        """Return ``0..B-1`` for a tensor with as many rows as samples; None for another."""
        axis = self._axis if self._axis < base.dim() else 0
        # A constant that was expanded over the batch has the same row for every sample: nobody's.
        if base.shape[axis] != self._batch_size or (base.layout == torch.strided and base.stride(axis) == 0):
            return None
        return torch.arange(self._batch_size, device=base.device)

    def _store_order(
        self, outputs: list[Tensor], rows: Tensor | None, arranged: Tensor | None, *, guessed: bool = False
    ) -> None:
        """Store the samples of outputs' rows where these differ from ``arranged``, the batch's own order."""
        if rows is None:
            return
        for output in outputs:
            if guessed:
                self._guessed[output] = True
            if rows is not UNKNOWN_ORDER and output.shape[0] != rows.numel():
                # Whatever is computed of one sample's rows is that sample's.
                single = not guessed and rows.numel() > 0 and bool((rows == rows[0]).all())
                self._rows[output] = rows[:1].expand(output.shape[0]) if single else UNKNOWN_ORDER
            elif arranged is None or rows is UNKNOWN_ORDER or not torch.equal(rows, arranged):
                self._rows[output] = rows


def _picked(
    func: Callable[..., Any], rows: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, axis: int
) -> Tensor | None:
    """Return the sample of each row of a selection; None where it leaves the batch axis alone."""
    if rows is UNKNOWN_ORDER:
        return UNKNOWN_ORDER
    base = args[0] if args else kwargs["input"]
    if func is torch.Tensor.__getitem__:
        return _indexed(rows, args[1], axis)
    named = func.__name__
    if named == "flipud":
        return UNKNOWN_ORDER
    if named in ("flip", "roll"):
        positional = args[1:] if named == "flip" else args[2:3]
        dims = _axes(kwargs.get("dims", positional), base.dim())
        if dims and axis not in dims:
            return None
        shifted = kwargs.get("shifts", args[1] if named == "roll" and len(args) > 1 else 0)
        if dims != {0} or axis or not isinstance(shifted, int):
            return UNKNOWN_ORDER
        return rows.flip(0) if named == "flip" else rows.roll(shifted)
    dim = kwargs.get("dim", args[1] if named == "index_select" else (args[2] if len(args) > 2 else None))
    index = kwargs.get("index", args[2] if named == "index_select" and len(args) > 2 else None)
    if dim is None or dim % base.dim() != axis:
        return UNKNOWN_ORDER if dim is None else None
    return rows[index] if isinstance(index, Tensor) and axis == 0 else UNKNOWN_ORDER


def _indexed(rows: Tensor, index: Any, axis: int) -> Tensor | None:
    """Follow ``base[index]`` along the batch axis."""
    items = index if isinstance(index, tuple) else (index,)
    if axis:
        plain = all(item is Ellipsis or item == slice(None) for item in items if not isinstance(item, (Tensor, list)))
        return None if plain and not any(isinstance(item, (Tensor, list)) for item in items) else UNKNOWN_ORDER
    first = items[0] if items else Ellipsis
    if first is Ellipsis or (isinstance(first, slice) and first == slice(None)):
        # An index further on is aligned with the batch only where it stands beside one on the batch axis.
        return None
    if first is None or isinstance(first, (int, bool)):
        # One row of the batch, or the batch moved to the second axis: nothing is put into another order.
        return None
    if isinstance(first, slice):
        return rows[first]
    if isinstance(first, list):
        first = torch.tensor(first, device=rows.device)
    first = first.to(rows.device)
    if first.dtype in (torch.bool, torch.uint8) and first.dim() > 1:
        return rows.view(-1, *[1] * (first.dim() - 1)).expand(first.shape)[first.bool()]
    return rows[first] if first.dim() == 1 else UNKNOWN_ORDER


def _index(func: Callable[..., Any], base: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what autograd saves of the index of a call that picks rows: a tensor, or one or none for each axis."""
    index = args[_INDEXED[func]] if len(args) > _INDEXED[func] else kwargs["index"]
    if func is not torch.Tensor.__getitem__:
        return index
    items = list(index) if type(index) is tuple else [index]
    items = [torch.tensor(item) if isinstance(item, list) else item for item in items]
    # A number takes an axis away, before the others are looked at.
    numbers = [isinstance(item, int) or (isinstance(item, Tensor) and not item.dim()) for item in items]
    items = [item for item, is_number in zip(items, numbers, strict=True) if not is_number]
    axes = sum(_axes_of(item) for item in items)
    indices = list[Any]()
    for item in items:
        left_out = base.dim() - sum(numbers) - axes if item is Ellipsis else 1
        indices += [item if isinstance(item, Tensor) else None] * left_out
    return indices


def _axes_of(item: Any) -> int:
    """Return how many axes a part of an index that is no number goes over."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _chooses(arguments: Sequence[Any]) -> bool:
    """Return whether data chooses single rows: by a mask or by their numbers, be it beside other parts of an index."""
    items = [item for one in arguments[:2] for item in (one if isinstance(one, tuple) else (one,))]
    tables = [item for item in items if isinstance(item, (Tensor, list, np.ndarray)) and np.ndim(item)]
    return any(prod(np.shape(item)[1:]) == 1 or getattr(item, "dtype", None) is torch.bool for item in tables)


def _scatters(index: Any, value: Any) -> bool:
    """Return whether ``base[index] = value`` puts rows of samples into places that data chose."""
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, (Tensor, list)) and isinstance(value, Tensor) and value.dim() > 0


def _axes(dims: Any, total: int) -> set[int]:
    """Return the axes named by numbers or nested sequences of them, counted from the front."""
    flat = (
        [dims] if isinstance(dims, int) else [d for item in dims for d in ([item] if isinstance(item, int) else item)]
    )
    return {dim % total for dim in flat}


def _detaches(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a module calls a function with a value in the graph and returns one that is not."""
    leaves = func in _LEAVING or not torch.is_grad_enabled()
    if not leaves or _torch.in_backward() or not any(type(item) is Tensor and item.requires_grad for item in args):
        return False
    # What stands in the graph for us is none of the model's. Asked only where a value leaves the graph.
    return not str(sys._getframe(2).f_globals.get("__name__")).startswith("ghostclip.")
