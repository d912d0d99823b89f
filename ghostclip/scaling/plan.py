"""``plan_devices``: what one device of a mesh holds, sends and computes, private against non-private.

Sizes are counted on the model of one device, on the meta device; what clipping costs is what `ghostclip.planning` says
of the same layers. Each row of a plan has its arithmetic behind it. Bytes on the wire are those that a device sends in
rings: (n - 1)/n of what is gathered or reduce-scattered over n ranks, twice that of what is all-reduced.

Shape letters: B samples, T positions.
"""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ghostclip import _validate
from ghostclip.capture.call_sites import CallSite, Statistics
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.planning.coverage import Coverage, as_table, coverage_of, input_bytes, readable_bytes, stores_gradients
from ghostclip.planning.plan import MEMORY_BUDGET
from ghostclip.scaling.models import Mesh, Planned, Shard, reduce_to_shard, reduce_to_stage, units_of, values_per_device
from ghostclip.validation.inspection import OPTIMIZERS, USABLE, OrdinaryStep, call_sites, layers_table, plain_step

WAYS: Final[dict[str, str]] = {"book-keeping": "bookkeeping", "two backwards": "ghost"}
"""Private ways, and the strategies that they are."""

WIDE: Final = 4
"""Bytes of a weight, of its clipped sum and of each value of the optimizer's state, whatever is computed in."""


@dataclass(frozen=True)
class Facts:
    """Counts of the model of one device, for so many samples."""

    model: nn.Module
    mesh: Mesh
    itemsize: int  # bytes of a value that is computed with
    samples: int  # how many were counted
    plain: OrdinaryStep  # A step without privacy
    units: list[int]  # number of values of each unit of FSDP2
    shards: list[tuple[Shard, int]]  # weights of tensor parallelism, with the number of rows that meet each
    blocks: list[str]  # paths of the blocks
    checkpointing: bool  # blocks are run again in every backward
    arrived: dict[str, list[Statistics]]  # statistics of each parameter; with cp for whole sequences, as the costs are
    of_rank: dict[str, list[Statistics]]  # the same for the positions of one rank
    # cost of clipping, by way; with cp for whole sequences, part of which a device clips
    coverages: dict[str, Coverage]
    gathered: int  # bytes of keys and values of one rank's positions that other ranks get in a forward
    microbatches: int

    @property
    def backwards(self) -> list[int]:
        """How many backwards each way runs."""
        return [1, *(2 if WAYS[label] == "ghost" else 1 for label in self.coverages)]

    def row(self, what: str, value: int | Sequence[int], how: str, *, private: bool = False) -> "Row":
        """Return a row; a number is that of all ways, or of the private ones alone."""
        if isinstance(value, int):
            value = (0 if private else value, *(value,) * len(self.coverages))
        return Row(what, tuple(value), how)


def counted(planned: Planned, mesh: Mesh, *, checkpointing: bool, microbatches: int = 1) -> Facts:
    """Count a step on the model of one device, into which the planned model is changed."""
    model = planned.source.model
    blocks = reduce_to_stage(model, mesh.pp)
    shards = reduce_to_shard(model, mesh.tp)
    if checkpointing and not blocks:
        raise InvalidOptionError(
            f"{type(model).__name__} has no list of blocks of one class to checkpoint: leave checkpointing out."
        )
    try:
        with _RowCounts(shards) as rows:
            plain = plain_step(model, planned.losses, blocks=[block for _, block in blocks])
        sites = call_sites(model, planned.losses, axis=planned.source.batch_axis)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"{planned.source.title}: cannot be planned, since it does not run from shapes alone ({text}). Plan it by "
            "what 'ghostclip inspect' finds with numbers."
        ) from error
    of_rank = _arrived(sites, 1)
    if mesh.cp > 1 or mesh.pp > 1:
        labels = {"book-keeping"}
    else:
        # Under checkpointing strategy "auto" takes two backwards: factors of all blocks would be what it saves.
        labels = {"two backwards"} if checkpointing else set(WAYS)
    arrived = _arrived(sites, mesh.cp)
    return Facts(
        model, mesh, next(model.parameters()).element_size(), planned.samples, plain, units_of(model, blocks),
        [(shard, rows.found.get(shard.weight, 0)) for shard in shards], [path for path, _ in blocks], checkpointing,
        arrived, of_rank,
        {label: coverage_of(model, sites, strategy=name) for label, name in WAYS.items() if label in labels},
        planned.attention.gathered, microbatches,
    )  # fmt: skip


