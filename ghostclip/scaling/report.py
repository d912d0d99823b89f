"""The page of a plan: rows with their arithmetic, by way of training."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from ghostclip.planning.coverage import Coverage, as_table, readable_bytes
from ghostclip.validation.inspection.inspect import layers_table
from ghostclip.validation.inspection.memory import USABLE


@dataclass(frozen=True)
class Row:
    """One quantity.

    Attributes:
        what: Its name.
        values: One for each way, bytes or FLOPs.
        how: The arithmetic.
    """

    what: str
    values: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class DevicePlan:
    """What one device of a mesh holds, sends and computes.

    Attributes:
        title: The model, the mesh and the options.
        ways: Names of the columns: non-private, and the strategies that fit.
        batch_size: Samples of a physical batch, of each group of devices that has samples of its own.
        device_bytes: Memory of a device.
        fixed: Bytes that do not depend on the batch.
        a_sample: Bytes for each sample.
        wire: Bytes that a device sends in a physical batch.
        flops: FLOPs of a device in a physical batch.
        coverage: How each layer of one device is handled.
        measured: Samples that the coverage is of.
    """

    title: list[str]
    ways: tuple[str, ...]
    batch_size: int
    device_bytes: int
    fixed: list[Row]
    a_sample: list[Row]
    wire: list[Row]
    flops: list[Row]
    coverage: Coverage = field(repr=False)
    measured: int = 2

    def physical_batch(self) -> tuple[int, ...]:
        """Return the largest physical batch that fits, by way; 0 where not one sample does."""
        return largest_batches(self.fixed, self.a_sample, self.device_bytes)

    def total_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a device, at most, by way."""
        each = _totals(self.a_sample)
        return tuple(used + self.batch_size * more for used, more in zip(_totals(self.fixed), each, strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain numbers and texts, for JSON."""
        parts = {name: [asdict(row) for row in getattr(self, name)] for name in ("fixed", "a_sample", "wire", "flops")}
        return {
            "title": self.title,
            "ways": self.ways,
            "batch_size": self.batch_size,
            "device_bytes": self.device_bytes,
            "total_bytes": self.total_bytes(),
            "physical_batch": self.physical_batch(),
            **parts,
            "total_wire": _totals(self.wire, len(self.ways)),
            "total_flops": _totals(self.flops),
        }

    def __str__(self) -> str:
        """Return a page of text."""
        return "\n\n".join(["\n".join(self.title), self._memory(), self._wire(), self._flops(), self._layers()])

    def _memory(self) -> str:
        fits = self.physical_batch()
        usable = f"({USABLE:g} x {readable_bytes(self.device_bytes)} - fixed) / a sample"
        lines = [
            *_lines(self.fixed, readable_bytes),
            ("fixed", *map(readable_bytes, _totals(self.fixed)), ""),
            *_lines(self.a_sample, readable_bytes, prefix="a sample: "),
            ("a sample", *map(readable_bytes, _totals(self.a_sample)), ""),
            ("largest physical batch", *(str(fit) if fit else "none" for fit in fits), usable),
            (f"all, B = {self.batch_size}", *map(readable_bytes, self.total_bytes()), "fixed + B x a sample, at most"),
        ]
        return as_table((f"memory of a device of {readable_bytes(self.device_bytes)}", *self.ways, "how"), lines)

    def _wire(self) -> str:
        head = f"bytes that a device sends, B = {self.batch_size}"
        if not self.wire:
            return f"{head}: none, there is one device"
        total = _totals(self.wire, len(self.ways))
        lines = [*_lines(self.wire, readable_bytes), ("all", *map(readable_bytes, total), _ratios(total))]
        return as_table((head, *self.ways, "how"), lines)

    def _flops(self) -> str:
        total = _totals(self.flops)
        lines = [*_lines(self.flops, readable_flops), ("all", *map(readable_flops, total), _ratios(total))]
        return as_table((f"FLOPs of a device, B = {self.batch_size}", *self.ways, "how"), lines)

    def _layers(self) -> str:
        head = f"layers of one device, {self.coverage.strategy}, for {self.measured} samples (FLOPs over non-private)"
        return f"{head}\n{layers_table(self.coverage, priced=True)}"


def largest_batches(fixed: Sequence[Row], a_sample: Sequence[Row], device_bytes: int) -> tuple[int, ...]:
    """Return the largest physical batch that fits on a device, of which a tenth is left.

    Args:
        fixed: Memory that does not depend on the batch.
        a_sample: Memory that each sample adds.
        device_bytes: Memory of the device.

    Returns:
        Samples, by way; 0 where not one fits.
    """
    room = [int(USABLE * device_bytes) - used for used in _totals(fixed)]
    return tuple(max(0, free // max(1, each)) for free, each in zip(room, _totals(a_sample), strict=True))


def _totals(rows: Sequence[Row], ways: int = 0) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(row.values for row in rows), strict=True))) or (0,) * ways


def _lines(rows: Sequence[Row], readable: Callable[[int], str], *, prefix: str = "") -> list[tuple[str, ...]]:
    return [(prefix + row.what, *(readable(value) if value else "-" for value in row.values), row.how) for row in rows]


def _ratios(total: Sequence[int]) -> str:
    return "over non-private: " + ", ".join(f"{value / max(1, total[0]):.3f} x" for value in total[1:])


def readable_flops(number: int) -> str:
    """Return a number of FLOPs for people.

    Args:
        number: The number.

    Returns:
        It in MFLOP, GFLOP, TFLOP or PFLOP.
    """
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 10**6:.3f} MFLOP"
