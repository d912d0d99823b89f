"""``plan_devices``: what one device of a mesh holds, sends and computes, private against non-private.

Sizes are counted on the model of one device, on the meta device; what clipping costs is what `ghostclip.planning.coverage`
says of the same layers.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError
from ghostclip.planning.coverage import Coverage, as_table, readable_bytes
from ghostclip.scaling import rows
from ghostclip.scaling.facts import Facts, counted
from ghostclip.scaling.local import Mesh
from ghostclip.scaling.rows import Row, readable_flops
from ghostclip.scaling.source import Planned
from ghostclip.validation.inspection.inspect import layers_table
from ghostclip.validation.inspection.memory import OPTIMIZERS, USABLE

# Microbatches for each stage, so that a fifth of the time at most is idle.
_A_STAGE: Final = 4
# Rows of what is divided over dp.
_DIVIDED: Final = ("weights", "gradients, clipped sums", "state of")
_WIDTH: Final = 100


@dataclass(frozen=True)
class DevicePlan:
    """Memory, traffic and work of one device of a mesh."""

    title: list[str]
    ways: tuple[str, ...]  # names of the columns: non-private, and the strategies that fit
    batch_size: int  # samples of a physical batch, of each group of devices that has samples of its own
    device_bytes: int  # memory of a device
    fixed: list[Row]  # bytes that do not depend on the batch
    a_sample: list[Row]  # bytes for each sample
    wire: list[Row]  # bytes that a device sends in a physical batch
    flops: list[Row]
    coverage: Coverage = field(repr=False)  # how each layer of one device is handled
    measured: int = 2  # samples that the coverage is of
    dp: int = 1  # devices among which weights, sums and the optimizer's state are divided

    def physical_batch(self) -> tuple[int, ...]:
        """Return the largest physical batch that fits on a device, of which a tenth is left, by way; 0 for none."""
        room = [int(USABLE * self.device_bytes) - used for used in _totals(self.fixed)]
        return tuple(max(0, free // max(1, each)) for free, each in zip(room, _totals(self.a_sample), strict=True))

    def answer(self) -> str:
        """Return whether private training fits, and how many parts of the weights it needs at least, in short lines."""
        device, private = readable_bytes(self.device_bytes), range(1, len(self.ways))
        if any(self.physical_batch()[way] for way in private):
            fits = [f"{self.physical_batch()[way]} with {self.ways[way]}" for way in private]
            return f"fits on devices of {device}; samples at once on each: {', '.join(fits)}"
        shared = sum(min(row.values[1:]) for row in self.fixed if row.what.startswith(_DIVIDED)) * self.dp
        other = min(_totals(self.fixed)[1:]) - shared // self.dp
        room = int(USABLE * self.device_bytes) - other - min(_totals(self.a_sample)[1:])
        if room <= 0:
            return (
                f"does not fit on devices of {device}, whatever dp is: take tp, --checkpointing, fewer tokens,\n"
                "or fewer parameters (--trainable)"
            )
        return f"does not fit on devices of {device}: needs dp >= {max(self.dp + 1, -(-shared // room))}, or other axes"

    def total_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a device, at most, by way."""
        each = _totals(self.a_sample)
        return tuple(used + self.batch_size * more for used, more in zip(_totals(self.fixed), each, strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain numbers and texts, for JSON."""
        return {
            "answer": self.answer(),
            "title": self.title,
            "ways": self.ways,
            "batch_size": self.batch_size,
            "device_bytes": self.device_bytes,
            "total_bytes": self.total_bytes(),
            "physical_batch": self.physical_batch(),
            **{name: [asdict(row) for row in getattr(self, name)] for name in ("fixed", "a_sample", "wire", "flops")},
            "total_wire": _totals(self.wire) or (0,) * len(self.ways),
            "total_flops": _totals(self.flops),
        }

    def __str__(self) -> str:
        device, sent = readable_bytes(self.device_bytes), f"bytes that a device sends, B = {self.batch_size}"
        memory = [
            *_lines(self.fixed, readable_bytes),
            ("fixed", *map(readable_bytes, _totals(self.fixed)), ""),
            *_lines(self.a_sample, readable_bytes, prefix="a sample: "),
            ("a sample", *map(readable_bytes, _totals(self.a_sample)), ""),
            ("largest physical batch", *(str(fit) if fit else "none" for fit in self.physical_batch()),
             f"({USABLE:g} x {device} - fixed) / a sample"),
            (f"all, B = {self.batch_size}", *map(readable_bytes, self.total_bytes()), "fixed + B x a sample, at most"),
        ]  # fmt: skip
        layers = f"layers of one device, {self.coverage.strategy}, for {self.measured} samples (FLOPs over non-private)"
        return "\n\n".join((
            self.answer(),
            "\n".join(textwrap.fill(line, _WIDTH) for line in self.title),
            as_table((f"memory of a device of {device}", *self.ways, "how"), memory),
            self._summed(sent, self.wire, readable_bytes) if self.wire else f"{sent}: none, there is one device",
            self._summed(f"FLOPs of a device, B = {self.batch_size}", self.flops, readable_flops),
            f"{layers}\n{layers_table(self.coverage, priced=True)}",
        ))  # fmt: skip

    def _summed(self, head: str, rows: Sequence[Row], readable: Callable[[int], str]) -> str:
        total = _totals(rows)
        ratios = ", ".join(f"{value / max(1, total[0]):.3f} x" for value in total[1:])
        last = ("all", *map(readable, total), f"over non-private: {ratios}")
        return as_table((head, *self.ways, "how"), [*_lines(rows, readable), last])


def _totals(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(row.values for row in rows), strict=True)))


def _lines(rows: Sequence[Row], readable: Callable[[int], str], *, prefix: str = "") -> list[tuple[str, ...]]:
    return [(prefix + row.what, *(readable(value) if value else "-" for value in row.values), row.how) for row in rows]


@_validate.suggests_options
def plan_devices(  # noqa: PLR0913 - each choice by its name
    planned: Planned,
    *,
    mesh: Mesh,
    device_bytes: int,
    batch_size: int = 0,
    optimizer: str = "adamw",
    checkpointing: bool = False,
    microbatches: int = 0,
) -> DevicePlan:
    """Plan a training on a mesh.

    Args:
        planned: The model and a step of it, on the meta device; the model is changed into that of one device.
        mesh: The devices.
        device_bytes: Memory of each.
        batch_size: Samples of a physical batch; 0 for the most that all ways fit, one at least.
        optimizer: Whose state is counted: "adamw", "momentum" (SGD with momentum) or "sgd".
        checkpointing: Keep of each block its input alone, and run it again in every backward.
        microbatches: Parts that a physical batch goes through a pipeline in; 0 for four times as many as stages.

    Returns:
        The plan. A model that cannot be shared so, or runs on numbers only, is refused with ``UnsupportedModelError``.

    Raises:
        InvalidOptionError: An option has a value that is not allowed.
    """
    _validate.choice(optimizer, "optimizer", OPTIMIZERS)
    if batch_size < 0:
        raise InvalidOptionError(f"batch_size={batch_size}: expected a number of samples, or 0 for what fits.")
    microbatches = _microbatches(planned, mesh, microbatches, checkpointing=checkpointing)
    if batch_size % microbatches:
        raise InvalidOptionError(
            f"batch_size={batch_size} with {microbatches} microbatches of one size: give a multiple, or other "
            "microbatches."
        )
    facts = counted(planned, mesh, checkpointing=checkpointing, microbatches=microbatches)
    plan = DevicePlan(
        title=_title(planned, facts, optimizer), ways=("non-private", *facts.coverages), batch_size=batch_size,
        device_bytes=device_bytes, fixed=rows.fixed(facts, optimizer), a_sample=rows.a_sample(facts), wire=[], flops=[],
        coverage=next(iter(facts.coverages.values())), measured=facts.samples, dp=mesh.dp,
    )  # fmt: skip
    fits = min(plan.physical_batch())
    size = batch_size or max(microbatches, fits - fits % microbatches)
    return replace(plan, batch_size=size, wire=rows.wire(facts, size), flops=rows.flops(facts, size))


def _microbatches(planned: Planned, mesh: Mesh, microbatches: int, *, checkpointing: bool) -> int:
    """Return the number of parts that a batch is cut into; refuse contradictions."""
    if (planned.mesh.cp, planned.mesh.pp) != (mesh.cp, mesh.pp):
        raise InvalidOptionError(
            f"mesh {mesh}: the model was loaded for {planned.mesh}. Give load_planned the same mesh."
        )
    if microbatches < 0 or (microbatches and mesh.pp == 1):
        raise InvalidOptionError(
            f"microbatches={microbatches} with pp={mesh.pp}: parts of a batch are those of a pipeline."
        )
    if checkpointing and mesh.cp > 1:
        raise InvalidOptionError(
            f"checkpointing with mesh {mesh}: where sequences are split (cp), book-keeping alone clips, and would keep "
            "what checkpointing frees. Leave one of them out."
        )
    return 1 if mesh.pp == 1 else microbatches or _A_STAGE * mesh.pp


def _title(planned: Planned, facts: Facts, optimizer: str) -> list[str]:
    mesh = facts.mesh
    trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
    computed = {2: "bfloat16", 4: "float32", 8: "float64"}[facts.itemsize]
    lines = [
        f"{planned.source.title}: {planned.elements:,} parameters",
        f"mesh {mesh}: {mesh.devices} devices, {mesh.data_ranks} x B samples at a time; a rank of tp={mesh.tp} "
        f"computes with {sum(facts.units):,} values, {trained:,} of them trainable",
        f"computed in {computed}; weights, sums and the state of {optimizer} in 32 bits; units of fully_shard: each "
        "block, and each other module that owns parameters",
    ]
    if facts.checkpointing:
        clipped = "so that strategy 'auto' takes two backwards"
        if mesh.pp > 1:
            clipped = "and run again once: stages clip by book-keeping, which keeps their factors"
        lines += [f"blocks are checkpointed, {clipped}"]
    lines += ["the loss is computed in tiles of logits, without privacy as well"] if planned.in_tiles else []
    if mesh.pp > 1:
        stages, parts = mesh.pp, facts.microbatches
        lines += [
            f"a stage with {len(facts.blocks)} blocks and all that is outside of blocks, more than any has; {parts} "
            f"microbatches by 1F1B, which idles {stages - 1}/{parts + stages - 1} of the time"
        ]
    lines += ["keys and values of all positions are gathered by every rank of cp"] if mesh.cp > 1 else []
    lines += ["strategies of two backwards do not go with cp and pp"] if mesh.cp * mesh.pp > 1 else []
    if mesh.cp * mesh.pp > 1 and (max(mesh.dp, mesh.tp) > 1 or mesh.cp > 1 < mesh.pp):
        lines += ["planned only: make_private takes cp and pp with copies (replicate), not with dp, tp or each other"]
    return lines
