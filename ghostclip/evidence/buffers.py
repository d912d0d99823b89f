"""Buffers that a forward changes: what comes from the weights alone may stay, what comes from the batch may not.

A buffer is saved and shared with the model. Running statistics, or a codebook that follows its inputs, store what they
saw of private samples without any noise.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.errors import SampleMixingError
from ghostclip.evidence.dependence import replaced, same_randomness


class Buffers:
    """The buffers of a model as they were before a forward."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them.

        Args:
            model: The model.
        """
        self._model = model
        self._before = {
            name: (buffer, buffer.detach().clone(), _torch.version(buffer))
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def changed(self) -> dict[str, Tensor]:
        """Return a copy of every buffer that the forward changed in place or exchanged, by name."""
        now = dict(self._model.named_buffers())
        return {
            name: now[name].detach().clone()
            for name, (buffer, copy, version) in self._before.items()
            if name in now and now[name].shape == copy.shape and self._differs(now[name], buffer, copy, version)
        }

    @staticmethod
    def _differs(now: Tensor, buffer: Tensor, copy: Tensor, version: int) -> bool:
        if now is buffer and _torch.version(now) == version:
            return False
        return not torch.equal(now.nan_to_num(), copy.nan_to_num())

    def refuse_data(self, inputs: Any, *, run: Callable[[Any], Any], batch_size: int, axis: int) -> None:
        """Refuse a model whose buffers follow the samples: run it with one sample in the place of another.

        Args:
            inputs: What the forward was called with.
            run: Runs it once more, on other inputs.
            batch_size: B, at least 2.
            axis: The batch axis.

        Raises:
            SampleMixingError: A buffer comes out differently.
        """
        after = self.changed()
        if not after:
            return
        altered = replaced(inputs, 0, batch_size=batch_size, axis=axis)
        try:
            found = [self._after_run(run, given, names=after) for given in (inputs, altered)]
        finally:
            self._write(after)
        follows = [name for name in after if not torch.allclose(found[0][name], found[1][name], equal_nan=True)]
        if follows:
            place, _, name = follows[0].rpartition(".")
            owner = type(self._model.get_submodule(place)).__name__
            message = (
                f"{place or 'model'} ({owner}): the forward updates the buffer '{name}' from the batch, so that what "
                "private samples looked like is stored in the model without noise. Switch that off (running "
                "statistics, moving averages of codebooks), put the module in eval mode, or learn it as a parameter."
            )
            raise SampleMixingError(message)

    def _after_run(self, run: Callable[[Any], Any], inputs: Any, *, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the buffers after a forward that starts from those of before, with the same random numbers."""
        self._write({name: self._before[name][1] for name in names})
        with same_randomness([*self._model.parameters(), *self._model.buffers()]):
            run(inputs)
        now = dict(self._model.named_buffers())
        return {name: now[name].detach().clone() for name in names}

    def _write(self, values: dict[str, Tensor]) -> None:
        now = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, value in values.items():
                now[name].copy_(value)
