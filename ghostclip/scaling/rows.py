"""Rows of a plan: memory, bytes on the wire and FLOPs of one device, each with the arithmetic behind it.

Bytes on the wire are those that a device sends in rings: (n - 1)/n of what is gathered or reduce-scattered over n
ranks, twice that of what is all-reduced.

Shape letters: B samples, T positions.
"""

from collections.abc import Sequence
from typing import Final

from ghostclip.planning.cost import keeps, kept_input
from ghostclip.planning.coverage import Coverage, readable_bytes
from ghostclip.planning.plan import MEMORY_BUDGET
from ghostclip.scaling.facts import WAYS, WIDE, Facts
from ghostclip.scaling.local import Shard, held_values
from ghostclip.scaling.report import Row, readable_flops
from ghostclip.validation.inspection.memory import OPTIMIZERS

# Of each sample: its square, and three that tell what rounding may have done to it (`GroupNorms.complete`).
_NUMBERS: Final = 6
# Bytes of a squared norm between stages, and of the number of a table's row.
_SQUARE: Final = 8
_ID: Final = 4


def fixed(facts: Facts, optimizer: str) -> list[Row]:
    """Return the memory that does not depend on the batch.

    Args:
        facts: What was counted.
        optimizer: One of `OPTIMIZERS`.

    Returns:
        The rows.
    """
    dp, tp = facts.mesh.dp, facts.mesh.tp
    values, trained = held_values(facts.model, dp), held_values(facts.model, dp, trainable=True)
    count, state = len(facts.coverages) + 1, OPTIMIZERS[optimizer]
    part = f"{{:,}} values of a device (tp {tp}, dp {dp})"
    rows = [
        Row("weights", (values * WIDE,) * count, f"{part.format(values)} x {WIDE} B"),
        Row("gradients, clipped sums", (trained * WIDE,) * count, f"{part.format(trained)} x {WIDE} B"),
    ]
    if state:
        how = f"{state} x {trained:,} values x {WIDE} B"
        rows.append(Row(f"state of {optimizer}", (state * trained * WIDE,) * count, how))
    if facts.gathers:
        largest = sorted((unit.elements for unit in facts.units), reverse=True)[:2]
        size = sum(largest) * facts.itemsize
        how = f"the two largest units, {' + '.join(f'{n:,}' for n in largest)} values x {facts.itemsize} B"
        rows.append(Row("gathered weights", (size,) * count, how))
        wide = WIDE + facts.itemsize
        how = f"the largest unit, {largest[0]:,} values x ({facts.itemsize} + {WIDE}) B"
        rows.append(Row("gradients before reduction", (largest[0] * wide,) * count, how))
    return rows


