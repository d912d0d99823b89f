"""``plan_devices``: what one device of a mesh holds, sends and computes, private against non-private.

Sizes are counted on the model of one device, on the meta device; what clipping costs is what `ghostclip.planning.cost`
says of the same layers.
"""

from typing import Final

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError
from ghostclip.scaling import rows
from ghostclip.scaling.facts import Facts, counted
from ghostclip.scaling.mesh import Mesh
from ghostclip.scaling.report import DevicePlan, largest_batches
from ghostclip.scaling.source import Planned
from ghostclip.validation.inspection.memory import OPTIMIZERS

_A_STAGE: Final = 4
"""Microbatches for each stage, so that a fifth of the time at most is idle."""


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
    fixed, a_sample = rows.fixed(facts, optimizer), rows.a_sample(facts)
    fits = min(largest_batches(fixed, a_sample, device_bytes))
    batch_size = batch_size or max(microbatches, fits - fits % microbatches)
    return DevicePlan(
        title=_title(planned, facts, optimizer), ways=("non-private", *facts.coverages), batch_size=batch_size,
        device_bytes=device_bytes, fixed=fixed, a_sample=a_sample, wire=rows.wire(facts, batch_size),
        flops=rows.flops(facts, batch_size), coverage=next(iter(facts.coverages.values())), measured=facts.samples,
    )  # fmt: skip


def _microbatches(planned: Planned, mesh: Mesh, microbatches: int, *, checkpointing: bool) -> int:
    """Return into how many parts a batch is cut; refuse what does not go together."""
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
        f"computes with {sum(unit.elements for unit in facts.units):,} values, {trained:,} of them trainable",
        f"computed in {computed}; weights, sums and the state of {optimizer} in 32 bits; units of fully_shard: each "
        "block, and each other module that owns parameters",
    ]
    if facts.checkpointing:
        clipped = "so that strategy 'auto' takes two backwards"
        if mesh.pp > 1:
            clipped = "and run again once: stages clip by book-keeping, which keeps their factors"
        lines += [f"blocks are checkpointed, {clipped}"]
    lines += ["the loss is computed in tiles of logits, without privacy as well"] if planned.in_tiles else []
    lines += [_of_stages(facts)] if mesh.pp > 1 else []
    lines += ["keys and values of all positions are gathered by every rank of cp"] if mesh.cp > 1 else []
    if mesh.cp * mesh.pp > 1:
        lines += ["strategies of two backwards do not go with cp and pp"]
        if max(mesh.dp, mesh.tp) > 1 or mesh.cp > 1 < mesh.pp:
            lines += [
                "planned only: make_private takes cp and pp with copies (replicate), not with dp, tp or each other"
            ]
    return lines


def _of_stages(facts: Facts) -> str:
    stages, parts = facts.mesh.pp, facts.microbatches
    return (
        f"a stage with {len(facts.blocks)} blocks and all that is outside of blocks, more than any has; {parts} "
        f"microbatches by 1F1B, which idles {stages - 1}/{parts + stages - 1} of the time"
    )
