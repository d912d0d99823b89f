"""``plan_devices``: what one device of a mesh holds, sends and computes, private against non-private.

Sizes are counted on the model of one device, on the meta device; what clipping costs is what `ghostclip.planning.cost`
says of the same layers.
"""

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError
from ghostclip.scaling import rows
from ghostclip.scaling.facts import Facts, counted
from ghostclip.scaling.mesh import Mesh
from ghostclip.scaling.report import DevicePlan, largest_batches
from ghostclip.scaling.source import Planned
from ghostclip.validation.inspection.memory import OPTIMIZERS


@_validate.suggests_options
def plan_devices(
    planned: Planned,
    *,
    mesh: Mesh,
    device_bytes: int,
    batch_size: int = 0,
    optimizer: str = "adamw",
    checkpointing: bool = False,
) -> DevicePlan:
    """Plan a training on a mesh.

    Args:
        planned: The model and a step of it, on the meta device; the model is changed into that of one device.
        mesh: The devices.
        device_bytes: Memory of each.
        batch_size: Samples of a physical batch; 0 for the most that all ways fit, one at least.
        optimizer: Whose state is counted: "adamw", "momentum" (SGD with momentum) or "sgd".
        checkpointing: Keep of each block its input alone, and run it again in every backward.

    Returns:
        The plan. A model that cannot be shared so, or runs on numbers only, is refused with ``UnsupportedModelError``.

    Raises:
        InvalidOptionError: An option has a value that is not allowed.
    """
    _validate.choice(optimizer, "optimizer", OPTIMIZERS)
    if batch_size < 0:
        raise InvalidOptionError(f"batch_size={batch_size}: expected a number of samples, or 0 for what fits.")
    facts = counted(planned, mesh, checkpointing=checkpointing)
    fixed, a_sample = rows.fixed(facts, optimizer), rows.a_sample(facts)
    batch_size = batch_size or max(1, min(largest_batches(fixed, a_sample, device_bytes)))
    return DevicePlan(
        title=_title(planned, facts, optimizer), ways=("non-private", *facts.coverages), batch_size=batch_size,
        device_bytes=device_bytes, fixed=fixed, a_sample=a_sample, wire=rows.wire(facts, batch_size),
        flops=rows.flops(facts, batch_size), coverage=next(iter(facts.coverages.values())), measured=facts.samples,
    )  # fmt: skip


def _title(planned: Planned, facts: Facts, optimizer: str) -> list[str]:
    mesh = facts.mesh
    trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
    computed = {2: "bfloat16", 4: "float32", 8: "float64"}[facts.itemsize]
    lines = [
        f"{planned.source.title}: {planned.elements:,} parameters",
        f"mesh {mesh}: {mesh.devices} devices, {mesh.data_ranks} x B samples at a time; a rank of tp={mesh.tp} "
        f"computes with {sum(unit.elements for unit in facts.units):,} values, {trained:,} of them trainable",
        f"computed in {computed}; weights, sums and the state of {optimizer} in 32 bits; units of fully_shard: each "
        "block, and each other module that owns parameters",
    ]
    lines += ["blocks are checkpointed, so that strategy 'auto' takes two backwards"] if facts.checkpointing else []
    lines += ["the loss is computed in tiles of logits, without privacy as well"] if planned.in_tiles else []
    return lines
