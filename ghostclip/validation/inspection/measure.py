"""Measuring without training: call sites and sizes of one step, operations and memory of a step without privacy.

All of it also works on the meta device, where tensors have shapes and no numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ghostclip import _torch, _tree
from ghostclip.capture.call_sites import CallSite
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.in_place import in_place_of
from ghostclip.capture.param_use import ParamUse
from ghostclip.errors import UnsupportedModelError
from ghostclip.planning.coverage import Coverage, coverage_of

Shape = tuple[int, ...]


def _attention(  # noqa: PLR0913 - the operator's own arguments, by their names
    query: Shape,
    key: Shape,
    value: Shape,
    *_rest: object,
    attn_mask: object = None,
    scale: object = None,
    dropout_p: object = None,
    is_causal: object = None,
    out_shape: object = None,
) -> int:
    # The formula knows no heads that share keys, which change nothing in the products of each head.
    heads = query[1:2]
    return int(sdpa_flop_count(query, key[:1] + heads + key[2:], value[:1] + heads + value[2:]))


def _attention_backward(  # noqa: PLR0913 - as above
    grad: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    *_rest: object,
    attn_mask: object = None,
    scale: object = None,
    out_shape: object = None,
) -> int:
    heads = query[1:2]
    return int(sdpa_backward_flop_count(grad, query, key[:1] + heads + key[2:], value[:1] + heads + value[2:]))


_FORWARD, _BACKWARD = _torch.cpu_attention()
# What torch's counter passes over on a CPU.
_UNCOUNTED: Final[dict[Any, Callable[..., int]]] = {
    _FORWARD: _attention,
    _BACKWARD: _attention_backward,
}


@dataclass
class BlockCost:
    """What one block of a model takes of a step without privacy.

    Attributes:
        forward: FLOPs of the products of its forward.
        saved: Bytes that its forward keeps for the backward.
        entering: Bytes of its first argument, which activation checkpointing keeps in the place of these.
    """

    forward: int = 0
    saved: int = 0
    entering: int = 0


@dataclass(frozen=True)
class OrdinaryStep:
    """A step without privacy.

    Attributes:
        forward: FLOPs of the products of its forward.
        backward: FLOPs of the products of its backward.
        saved: Bytes that the forward keeps for the backward, parameters left out.
        blocks: What the blocks that were named take of forward and saved bytes.
    """

    forward: int
    backward: int
    saved: int
    blocks: tuple[BlockCost, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of both."""
        return self.forward + self.backward


def losses_of(output: Any, *, batch_size: int, axis: int) -> Tensor:
    """Return a loss for every sample: the mean square of the first output that has a batch axis.

    Args:
        output: Whatever a model returned.
        batch_size: B.
        axis: The batch axis.

    Returns:
        Losses, shape ``(B,)``.

    Raises:
        UnsupportedModelError: No output has a batch axis and requires grad.
    """
    logits = getattr(output, "logits", None)
    for leaf in [logits, *_tree.leaves(output)]:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.dim() == 0:
            continue
        place = axis if axis < leaf.dim() and leaf.shape[axis] == batch_size else 0
        if leaf.shape[place] == batch_size:
            return leaf.movedim(place, 0).reshape(batch_size, -1).float().square().mean(1)
    raise UnsupportedModelError(
        f"the model returned no tensor with {batch_size} samples that depends on a trainable parameter. Return outputs "
        "with a batch axis."
    )


def plain_step(model: nn.Module, losses: Callable[[], Tensor], *, blocks: Sequence[nn.Module] = ()) -> OrdinaryStep:
    """Count a step without privacy.

    Args:
        model: The model; its gradients are None afterwards.
        losses: Runs the forward.
        blocks: Parts of the model, none inside another, that are counted by themselves as well.

    Returns:
        What it takes.
    """
    own = {_torch.memory_key(parameter) for parameter in model.parameters()}
    saved: set[int] = set()
    # The last is whatever runs in none of them.
    counted = [BlockCost() for _ in (*blocks, model)]
    running = [counted[-1]]

    def pack(tensor: Tensor) -> Tensor:
        key = _torch.memory_key(tensor)
        if key not in own and key not in saved:
            saved.add(key)
            running[-1].saved += tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as forward, ExitStack() as stack:
        for module, block in zip(blocks, counted, strict=False):
            stack.enter_context(_counting(module, block, running, forward))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = losses().sum()
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as backward:
        loss.backward()
    model.zero_grad(set_to_none=True)
    total = sum(block.saved for block in counted)
    return OrdinaryStep(forward.get_total_flops(), backward.get_total_flops(), total, tuple(counted[:-1]))


@contextmanager
def _counting(module: nn.Module, block: BlockCost, running: list[BlockCost], flops: FlopCounterMode) -> Iterator[None]:
    """Let what a module does count as a block's."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next((leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        block.entering = 0 if first is None else first.numel() * first.element_size()
        before = flops.get_total_flops()
        running.append(block)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()
            block.forward += flops.get_total_flops() - before

    with in_place_of(module, run):
        yield


class _Sizes:
    """Listens to a backward and keeps nothing but what call sites note themselves."""

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Form the factors and drop them."""
        with torch.no_grad():
            use.parameter_factors(grad)


def call_sites(model: nn.Module, losses: Callable[[], Tensor], *, axis: int) -> list[CallSite]:
    """Run one step on shapes, and return where parameters met samples, with the sizes of both.

    Args:
        model: The model, on any device.
        losses: Runs the forward.
        axis: The batch axis.

    Returns:
        The call sites; they hold no tensor of the step.
    """
    capture = CaptureContext(model, batch_first=axis == 0, on_backward=_ignored, on_loss=_ignored)
    try:
        loss = losses().sum()
        with capture.listening(_Sizes()):
            capture.run_backward([loss], [None])
        return list(capture.sites.table.values())
    finally:
        capture.close()


def planned(model: nn.Module, losses: Callable[[], Tensor], *, strategy: str, axis: int) -> Coverage:
    """Plan one step from shapes alone.

    Args:
        model: The model, on any device.
        losses: Runs the forward.
        strategy: What the plan is for.
        axis: The batch axis.

    Returns:
        The table.
    """
    return coverage_of(model, call_sites(model, losses, axis=axis), strategy=strategy)


def _ignored(*args: Any) -> None:
    return None
