"""Repeated blocks of a model, some of which run under activation checkpointing because a memory plan says so.

While the outermost forward runs, the ``forward`` of each block is replaced by one that notes where the block begins and
ends in the graph, and keeps of a chosen block its inputs alone: the backward runs it again. Of one that is looked at,
what its graph saved is held besides, until a plan is made and lets it go. Nothing of the model is changed otherwise;
what a block does between the two is its own.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ghostclip import _torch, _tree
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import in_place_of
from ghostclip.capture.nodes import under_checkpoint, without_view

BLOCK_KEY: Final = "ghostclip_block"
"""On the node that ends a block: the number of its call in the forward."""

# What a block may be given when it is run again: whatever else it changes (a cache of keys) would be changed twice.
_PLAIN: Final = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class _SavedTensor:
    """A tensor that a graph saved, and the checkpoint that recomputes it."""

    __slots__ = ("__weakref__", "holder", "tensor", "version")

    def __init__(self, tensor: Tensor, holder: Any) -> None:
        """Hold a tensor, its version, and what the checkpoint's own hook packed for it."""
        self.tensor: Tensor | None = tensor.detach()
        self.version, self.holder = _torch.version(tensor), holder


class SavedByBlock:
    """Tensors that the graph of a checkpointed block saved in its first run, readable without running it again."""

    def __init__(self) -> None:
        # The graph owns them.
        self._saved: WeakSet[_SavedTensor] = WeakSet()
        self._ran = False  # whether the first run has begun

    def of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's forward for a checkpoint, so that the tensors saved in its first run are stored here."""

        def first(*args: Any, **kwargs: Any) -> Any:
            if self._ran:
                return run(*args, **kwargs)
            self._ran = True
            pack, unpack = _torch.saving_hooks()

            @wraps(pack)
            def hold(tensor: Tensor) -> _SavedTensor:  # as torch's pack hook
                saved = _SavedTensor(tensor, pack(tensor))
                self._saved.add(saved)
                return saved

            def give(saved: _SavedTensor) -> Any:  # as torch's unpack hook
                # Hooks hide from autograd what was changed in place: the block forms it again.
                tensor = saved.tensor
                return unpack(saved.holder) if tensor is None or _torch.version(tensor) != saved.version else tensor

            with saved_tensors_hooks(hold, give):
                return run(*args, **kwargs)

        return first

    def drop_saved(self) -> None:
        """Drop the saved tensors: the backward recomputes them by running the block again."""
        for saved in self._saved:
            saved.tensor = None


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in a forward, and where its nodes lie in the graph."""

    name: str
    kind: Any  # equal for blocks of one class with parameters of the same shapes, called on tensors of the same shapes
    first: int  # number of the first node of the graph that it may have made, see `_torch.order_of`
    last: int  # one more than the number of the last such node
    inputs: tuple[tuple[int, int], ...]  # memory of the tensors it was given: address and bytes
    recomputed: bool  # whether only its inputs were stored
    may_be: bool  # whether it can be run again
    held: SavedByBlock | None = None  # its saved tensors, None where they are not stored

    @property
    def may_be_read(self) -> bool:
        """Whether the graph shows what it saved without running it again."""
        return not self.recomputed or self.held is not None


def repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by path: modules of one class, at least two consecutive in a list or a sequence."""
    # Of blocks within blocks the outer ones; only those with a trainable parameter.
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{one}.") for one in blocks):
            continue
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        kinds = Counter(type(child) for _, child in children)
        for name, child in children:
            worth = kinds[type(child)] > 1 and next(child.children(), None) is not None
            if worth and any(parameter.requires_grad for parameter in child.parameters()):
                blocks[name] = child
    return blocks


class Blocks:
    """The repeated blocks of a model while its forward runs."""

    def __init__(
        self, model: nn.Module, anchor: Tensor, choose: Callable[[Any, Mapping[str, Any]], Mapping[str, bool]]
    ) -> None:
        # Every captured path of the graph ends at the leaf `anchor`.
        # called as a forward begins with its sizes, and what blocks of one kind have in common, by path; returns the
        # paths of blocks of which only inputs are stored, each with whether it is watched
        self.choose = choose
        self._model, self._anchor = model, anchor
        self._replaced: ExitStack | None = None  # restores the blocks' forwards; None outside of one

    def begin(self, forward: ForwardContext, inputs: Any) -> None:
        """Watch the blocks in a forward that begins, and checkpoint those that are chosen."""
        if self._replaced is not None or _torch.in_backward() or not torch.is_grad_enabled():
            return
        blocks = repeated(self._model)
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in _tree.tensors(inputs))
        forward.input_sizes = self._model.training, shapes
        chosen = self.choose(forward.input_sizes, {name: _kind_of(block) for name, block in blocks.items()})
        self._replaced = ExitStack()
        for name, block in blocks.items():
            watched = self._watched(name, block, forward, chosen)
            self._replaced.enter_context(in_place_of(block, watched))

    def end(self) -> None:
        """Restore every block's own forward."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.close()

    def _watched(
        self, name: str, block: nn.Module, forward: ForwardContext, chosen: Mapping[str, bool]
    ) -> Callable[..., Any]:
        """Return a forward for a block that records each call, and runs it under a checkpoint if it was chosen."""
        run = block.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or _torch.in_backward():
                return run(*args, **kwargs)
            may_be = _is_plain((args, kwargs)) and not under_checkpoint()
            first, again = self._number(), name in chosen and may_be
            saved = SavedByBlock() if again and chosen[name] else None
            if again:
                with forward.recomputing():
                    output = checkpoint(run if saved is None else saved.of(run), *args, use_reentrant=False, **kwargs)
            else:
                output = run(*args, **kwargs)
            last = self._number()
            tensors = _tree.tensors((args, kwargs))
            memory = tuple((one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors)
            kind = _kind_of(block), tuple((tuple(one.shape), one.dtype) for one in tensors)
            call = BlockCall(name, kind, first, last, memory, again, may_be, saved)
            forward.blocks.append(call)
            return self._marked(output, len(forward.blocks) - 1)

        return watched

    def _number(self) -> int:
        """Return the sequence number that autograd gives a node made now."""
        return _torch.order_of(self._anchor.view_as(self._anchor).grad_fn)

    def _marked(self, output: Any, number: int) -> Any:
        """Return a block's output with a node of its own at its end, where exactly one tensor of it is in the graph."""
        inside = [tensor for tensor in _tree.tensors(output) if tensor.requires_grad]
        if len(inside) != 1:
            return output
        ending = without_view(inside[0], self._anchor, anchored=False)
        node: Any = ending.grad_fn
        node.metadata[BLOCK_KEY] = number
        return _tree.mapped(lambda item: ending if item is inside[0] else item, output)


def _is_plain(tree: Any) -> bool:
    """Return whether arguments consist of tensors and constants, so that a block can be run on them again."""
    if type(tree) in (tuple, list):
        return all(map(_is_plain, tree))
    return all(map(_is_plain, tree.values())) if type(tree) is dict else isinstance(tree, _PLAIN)


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """Return what blocks must share to be planned together: class, and shapes and trainability of parameters."""
    return type(block), tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
