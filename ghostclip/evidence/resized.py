"""The forward with another number of samples, whose shapes tell which axes hold samples: see `ghostclip.capture.sizes`.

Shape letter: B samples.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _tree
from ghostclip.capture.rewrite import inside_of
from ghostclip.capture.sizes import Calls, Key, Resized, Shapes, shapes_of
from ghostclip.evidence.independence import Batch
from ghostclip.evidence.module_state import restored
from ghostclip.evidence.randomness import WithoutDropout, unnoticed
from ghostclip.rules.registry import operation_name

# So many samples of a larger batch show which axes hold them.
_FEW: Final = 3


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


def resized(
    model: nn.Module, run: Callable[[Any], Sequence[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> Resized | None:
    """Run a model on a few samples of a batch, or on one more: the last one repeated.

    Args:
        model: The model; its buffers and all random states are put back.
        run: Runs it on inputs and returns its output tensors.
        inputs: What it is called with.
        batch_size: B.
        axis: The expected batch axis.

    Returns:
        What it did; None where it runs with no other number of them.
    """
    one_more = [*range(batch_size), batch_size - 1]
    orders = [one_more] if batch_size <= _FEW else [list(range(_FEW)), one_more]
    # Lists of as many values as samples may have one for each.
    batch = Batch(inputs, batch_size, axis)
    listed = (True, False) if batch.has_lists else (False,)
    used = [*model.parameters(), *model.buffers(), *_tree.tensors(inputs)]
    # With gradients where it raises without: it may differentiate within its forward.
    for gradients, order, with_values in product((False, True), orders, listed):
        given, recorder = batch.with_lists(order) if with_values else batch.of_samples(order), _Recorder()
        try:
            with restored(model), unnoticed(used), torch.set_grad_enabled(gradients):
                with WithoutDropout(), recorder:
                    outputs = run(given)
            return Resized(recorder.found, shapes_of(list(outputs)), batch_size, len(order))
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            continue
    return None
