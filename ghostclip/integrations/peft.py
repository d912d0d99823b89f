"""Watch over adapters of peft: every one that is trainable has to be trained.

LoRA, DoRA, IA3, prompts and prefixes are ordinary parameters to ghostclip, whichever of `get_peft_model` and
`make_private` is called first. What goes wrong is quieter: adapters that are trainable and never get a gradient,
because they were added beside the layer that runs, or because the optimizer was made before them. Losses fall all the
same where anything else is trained, and ε is spent. `AdapterWatch` says so after the first steps; `DPTrainer` makes
one.

LoHa, RandLora, C3A and SHiRA form their weights by autograd functions of their own, or by sparse tensors, behind which
no sample's gradient is seen: `use_plain_operations` has them do the same by torch's operations; `DPTrainer` calls it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip.optim import DPOptimizer, release_of

# An adapter that starts as zero hides the gradient of its other factor until it has moved, which a warm-up that begins
# with a rate of zero puts off by a step.
_STEPS = 4
_NAMED = 5


# Whose forwards are operations of torch, and whose backwards are their derivatives.
_FUNCTIONS: Final = (
    ("peft.tuners.loha.layer", "HadaWeight"),
    ("peft.tuners.loha.layer", "HadaWeightCP"),
    ("peft.tuners.randlora.layer", "UniqueBaseGrad"),
    ("peft.tuners.c3a.utils", "BlockCircularConvolution"),
)


class UntrainedAdapterWarning(UserWarning):
    """Trainable parameters were not trained in the first private steps."""


class AdapterWatch:
    """Looks at the clipped sums of the first releases, before noise hides what is zero; `untrained` names parameters.

    Privacy:
        The warning names parameters whose sum over a private batch is exactly zero, or that have none. Which these are
        follows from the model's structure in all but contrived cases; it is not covered by ε.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._seen = 0
        self._still: set[str] | None = None
        self.untrained: list[str] = []
        release_of(optimizer).attach_step_hook(self._look)

    def _look(self, optimizer: DPOptimizer) -> None:
        if self._seen >= _STEPS or not any(optimizer.clipper.rows_seen):
            return
        self._seen += 1
        trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if self._seen == 1:
            optimized = {id(p) for p in optimizer.params}
            self._say([n for n, p in trainable.items() if id(p) not in optimized], "the optimizer does not hold them")
            without = set(map(id, optimizer.clipper.without_sum(list(trainable.values()))))
            silent = [n for n, p in trainable.items() if id(p) in optimized & without]
            self._say(silent, "no gradient reached them in the first step")
        still = {name for name, p in trainable.items() if name not in self.untrained and _is_still(optimizer, p)}
        self._still = still if self._still is None else self._still & still
        if self._seen == _STEPS:
            self._say(sorted(self._still), f"their gradients were exactly zero in the first {_STEPS} steps")

    def _say(self, names: list[str], why: str) -> None:
        if not names:
            return
        self.untrained += names
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(
            f"{len(names)} trainable parameter(s) are not trained: {why}. {', '.join(names[:_NAMED])}{more}. ε is "
            "spent all the same. Call get_peft_model before the optimizer is made, check target_modules against the "
            "layers that run, and freeze what should not be trained. (An expert without a token is no error.)",
            UntrainedAdapterWarning,
            stacklevel=2,
        )


def _is_still(optimizer: DPOptimizer, parameter: nn.Parameter) -> bool:
    total = optimizer.clipper.summed_gradient(parameter)
    return total is not None and not bool(total.count_nonzero())


def use_plain_operations() -> None:
    """Let peft's LoHa, RandLora, C3A and SHiRA compute by torch's own operations, in this process.

    Call it before the first forward of a private model with such adapters. What they compute stays the same; a backward
    keeps a few tensors of a weight's size more.
    """
    # A version without one of them has no such adapter.
    for module, name in _FUNCTIONS:
        with suppress(ImportError):
            function: Any = getattr(importlib.import_module(module), name)
            function.apply = _Plain(function.forward)
    with suppress(ImportError):
        shira: Any = importlib.import_module("peft.tuners.shira.layer").Linear
        shira.get_delta_weight = _shira_weight


class _Plain:
    """Forward of an autograd function, which autograd differentiates by itself."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, *args: Any) -> Tensor:
        return self._forward(self, *args)

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing: autograd does."""


def _shira_weight(layer: Any, adapter: str) -> Tensor:
    """Return a dense matrix of SHiRA's entries, in the place of `get_delta_weight`."""
    entries: Tensor = layer.shira_weight[adapter] * layer.scaling[adapter]
    rows, columns = layer.shira_indices[adapter].to(entries.device)
    empty = torch.zeros(layer.out_features, layer.in_features, dtype=entries.dtype, device=entries.device)
    return empty.index_put((rows, columns), entries)
