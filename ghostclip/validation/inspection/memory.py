"""Memory of a private step, in parts, and the largest physical batch that fits on a device."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from torch import nn

from ghostclip.planning.coverage import readable_bytes

# Values that an optimizer keeps for every trainable one.
OPTIMIZERS: Final[dict[str, int]] = {"adamw": 2, "momentum": 1, "sgd": 0}
DEVICES: Final[tuple[int, ...]] = tuple(size * 10**9 for size in (8, 16, 24, 40, 80))
# Of a device: the rest is for the library's own buffers, for what operations need while they run, and for gaps.
USABLE: Final = 0.9


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a private step; those of a device are counted in GB of 1000 MB.

    Attributes:
        parameters: All weights.
        gradients: The clipped sum, and its noisy release in its place.
        optimizer: State of the optimizer.
        activations: What the forward keeps for the backward, of the whole batch.
        clipping: What clipping keeps besides, of the whole batch, at most.
        batch_size: B.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    clipping: int
    batch_size: int

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All bytes, at most."""
        return self.fixed + self.activations + self.clipping

    def physical_batch(self, device_bytes: int) -> int:
        """Return the largest physical batch that fits, if every sample takes as much as these; 0 where not one does.

        Args:
            device_bytes: Memory of the device, of which a tenth is left.

        Returns:
            Samples.
        """
        a_sample = max(1.0, (self.activations + self.clipping) / self.batch_size)
        return max(0, int((USABLE * device_bytes - self.fixed) / a_sample))

    def as_dict(self, devices: Sequence[int]) -> dict[str, object]:
        """Return everything as plain numbers, for JSON.

        Args:
            devices: Memory of the devices in question.

        Returns:
            Bytes by part, and physical batches by bytes of a device.
        """
        return {
            **asdict(self),
            "total": self.total,
            "physical_batch": {str(size): self.physical_batch(size) for size in devices},
        }

    def text(self, optimizer: str, devices: Sequence[int]) -> list[str]:
        """Return two lines for people.

        Args:
            optimizer: Its name.
            devices: Memory of the devices in question.

        Returns:
            The parts, and what fits where.
        """
        parts = [("parameters", self.parameters), ("gradients", self.gradients)]
        parts += [(f"state of {optimizer}", self.optimizer)] if self.optimizer else []
        parts += [("activations", self.activations), ("clipping", self.clipping)]
        shown = " + ".join(f"{readable_bytes(size)} {name}" for name, size in parts)
        fits = [(readable_bytes(size).replace(".0 ", " "), self.physical_batch(size)) for size in devices]
        fitting = [(name, batch) for name, batch in fits if batch]
        places = [
            f"on {name} at {'' if number else 'physical batch '}{batch}" for number, (name, batch) in enumerate(fitting)
        ]
        none = ", ".join(name for name, batch in fits if not batch)
        lines = [f"in bytes, at most: {readable_bytes(self.total)} = {shown}"]
        lines += [f"fits {', '.join(places)}"] if places else []
        lines += [f"does not fit on {none}"] if none else []
        return lines


def memory_of(model: nn.Module, *, optimizer: str, saved: int, held: int, batch_size: int) -> StepMemory:
    """Add up a private step.

    Args:
        model: The model.
        optimizer: One of `OPTIMIZERS`.
        saved: Bytes that the forward keeps for the backward.
        held: Bytes that clipping keeps besides.
        batch_size: B.

    Returns:
        The memory.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    # Sums are kept in float32 at least.
    sums = sum(p.numel() * max(4, p.element_size()) for p in trained)
    state = OPTIMIZERS[optimizer] * sum(p.numel() * p.element_size() for p in trained)
    return StepMemory(
        parameters=sum(p.numel() * p.element_size() for p in model.parameters()), gradients=sums, optimizer=state,
        activations=saved, clipping=held, batch_size=batch_size,
    )  # fmt: skip
