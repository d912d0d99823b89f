"""Flat ids with the offsets of bags, as `nn.EmbeddingBag` takes them: a bag is a sample, whatever the number of ids.

Shape letters: N ids, B bags (samples), K ids of the longest bag.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.inputs import batch_size_of
from ghostclip.errors import BatchAxisError


class Bags:
    """Finds flat ids and offsets among a model's inputs, and gives checks one row per sample instead."""

    def __init__(self, model: nn.Module) -> None:
        bags = [module for module in model.modules() if isinstance(module, nn.EmbeddingBag)]
        self._any = bool(bags)
        self._closed = any(bag.include_last_offset for bag in bags)

    def batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
        """Return the number of samples in a model's inputs: of bags, where ids are flat, else as `batch_size_of`."""
        found = self._find(_torch.tree_flatten((args, dict(kwargs)))[0]) if self._any else None
        if found is None:
            return batch_size_of(args, kwargs, axis)
        if self._closed:
            raise BatchAxisError(
                "nn.EmbeddingBag(include_last_offset=True) with flat ids: there are more offsets than samples. "
                "Build it with include_last_offset=False and pass offsets[:-1]."
            )
        return len(found[1])

    def as_rows(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return a forward on flat ids as one on a matrix with a row per sample, whose rows may be exchanged."""
        # All three as they are where no ids are flat.
        if not self._any:
            return module, args, kwargs
        leaves, tree = _torch.tree_flatten((args, dict(kwargs)))
        found = self._find(leaves)
        if found is None:
            return module, args, kwargs
        first, offsets = found
        flat = _OnRows(module, leaves, tree, offsets)
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(leaves[first])])])
        longest = int((ends - offsets).max()) if len(offsets) else 0
        place_BK = offsets.unsqueeze(1) + torch.arange(longest, device=offsets.device)
        rows = list(leaves)
        rows[first] = place_BK.masked_fill(place_BK >= ends.unsqueeze(1), -1)
        given = _torch.tree_unflatten(rows, tree)
        return flat, given[0], given[1]

    def _find(self, leaves: list[Any]) -> tuple[int, Tensor] | None:
        """Return the places of ids and offsets: ids are the first tensor, offsets begin with 0 and never fall."""
        first = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), -1)
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
    given = module.flat(args, kwargs)
    return module.inner[0], given[0], given[1]


def batch_as_rows(
    model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]
) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
    """Return a batch and its loss function with a row per sample in the place of flat ids."""
    # Both as they are where no ids are flat.
    on_rows, given, _ = Bags(model).as_rows(model, (batch,), {})
    if not isinstance(on_rows, _OnRows):
        return batch, loss_fn
    return given[0], lambda model, rows: loss_fn(model, on_rows.flat((rows,), {})[0][0])


class _OnRows(nn.Module):
    """Runs a module that takes flat ids on a matrix of indices into them, `[B, K]` with -1 where there is none."""

    def __init__(self, module: nn.Module, leaves: list[Any], tree: _torch.TreeSpec, offsets: Tensor) -> None:
        super().__init__()
        # In a tuple: not a part of this one.
        self.inner = (module,)
        self._tree = tree
        self._first = next(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._offsets = next(place for place, leaf in enumerate(leaves) if leaf is offsets)
        count = len(leaves[self._first])
        # Weights of the look-ups are as long as the ids.
        self._flat = {
            place: leaf
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() == 1 and len(leaf) == count and place != self._offsets
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.flat(args, kwargs)
        return self.inner[0](*given[0], **given[1])

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return inputs with flat ids and offsets."""
        leaves = _torch.tree_flatten((args, dict(kwargs)))[0]
        place_BK = leaves[self._first]
        real_BK = place_BK >= 0
        chosen_N = place_BK[real_BK]
        for place, leaf in self._flat.items():
            leaves[place] = leaf[chosen_N]
        counts_B = real_BK.sum(1)
        leaves[self._offsets] = (counts_B.cumsum(0) - counts_B).to(leaves[self._offsets].dtype)
        return _torch.tree_unflatten(leaves, self._tree)


def _is_flat(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.dtype in {torch.int64, torch.int32}


def _are_offsets(leaf: Tensor, count: int) -> bool:
    if len(leaf) == 0:
        return count == 0
    return bool((leaf[0] == 0) & (leaf.diff() >= 0).all() & (leaf[-1] <= count))
