"""Rows of a plan: memory, bytes on the wire and FLOPs of one device, each with the arithmetic behind it.

Bytes on the wire are those that a device sends in rings: (n - 1)/n of what is gathered or reduce-scattered over n
ranks, twice that of what is all-reduced.

Shape letters: B samples, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ghostclip.planning.coverage import Coverage, keeps, kept_input, readable_bytes
from ghostclip.planning.plan import MEMORY_BUDGET
from ghostclip.scaling.facts import WAYS, WIDE, Facts
from ghostclip.scaling.local import Shard, held_values
from ghostclip.validation.inspection.memory import OPTIMIZERS

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


def _row(facts: Facts, what: str, value: int | Sequence[int], how: str, *, private: bool = False) -> Row:
    """Return a row; a number is that of all ways, or of the private ones alone."""
    if isinstance(value, int):
        value = (0 if private else value, *(value,) * len(facts.coverages))
    return Row(what, tuple(value), how)


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
    mesh, row, state = facts.mesh, partial(_row, facts), OPTIMIZERS[optimizer]
    values, trained = held_values(facts.model, mesh.dp), held_values(facts.model, mesh.dp, trainable=True)
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
        kept = int(share * (outside + entering)) + max(inside) // parts
        block = f"one block, {readable_bytes(max(inside) // samples)}"
        how = f"inputs of {len(inside)} blocks, {readable_bytes(entering // samples)} + {block} + {how}"
    else:
        kept = int(share * (outside + sum(inside)))
        how = f"{len(inside)} blocks x {readable_bytes(max(inside) // samples)} + {how}" if inside else how
    held, said = [0], "factors of one layer at a time"
    for way, coverage in facts.coverages.items():
        beyond = 0
        if WAYS[way] == "bookkeeping":
            beyond = _beyond(facts, coverage)
            gathered = f"factors beside activations not yet freed, {readable_bytes(beyond // samples)} at most"
            said = f"{gathered}; what is free up to {MEMORY_BUDGET:g} x is used"
            if facts.mesh.pp > 1:
                said = f"factors of all {parts} microbatches, until the last stage has its norms"
            beyond = max(beyond, int((MEMORY_BUDGET - 1) * kept))
        held.append(beyond // samples)
    return [_row(facts, "activations", kept // samples, how), _row(facts, "clipping", held, said)]


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
            if size := kept_input(item, strategy=coverage.strategy):
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
    mesh, row, rows = facts.mesh, partial(_row, facts), []
    shard = held_values(facts.model, mesh.dp, trainable=True)
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
            elif product is not None and not keeps(product):
                wide = product.inputs + product.outputs
                factors += product.count * product.positions * wide * item.itemsize
            else:
                sums += item.samples * parameter.numel() * max(WIDE, item.itemsize)
    return factors, sums


def _wire_of_tensors(facts: Facts, batch_size: int) -> list[Row]:
    tp, row = facts.mesh.tp, partial(_row, facts)
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
    plain, row = facts.plain, partial(_row, facts)

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
    for way, coverage in facts.coverages.items():
        total = coverage.total
        # With cp these are of whole sequences, of which each rank clips a part of the samples.
        clipping.append(scaled(total.private - total.base) // facts.mesh.cp)
        # What has no trainable parameter: two thirds of it is its backward.
        rest = (plain.flops - total.base) * 2 // 3 if WAYS[way] == "ghost" else 0
        second.append(scaled(max(0, rest)))
    rows.append(row("norms and clipped sums", clipping, "beyond weight gradients: sum of the table below"))
    if any(second):
        how = "attention's products and others without trainable weights, backwards once more"
        rows.append(row("second backward", second, how))
    return rows
