"""What a model's inputs say of a forward: the number of samples, packed sequences, bags, and dummies for empty batches.

*Packed sequences*: the rows of all steps lie one after the other; step t has those of the sequences that are at least
so long, in the order in which the sequences were packed, longest first. Row by row that says the position of a sequence
in the packed batch; which sample stands there is the order in which the padded batch was sorted before.

*Bags*: flat ids with offsets, as `nn.EmbeddingBag` takes them. A bag is a sample, whatever the number of ids.

Shape letters: N ids, B bags (samples), K ids of the longest bag.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ghostclip import _torch
from ghostclip._tree import leaves as leaves_of
from ghostclip.errors import BatchAxisError

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
