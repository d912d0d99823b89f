"""Evidence for which rows are whose: the gradient of some samples alone.

A backward that starts from some samples' outputs leaves exact zeros in every row that is not theirs. It is asked of one
sample alone and, for every binary digit, of the samples whose number has it: no reordering of the batch looks right to
all of them. That decides between the row maps that the sizes allow, and it proves that samples do not mix: where no map
explains the zeros, the model is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghostclip.capture.usage import MAX_ATTEMPTS, Record, Site, Use
from ghostclip.errors import BatchAxisError, SampleMixingError


@dataclass(eq=False)
class Probe:
    """Receives the gradients of some samples' outputs and judges every call site, once for every set of samples.

    Attributes:
        samples: The samples of the backward that runs.
        describe_module: Names the module that owns a parameter.
        failures: What is wrong, in the order in which gradients arrived (nearest to the output first).
    """

    samples: set[int]
    describe_module: Callable[[str], str]
    failures: list[tuple[Use, str]] = field(default_factory=list)
    _rejected: set[tuple[Site, tuple[str, int]]] = field(default_factory=set)
    _known: dict[Site, tuple[str, int] | None] = field(default_factory=dict)

    def receive(self, use: Use, grad: Tensor) -> None:
        """Judge the row maps of one use.

        Args:
            use: The use.
            grad: Gradient of its output from these samples alone.
        """
        if use.node is not None:
            # Non-reentrant checkpointing keeps what it recomputed until it is read.
            _ = use.node.saved_tensors
        if not bool((grad.nan_to_num(nan=0.0) != 0).any()):
            use.site.attempts += 1
            return
        # What an earlier forward has shown must hold for good: rows may not change their order from batch to batch.
        known = self._known.setdefault(use.site, use.site.chosen)
        for row_map in use.maps:
            key = (use.site, row_map.key)
            if key in self._rejected or (known not in (None, row_map.key) and row_map.kind not in ("listed", "whole")):
                continue
            if _explains(row_map, use, grad, self.samples):
                if row_map.kind != "listed":
                    use.site.chosen = row_map.key
                use.site.attempts = MAX_ATTEMPTS
                return
            self._rejected.add(key)
        # Whatever an earlier set of samples seemed to show.
        use.site.attempts = 0
        self.failures.append((use, _shapes(grad, use)))

    def constants(self) -> set[Any]:
        """Return the call sites whose data turned out not to be rows of samples (positions where T equals B)."""
        return {use.constant_key for use, _ in self.failures if use.constant_key is not None}

    def verdict(self, where: Callable[[], str]) -> None:
        """Raise if a use could not be explained.

        Args:
            where: Finds the place where samples start to mix; returns sentences that name it and a remedy.

        Raises:
            SampleMixingError: Rows of other samples received a gradient under every row map.
            BatchAxisError: The same where the sizes left only a doubtful row map.
        """
        if not self.failures:
            return
        use, shapes = self.failures[-1]
        place = self.describe_module(use.site.names[0])
        record = use.record
        if record.reordered:
            message = (
                f"{place}: {use.site.describe()} has rows {shapes} in another order than the samples of the batch: the "
                "model sorts, flips or gathers its inputs before this layer, in a way that cannot be followed or is "
                "not undone. Index with x[order] or index_select, return outputs in the batch's own order, or reorder "
                "outside the model."
            )
            raise BatchAxisError(message)
        coincidence = [size for size in use.lead_sizes[1:] if size == record.batch_size] if use.lead_sizes else []
        if coincidence or use.maps[0].kind in ("major", "minor"):
            message = (
                f"{place}: {use.site.describe()} has rows {shapes} that cannot be assigned to the "
                f"{record.batch_size} samples: "
                "another axis has the batch's size, or rows are folded in an order of their own. Start with a batch "
                "size "
                "that no other axis has; later steps may have any size."
            )
            raise BatchAxisError(message)
        message = (
            "the output of one sample depends on other samples of the batch, so that per-sample gradients do not exist. "
            f"{where()} (Seen in the gradient of {use.site.describe()}, rows {shapes}, in {place}.)"
        )
        raise SampleMixingError(message)


def _explains(row_map: Any, use: Use, grad: Tensor, samples: set[int]) -> bool:
    if row_map.kind == "whole":
        return True
    rows_B = row_map.split(grad, use.lead, use.record.batch_size)
    others = torch.ones(rows_B.shape[0], dtype=torch.bool, device=rows_B.device)
    others[list(samples)] = False
    # A zero gradient through a sample that is not finite gives NaN there: no evidence of anything.
    return not bool((rows_B[others].nan_to_num(nan=0.0) != 0).any())


def _shapes(grad: Tensor, use: Use) -> str:
    return str(tuple(grad.shape[: use.lead]))


def sample_sets(batch_size: int) -> list[set[int]]:
    """Return the sets of samples to ask about: one sample alone, then those with each binary digit in their number."""
    places = range((batch_size - 1).bit_length())
    digits = [{sample for sample in range(batch_size) if sample >> place & 1} for place in places]
    alone = {batch_size // 2}
    return [alone, *(chosen for chosen in digits if chosen != alone)]


def cotangents(
    outputs: Sequence[Tensor], *, batch_size: int, axis: int, samples: set[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return (output, gradient) pairs that start a backward from some samples' outputs.

    Args:
        outputs: The model's output tensors.
        batch_size: B.
        axis: The expected batch axis.
        samples: The samples.

    Returns:
        Pairs for the outputs that have a batch axis; the gradient is random in the samples' rows, zero elsewhere.
    """
    pairs = []
    generator = torch.Generator().manual_seed(0)
    for output in outputs:
        if not (output.requires_grad and output.is_floating_point()):
            continue
        place = axis if axis < output.dim() and output.shape[axis] == batch_size else 0
        if output.dim() == 0 or output.shape[place] != batch_size:
            continue
        grad = torch.zeros_like(output, memory_format=torch.contiguous_format)
        chosen = torch.tensor(sorted(samples), device=grad.device)
        # Never zero, so that no row of a sample can be missed.
        shape = [*grad.shape[:place], len(samples), *grad.shape[place + 1 :]]
        noise = torch.rand(shape, generator=generator) + 0.5
        grad.index_copy_(place, chosen, noise.to(device=grad.device, dtype=grad.dtype))
        pairs.append((output, grad))
    return pairs


def ask(probe: Probe, outputs: Sequence[Tensor], *, record: Record, run: Callable[..., bool | None]) -> bool:
    """Run the backwards that bring a probe its evidence.

    Args:
        probe: The probe, listening already.
        outputs: The model's output tensors.
        record: The forward.
        run: Runs one backward; says None when it must be called again.

    Returns:
        Whether there was anything to ask: False where no output has a batch axis.
    """
    for samples in sample_sets(record.batch_size):
        probe.samples = samples
        pairs = cotangents(outputs, batch_size=record.batch_size, axis=record.axis, samples=samples)
        if not pairs:
            return False
        starts, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
        if run(starts, grads) is None:
            run(starts, grads)
    return True
