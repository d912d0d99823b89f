"""The forward with one sample more, whose shapes tell which axes hold samples: see `ghostclip.capture.growth`.

Shape letter: B samples.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _tree
from ghostclip.capture.decompose import inside_of
from ghostclip.capture.growth import Calls, Grown, Key, Shapes, shapes_of
from ghostclip.evidence.dependence import batch_axis_of, has_lists, of_samples, with_lists
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
    order = [*range(batch_size), batch_size - 1]
    more = _tree.mapped(lambda leaf: _with_one_more(leaf, order, axis), inputs)
    # Lists of as many values as samples may have one for each.
    longer = with_lists(more, order, batch_size=batch_size, axis=axis)
    used = [*model.parameters(), *model.buffers(), *_tree.tensors(inputs)]
    # With gradients where it raises without: it may differentiate within its forward.
    ways = [longer, more] if has_lists(more, batch_size=batch_size, axis=axis) else [more]
    for gradients, given in product((False, True), ways):
        recorder = _Recorder()
        try:
            with restored(model), unnoticed(used), torch.set_grad_enabled(gradients):
                with WithoutDropout(), recorder:
                    outputs = run(given)
            return Grown(recorder.found, shapes_of(list(outputs)), batch_size)
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            continue
    return None


def _with_one_more(leaf: Any, order: Sequence[int], axis: int) -> Any:
    place = batch_axis_of(leaf, batch_size=len(order) - 1, axis=axis)
    return leaf if place is None else of_samples(leaf, order, place)