def _arrived(sites: Sequence[CallSite], ranks: int) -> dict[str, list[Statistics]]:
    """Return what came in, of whole sequences: norms are of where positions of several ranks meet."""
    by_name: defaultdict[str, list[Statistics]] = defaultdict(list)
    for site in sites:
        for key, item in site.statistics.items():
            site.statistics[key] = whole = replace(
                item,
                products=tuple(replace(one, positions=ranks * one.positions) for one in item.products),
                elements=ranks * item.elements,
                input_elements=ranks * item.input_elements,
            )
            for name in item.names:
                by_name[name].append(whole)
    return by_name


class _RowCounts(TorchFunctionMode):
    """Counts the rows that meet each sharded weight in a forward."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self.found: dict[nn.Parameter, int] = {}
        self._shards = {shard.weight for shard in shards}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the rows of a call that takes a sharded weight, and run it."""
        for weight in args[1:2]:
            if isinstance(weight, nn.Parameter) and weight in self._shards:
                wide = 1 if args[0].dtype == torch.int64 else args[0].shape[-1]
                self.found[weight] = args[0].numel() // wide
        return func(*args, **(kwargs or {}))


# Of each sample: its square, and three that tell what rounding may have done to it (`GroupNorms.complete`).
_NUMBERS: Final = 6
# Bytes of a squared norm between stages, and of the number of a table's row.
_SQUARE: Final = 8
_ID: Final = 4


@dataclass(frozen=True)
class Row:
    """One quantity: its name, a value for each way, bytes or FLOPs, and the arithmetic."""

    what: str
    values: tuple[int, ...]
    how: str


def _sent(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def readable_flops(number: int) -> str:
    """Return a number of FLOPs for people, in MFLOP, GFLOP, TFLOP or PFLOP."""
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 10**6:.3f} MFLOP"


def fixed(facts: Facts, optimizer: str) -> list[Row]:
    """Return the memory that does not depend on the batch."""
    mesh, row, state = facts.mesh, facts.row, OPTIMIZERS[optimizer]
    values, trained = values_per_device(facts.model, mesh.dp), values_per_device(facts.model, mesh.dp, trainable=True)
    part = f"values of a device (tp {mesh.tp}, dp {mesh.dp}) x {WIDE} B"
    rows = [
        row("weights", values * WIDE, f"{values:,} {part}"),
        row("gradients, clipped sums", trained * WIDE, f"{trained:,} {part}"),
    ]
    if state:
        how = f"{state} x {trained:,} values x {WIDE} B"
        rows.append(row(f"state of {optimizer}", state * trained * WIDE, how))
    # Weights are copied before they are computed with.
    if mesh.dp > 1 or facts.itemsize < WIDE:
        largest = sorted(facts.units, reverse=True)[:2]
        how = f"the two largest units, {' + '.join(f'{n:,}' for n in largest)} values x {facts.itemsize} B"
        rows.append(row("gathered weights", sum(largest) * facts.itemsize, how))
        how = f"the largest unit, {largest[0]:,} values x ({facts.itemsize} + {WIDE}) B"
        rows.append(row("gradients before reduction", largest[0] * (WIDE + facts.itemsize), how))
    return rows