def a_sample(facts: Facts) -> list[Row]:
    """Return the memory that each sample adds.

    Args:
        facts: What was counted.

    Returns:
        The rows.
    """
    plain, samples = facts.plain, facts.samples
    inside = [block.saved for block in plain.blocks]
    outside = plain.saved - sum(inside)
    how = f"{readable_bytes(outside // samples)} outside of blocks"
    share = 1.0
    if facts.mesh.pp > 1:
        share = facts.in_flight / facts.microbatches
        how += f", x {facts.in_flight}/{facts.microbatches}: microbatches under way (1F1B, first stage)"
    if facts.checkpointing:
        entering = sum(block.entering for block in plain.blocks)
        # One block of one microbatch runs again at a time.
        kept = int(share * (outside + entering)) + max(inside) // facts.microbatches
        how = (
            f"inputs of {len(inside)} blocks, {readable_bytes(entering // samples)} + one block, "
            f"{readable_bytes(max(inside) // samples)} + {how}"
        )
    else:
        kept = int(share * (outside + sum(inside)))
        how = f"{len(inside)} blocks x {readable_bytes(max(inside) // samples)} + {how}" if inside else how
    held, said = [0], "factors of one layer at a time"
    for way, coverage in facts.coverages.items():
        beyond = 0
        if WAYS[way] == "bookkeeping":
            beyond, budget = _beyond(facts, coverage), int((MEMORY_BUDGET - 1) * kept)
            gathered = f"factors beside activations not yet freed, {readable_bytes(beyond // samples)} at most"
            said = f"{gathered}; what is free up to {MEMORY_BUDGET:g} x is used"
            if facts.mesh.pp > 1:
                said = f"factors of all {facts.microbatches} microbatches, until the last stage has its norms"
            beyond = max(beyond, budget)
        held.append(beyond // samples)
    return [Row("activations", (kept // samples,) * len(held), how), Row("clipping", tuple(held), said)]


def _beyond(facts: Facts, coverage: Coverage) -> int:
    """Return what book-keeping holds, at most, beyond what the forward keeps.

    A block's activations go when its backward has passed, and its factors come. The most is held while some block runs,
    whose own are counted as activations and as factors.
    """
    gathered = [0] * (len(facts.blocks) + 1)
    # Inputs that several layers share are held once.
    inputs: dict[int, tuple[int, int]] = {}
    for row in coverage:
        place = _place(row.name, facts.blocks)
        gathered[place] += row.cost.held
        inputs.update(
            {
                item.input_key: (place, kept_input(item, strategy=coverage.strategy))
                for item in facts.arrived[row.name]
                if kept_input(item, strategy=coverage.strategy)
            }
        )
    for place, size in inputs.values():
        gathered[place] += size
    if facts.mesh.cp > 1:
        # Of whole sequences, those of part of the samples.
        gathered = [size // facts.mesh.cp for size in gathered]
    if facts.mesh.pp > 1:
        # Of all microbatches, when the activations of the last ones are gone.
        return sum(gathered)
    *blocks, outside = gathered
    saved = [block.saved for block in facts.plain.blocks]
    # Block k runs: those before it hold activations, those behind it factors.
    beyond = [sum(blocks[k:]) - sum(saved[k + 1 :]) for k in range(len(blocks))]
    return outside + max(0, *beyond, 0)


def _place(name: str, blocks: Sequence[str]) -> int:
    """Return the number of the block that a parameter is in; that of none is one more than the last."""
    return next((number for number, path in enumerate(blocks) if name.startswith(f"{path}.")), len(blocks))


def wire(facts: Facts, batch_size: int) -> list[Row]:
    """Return what a device sends in a physical batch.

    Args:
        facts: What was counted.
        batch_size: B.

    Returns:
        The rows.
    """
    mesh = facts.mesh
    rows = []
    if mesh.dp > 1:
        whole = sum(unit.elements for unit in facts.units)
        gathered = whole * facts.itemsize * (mesh.dp - 1) // mesh.dp
        times = [1 + number for number in facts.backwards]
        how = f"{whole:,} values x {facts.itemsize} B x {mesh.dp - 1}/{mesh.dp}, in the forward and in each backward"
        rows.append(Row("dp: all-gather of weights", tuple(n * gathered for n in times), how))
        trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
        reduced = trained * WIDE * (mesh.dp - 1) // mesh.dp
        how = f"{trained:,} values x {WIDE} B x {mesh.dp - 1}/{mesh.dp}, once: norms need none of it"
        rows.append(Row("dp: reduce-scatter of sums", (reduced,) * len(times), how))
    if mesh.replicate > 1:
        shard = held_values(facts.model, mesh.dp, trainable=True)
        size = 2 * shard * WIDE * (mesh.replicate - 1) // mesh.replicate
        how = f"{shard:,} values x {WIDE} B x 2 x {mesh.replicate - 1}/{mesh.replicate}"
        rows.append(Row("replicate: all-reduce of sums", (size,) * len(facts.backwards), how))
    rows += _wire_of_tensors(facts, batch_size) if mesh.tp > 1 else []
    rows += _wire_of_positions(facts, batch_size) if mesh.cp > 1 else []
    return rows + (_wire_of_stages(facts, batch_size) if mesh.pp > 1 else [])


def _wire_of_positions(facts: Facts, batch_size: int) -> list[Row]:
    ranks, ways = facts.mesh.cp, len(facts.backwards)
    keys = facts.gathered * batch_size // facts.samples
    how = f"{readable_bytes(keys)} of a rank x {ranks - 1} others, in the forward; their gradients in the backward"
    rows = [Row("cp: keys and values", (2 * keys * (ranks - 1),) * ways, how)]
    part, (factors, sums) = f"{ranks - 1}/{ranks}", _exchanged(facts, batch_size)
    how = (
        f"of layers where T/cp x (I + O) is less than I x O, {readable_bytes(factors)} x {part}, to the samples' ranks"
    )
    rows.append(Row("cp: all-to-all of factors", _private(factors * (ranks - 1) // ranks, ways), how))
    how = f"of all others I x O of each sample, {readable_bytes(sums)} x {part}"
    rows.append(Row("cp: reduce-scatter of samples' sums", _private(sums * (ranks - 1) // ranks, ways), how))
    shard = held_values(facts.model, facts.mesh.dp, trainable=True)
    how = f"{shard:,} values x {WIDE} B x 2 x {part}, as of gradients"
    return [*rows, Row("cp: all-reduce of sums", (_ring(ranks, shard * WIDE),) * ways, how)]


def _exchanged(facts: Facts, batch_size: int) -> tuple[int, int]:
    """Return the bytes of factors, and of sums of each sample, that `SplitSequences.gather` brings together."""
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
    return factors * batch_size // facts.samples, sums * batch_size // facts.samples


def _wire_of_stages(facts: Facts, batch_size: int) -> list[Row]:
    ranks, ways = facts.mesh.pp, len(facts.backwards)
    sent = facts.plain.blocks[0].entering * batch_size // facts.samples
    how = f"what enters a block, {readable_bytes(sent)} for B, to the next stage"
    rows = [
        Row("pp: activations", (sent,) * ways, how),
        Row("pp: gradients of activations", (sent,) * ways, "the same, to the stage before"),
    ]
    norms = _ring(ranks, batch_size * _SQUARE)
    how = f"B x {_SQUARE} B x 2 x {ranks - 1}/{ranks}: one a sample, at the end of the schedule"
    return [*rows, Row("pp: all-reduce of norms", _private(norms, ways), how)]


def _private(size: int, ways: int) -> tuple[int, ...]:
    """Return what private ways send, and a non-private step does not."""
    return 0, *[size] * (ways - 1)


def _wire_of_tensors(facts: Facts, batch_size: int) -> list[Row]:
    ways, ring = facts.backwards, f"x 2 x {facts.mesh.tp - 1}/{facts.mesh.tp}"
    rows = []
    for what, forward in (("tp: all-reduce of outputs", True), ("tp: all-reduce of input gradients", False)):
        parts = [(shard, number) for shard, number in facts.shards if shard.completes_output is forward]
        inside = [(shard, number) for shard, number in parts if shard.module.startswith(tuple(facts.blocks))]
        again = facts.checkpointing and forward
        once = _all_reduced(facts, parts, batch_size)
        more = _all_reduced(facts, inside, batch_size) if again else 0
        sizes = tuple((once if forward else n * once) + n * more for n in ways)
        rest = ", in the blocks again in each backward" * again if forward else ", in each backward"
        how = f"{len(parts)} of {_shapes(parts, facts.samples)}, x {facts.itemsize} B {ring}{rest}"
        rows.append(Row(what, sizes, how))
    head = [number for shard, number in facts.shards if shard.style in {"colwise_rep", "colwise_gather_output"}]
    if head:
        size = 3 * _ring(facts.mesh.tp, sum(head) * batch_size // facts.samples * WIDE)
        how = f"largest, sum and label's of the logits: 3 of B x T x {WIDE} B {ring}"
        rows.append(Row("tp: loss over the vocabulary", (size,) * len(ways), how))
    norm = _ring(facts.mesh.tp, (batch_size + 2) * _NUMBERS * 8)
    how = f"one of (B + 2) x {_NUMBERS} x 8 B {ring}: squared norms of all layers, and their errors"
    return [*rows, Row("tp: all-reduce of norms", _private(norm, len(ways)), how)]


def _all_reduced(facts: Facts, parts: Sequence[tuple[Shard, int]], batch_size: int) -> int:
    values = sum(number * shard.features for shard, number in parts) * batch_size // facts.samples
    return _ring(facts.mesh.tp, values * facts.itemsize)


def _ring(ranks: int, size: int) -> int:
    return 2 * size * (ranks - 1) // ranks


def _shapes(parts: Sequence[tuple[Shard, int]], samples: int) -> str:
    kinds = dict.fromkeys(f"B x {number // samples} x {shard.features}" for shard, number in parts)
    return " or ".join(kinds)


def flops(facts: Facts, batch_size: int) -> list[Row]:
    """Return what a device computes in a physical batch.

    Args:
        facts: What was counted.
        batch_size: B.

    Returns:
        The rows.
    """
    plain, count = facts.plain, len(facts.backwards)

    def scaled(number: int) -> int:
        return number * batch_size // facts.samples

    blocks = sum(block.forward for block in plain.blocks)
    forward, backward = f"{readable_flops(plain.forward // facts.samples)} x B", f"{plain.backward / plain.forward:.2f}"
    rows = [
        Row("forward", (scaled(plain.forward),) * count, forward),
        Row("backward", (scaled(plain.backward),) * count, f"{backward} x the forward"),
    ]
    if facts.checkpointing:
        again = tuple(scaled(number * blocks) for number in facts.backwards)
        rows.append(Row("blocks' forward again", again, "in each backward"))
    clipping, second = [0], [0]
    for way, coverage in facts.coverages.items():
        total = coverage.total
        # With cp these are of whole sequences, of which each rank clips a part of the samples.
        clipping.append(scaled(total.private - total.base) // facts.mesh.cp)
        # What has no trainable parameter: two thirds of it is its backward.
        rest = (plain.flops - total.base) * 2 // 3 if WAYS[way] == "ghost" else 0
        second.append(scaled(max(0, rest)))
    rows.append(Row("norms and clipped sums", tuple(clipping), "beyond weight gradients: sum of the table below"))
    if any(second):
        how = "attention's products and others without trainable weights, backwards once more"
        rows.append(Row("second backward", tuple(second), how))
    return rows
