"""The forward with one sample more, whose shapes tell which axes hold samples: see `ghostclip.capture.growth`.

Shape letter: B samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _tree
from ghostclip.capture.decompose import inside_of
from ghostclip.capture.growth import Calls, Grown, Key, Shapes, shapes_of
from ghostclip.evidence.dependence import batch_axis_of
from ghostclip.evidence.dropout import WithoutDropout
from ghostclip.evidence.module_state import restored
from ghostclip.evidence.randomness import unnoticed
from ghostclip.rules.registry import operation_name


class _Recorder(TorchFunctionMode):
    """Notes the shapes of every call's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.found = Calls(), dict[Key, tuple[Shapes, Shapes]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key, before = self.calls.key(func), shapes_of((args, kwargs))
        around = key[0]
        inside = None if around and around[1] is func else inside_of(func, operation_name(func))
        if inside is None:
            result = func(*args, **kwargs)
        else:
            # Layers written out refuse parameters whose gradient nobody would take.
            args, kwargs = _tree.mapped(
                lambda item: item.detach() if isinstance(item, Tensor) else item, (args, kwargs)
            )
            with self.calls.inside(key), self:
                result = inside(*args, **kwargs)
        self.found[key] = before, shapes_of(result)
        return result


def grown(
    model: nn.Module, run: Callable[[Any], Sequence[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> Grown | None:
    """Run a model on a batch with one sample repeated.

    Args:
        model: The model; its buffers and all random states are put back.
        run: Runs it on inputs and returns its output tensors.
        inputs: What it is called with.
        batch_size: B.
        axis: The expected batch axis.

    Returns:
        What it did; None where it does not run with B + 1 samples.
    """
    more = _tree.mapped(lambda leaf: _with_one_more(leaf, batch_size, axis), inputs)
    used = [*model.parameters(), *model.buffers(), *_tree.tensors(inputs)]
    # With gradients where it raises without: it may differentiate within its forward.
    for gradients in (False, True):
        recorder = _Recorder()
        try:
            with restored(model), unnoticed(used), torch.set_grad_enabled(gradients):
                with WithoutDropout(), recorder:
                    outputs = run(more)
            return Grown(recorder.found, shapes_of(list(outputs)), batch_size)
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            continue
    return None


def _with_one_more(leaf: Any, batch_size: int, axis: int) -> Any:
    place = batch_axis_of(leaf, batch_size=batch_size, axis=axis)
    if place is None:
        return leaf
    index = torch.arange(batch_size + 1, device=leaf.device).clamp(max=batch_size - 1)
    return leaf.detach().index_select(place, index).requires_grad_(leaf.requires_grad)