def a_sample(facts: Facts) -> list[Row]:
    """Return the memory that each sample adds."""
    plain, samples, parts = facts.plain, facts.samples, facts.microbatches
    inside = [block.saved for block in plain.blocks]
    outside = plain.saved - sum(inside)
    how = f"{readable_bytes(outside // samples)} outside of blocks"
    share = 1.0
    if facts.mesh.pp > 1:
        # So many has a stage run forward and not backward, at most.
        in_flight = min(facts.mesh.pp, parts)
        share = in_flight / parts
        how += f", x {in_flight}/{parts}: microbatches under way (1F1B, first stage)"
    if facts.checkpointing:
        entering = sum(block.entering for block in plain.blocks)
        # One block of one microbatch runs again at a time.
        activations = int(share * (outside + entering)) + max(inside) // parts
        block = f"one block, {readable_bytes(max(inside) // samples)}"
        how = f"inputs of {len(inside)} blocks, {readable_bytes(entering // samples)} + {block} + {how}"
    else:
        activations = int(share * (outside + sum(inside)))
        how = f"{len(inside)} blocks x {readable_bytes(max(inside) // samples)} + {how}" if inside else how
    clipping, said = [0], "factors of one layer at a time"
    for label, coverage in facts.coverages.items():
        beyond = 0
        if WAYS[label] == "bookkeeping":
            beyond = _beyond(facts, coverage)
            gathered = f"factors beside activations not yet freed, {readable_bytes(beyond // samples)} at most"
            said = f"{gathered}; what is free up to {MEMORY_BUDGET:g} x is used"
            if facts.mesh.pp > 1:
                said = f"factors of all {parts} microbatches, until the last stage has its norms"
            beyond = max(beyond, int((MEMORY_BUDGET - 1) * activations))
        clipping.append(beyond // samples)
    return [facts.row("activations", activations // samples, how), facts.row("clipping", clipping, said)]


def _beyond(facts: Facts, coverage: Coverage) -> int:
    """Return an upper bound on what book-keeping stores beyond what the forward stores."""
    # A block's activations go when its backward has passed, and its factors come. The most is stored while some block
    # runs, whose own are counted as activations and as factors.
    gathered = [0] * (len(facts.blocks) + 1)
    # Inputs that several layers share are held once.
    inputs: dict[int, tuple[int, int]] = {}
    for row in coverage:
        # What is in no block comes last.
        number = next((k for k, path in enumerate(facts.blocks) if row.name.startswith(f"{path}.")), -1)
        gathered[number] += row.cost.held
        for item in facts.arrived[row.name]:
            if size := input_bytes(item, strategy=coverage.strategy):
                inputs[item.input_key] = number, size
    for number, size in inputs.values():
        gathered[number] += size
    # Where positions are split, factors are of whole sequences, of part of the samples.
    gathered = [size // facts.mesh.cp for size in gathered]
    if facts.mesh.pp > 1:
        # Of all microbatches, when the activations of the last ones are gone.
        return sum(gathered)
    *blocks, outside = gathered
    saved = [block.saved for block in facts.plain.blocks]
    # Block k runs: those before it hold activations, those behind it factors.
    return outside + max(0, 0, *(sum(blocks[k:]) - sum(saved[k + 1 :]) for k in range(len(blocks))))


def wire(facts: Facts, batch_size: int) -> list[Row]:
    """Return the bytes that a device sends in a physical batch."""
    mesh, row, rows = facts.mesh, facts.row, []
    shard = values_per_device(facts.model, mesh.dp, trainable=True)
    if mesh.dp > 1:
        whole, part = sum(facts.units), f"{mesh.dp - 1}/{mesh.dp}"
        gathered = _sent(whole * facts.itemsize, mesh.dp)
        how = f"{whole:,} values x {facts.itemsize} B x {part}, in the forward and in each backward"
        rows.append(row("dp: all-gather of weights", [(1 + times) * gathered for times in facts.backwards], how))
        trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
        how = f"{trained:,} values x {WIDE} B x {part}, once: norms need none of it"
        rows.append(row("dp: reduce-scatter of sums", _sent(trained * WIDE, mesh.dp), how))
    if mesh.replicate > 1:
        how = f"{shard:,} values x {WIDE} B x 2 x {mesh.replicate - 1}/{mesh.replicate}"
        rows.append(row("replicate: all-reduce of sums", _sent(2 * shard * WIDE, mesh.replicate), how))
    rows += _wire_of_tensors(facts, batch_size) if mesh.tp > 1 else []
    if mesh.cp > 1:
        part = f"{mesh.cp - 1}/{mesh.cp}"
        keys, factors, sums = (n * batch_size // facts.samples for n in (facts.gathered, *_exchanged(facts)))
        others = f"of a rank x {mesh.cp - 1} others, in the forward; their gradients in the backward"
        rows += [
            row("cp: keys and values", 2 * keys * (mesh.cp - 1), f"{readable_bytes(keys)} {others}"),
            row("cp: all-to-all of factors", _sent(factors, mesh.cp), "of layers where T/cp x (I + O) is less than "
                f"I x O, {readable_bytes(factors)} x {part}, to the samples' ranks", private=True),
            row("cp: reduce-scatter of samples' sums", _sent(sums, mesh.cp), "of all others I x O of each sample, "
                f"{readable_bytes(sums)} x {part}", private=True),
            row("cp: all-reduce of sums", _sent(2 * shard * WIDE, mesh.cp), f"{shard:,} values x {WIDE} B x 2 x {part}"
                ", as of gradients"),
        ]  # fmt: skip
    if mesh.pp > 1:
        part, sent = f"{mesh.pp - 1}/{mesh.pp}", facts.plain.blocks[0].entering * batch_size // facts.samples
        how = f"what enters a block, {readable_bytes(sent)} for B, to the next stage"
        norms = f"B x {_SQUARE} B x 2 x {part}: one a sample, at the end of the schedule"
        rows += [
            row("pp: activations", sent, how),
            row("pp: gradients of activations", sent, "the same, to the stage before"),
            row("pp: all-reduce of norms", _sent(2 * batch_size * _SQUARE, mesh.pp), norms, private=True),
        ]
    return rows


def _exchanged(facts: Facts) -> tuple[int, int]:
    """Return the bytes of factors, and of sums of each sample, that `SplitSequences.gather` sends."""
    factors = sums = 0
    for name, parameter in facts.model.named_parameters():
        for item in facts.of_rank.get(name, []):
            product = item.products[0] if len(item.products) == 1 and item.kind == "outer" else None
            if item.kind == "rows":
                factors += item.elements * item.itemsize + item.elements // parameter.shape[-1] * _ID
            elif product is not None and not stores_gradients(product):
                wide = product.inputs + product.outputs
                factors += product.count * product.positions * wide * item.itemsize
            else:
                sums += item.samples * parameter.numel() * max(WIDE, item.itemsize)
    return factors, sums


def _wire_of_tensors(facts: Facts, batch_size: int) -> list[Row]:
    tp, row = facts.mesh.tp, facts.row
    ring, rows = f"x 2 x {tp - 1}/{tp}", []

    def reduced(parts: Sequence[tuple[Shard, int]]) -> int:
        values = sum(number * shard.features for shard, number in parts) * batch_size // facts.samples
        return _sent(2 * values * facts.itemsize, tp)

    for what, forward in (("outputs", True), ("input gradients", False)):
        parts = [(shard, number) for shard, number in facts.shards if shard.completes_output is forward]
        again = facts.checkpointing and forward
        inside = [part for part in parts if again and part[0].module.startswith(tuple(facts.blocks))]
        sizes = [(1 if forward else times) * reduced(parts) + times * reduced(inside) for times in facts.backwards]
        rest = ", in the blocks again in each backward" * again if forward else ", in each backward"
        shapes = dict.fromkeys(f"B x {number // facts.samples} x {shard.features}" for shard, number in parts)
        how = f"{len(parts)} of {' or '.join(shapes)}, x {facts.itemsize} B {ring}{rest}"
        rows.append(row(f"tp: all-reduce of {what}", sizes, how))
    head = [number for shard, number in facts.shards if shard.style in {"colwise_rep", "colwise_gather_output"}]
    if head:
        size = 3 * _sent(2 * (sum(head) * batch_size // facts.samples * WIDE), tp)
        how = f"largest, sum and label's of the logits: 3 of B x T x {WIDE} B {ring}"
        rows.append(row("tp: loss over the vocabulary", size, how))
    norms = _sent(2 * (batch_size + 2) * _NUMBERS * 8, tp)
    how = f"one of (B + 2) x {_NUMBERS} x 8 B {ring}: squared norms of all layers, and their errors"
    return [*rows, row("tp: all-reduce of norms", norms, how, private=True)]


def flops(facts: Facts, batch_size: int) -> list[Row]:
    """Return the FLOPs of a device in a physical batch."""
    plain, row = facts.plain, facts.row

    def scaled(number: int) -> int:
        return number * batch_size // facts.samples

    forward, backward = f"{readable_flops(plain.forward // facts.samples)} x B", f"{plain.backward / plain.forward:.2f}"
    rows = [
        row("forward", scaled(plain.forward), forward),
        row("backward", scaled(plain.backward), f"{backward} x the forward"),
    ]
    if facts.checkpointing:
        blocks = sum(block.forward for block in plain.blocks)
        again = [scaled(times * blocks) for times in facts.backwards]
        rows.append(row("blocks' forward again", again, "in each backward"))
    clipping, second = [0], [0]
    for label, coverage in facts.coverages.items():
        total = coverage.total
        # With cp these are of whole sequences, of which each rank clips a part of the samples.
        clipping.append(scaled(total.private - total.base) // facts.mesh.cp)
        # What has no trainable parameter: two thirds of it is its backward.
        rest = (plain.flops - total.base) * 2 // 3 if WAYS[label] == "ghost" else 0
        second.append(scaled(max(0, rest)))
    rows.append(row("norms and clipped sums", clipping, "beyond weight gradients: sum of the table below"))
    if any(second):
        how = "attention's products and others without trainable weights, backwards once more"
        rows.append(row("second backward", second, how))
    return rows


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
        if any(self.physical_batch()[index] for index in private):
            fits = [f"{self.physical_batch()[index]} with {self.ways[index]}" for index in private]
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
    microbatches = _microbatches(planned, mesh, microbatches, checkpointing=checkpointing)
    _validate.refuse_any(
        (batch_size < 0, f"batch_size={batch_size}: expected a number of samples, or 0 for what fits."),
        (batch_size % microbatches > 0,
         f"batch_size={batch_size} with {microbatches} microbatches of one size: give a multiple, or other "
         "microbatches."),
    )  # fmt: skip
    facts = counted(planned, mesh, checkpointing=checkpointing, microbatches=microbatches)
    plan = DevicePlan(
        title=_title(planned, facts, optimizer), ways=("non-private", *facts.coverages), batch_size=batch_size,
        device_bytes=device_bytes, fixed=fixed(facts, optimizer), a_sample=a_sample(facts), wire=[], flops=[],
        coverage=next(iter(facts.coverages.values())), measured=facts.samples, dp=mesh.dp,
    )  # fmt: skip
    fits = min(plan.physical_batch())
    size = batch_size or max(microbatches, fits - fits % microbatches)
    return replace(plan, batch_size=size, wire=wire(facts, size), flops=flops(facts, size))


def _microbatches(planned: Planned, mesh: Mesh, microbatches: int, *, checkpointing: bool) -> int:
    """Return the number of parts that a batch is cut into; refuse contradictions."""
    _validate.refuse_any(
        ((planned.mesh.cp, planned.mesh.pp) != (mesh.cp, mesh.pp),
         f"mesh {mesh}: the model was loaded for {planned.mesh}. Give load_planned the same mesh."),
        (microbatches < 0 or (microbatches > 0 and mesh.pp == 1),
         f"microbatches={microbatches} with pp={mesh.pp}: parts of a batch are those of a pipeline."),
        (checkpointing and mesh.cp > 1,
         f"checkpointing with mesh {mesh}: where sequences are split (cp), book-keeping alone clips, and would keep "
         "what checkpointing frees. Leave one of them out."),
    )  # fmt: skip
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
