"""Trainings through host libraries, judged as the loops of `tests/loops` are: one record at a time in float64."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip.errors import GhostClipError
from ghostclip.integrations._host import HostTraining
from tests.loops.hugging import in_a_world, quiet
from tests.loops.loop import Loop
from tests.loops.oracle import measure, see
from tests.loops.ranks import see_on_ranks
from tests.loops.world import BATCH, RECORDS, World

STEPS = 3
DELTA = 1e-3

# Mixed inputs are told where a loop is run again, each time by chance, or by the losses of two halves.
MIXED = "one sample's rows changed when others were replaced|another gradient than the losses of its two halves"


def exact(train: Callable[[World], None], *, clips: tuple[float, ...] = (0.5,), **options: Any) -> None:
    """Assert that a training is exact: sums, leave-one-out, noise, account, and ε by another library.

    Args:
        train: Trains in a world.
        clips: Values of C.
        options: Of `Loop`.
    """
    loop = Loop("row", "", train, **{"expect": "exact", "releases": STEPS, "clips": clips} | options)
    found = measure(loop, see_on_ranks, left_out=1) if loop.ranks > 1 else measure(loop, left_out=2)
    said = "; ".join(found.problems) or found.message
    assert found.outcome == ("out of sight" if loop.unseen else "exact"), f"{found.outcome}: {said} ({found.where})"
    if loop.releases is not None:
        assert found.applied == found.accounted == loop.releases, f"{found.applied} releases, {found.accounted} counted"


def refused(train: Callable[[World], None]) -> None:
    """Train, let the refusal out, and assert that nothing was released before it.

    Args:
        train: Trains in a world.

    Raises:
        GhostClipError: The refusal.
    """
    world = World(sigma=1.0, clip=0.5)
    with world.recording(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            train(world)
        except GhostClipError:
            assert not world.events, "something was released before the refusal"
            assert not world.moved, "parameters changed before the refusal"
            raise


def arguments_of(world: World, kind: type, **options: Any) -> Any:
    """Return training arguments of a world: its σ, its C, batches of 6 in two physical ones, few steps.

    Args:
        world: The world.
        kind: Class of the arguments.
        options: Others.
    """
    quiet()
    given = {
        "per_device_train_batch_size": BATCH // 2,
        "gradient_accumulation_steps": 2 // world.ranks,
        "max_steps": STEPS,
        "noise_multiplier": world.sigma,
        "target_delta": DELTA,
        "max_grad_norm": world.clip,
    }
    return kind(**(in_a_world(world) | given | options))


def run(world: World, trainer: Any, resume: bool | None = None) -> Any:
    """Train, with the world's randomness, and let the world ask the engine.

    Args:
        world: The world.
        trainer: The trainer.
        resume: Whether to go on from the last checkpoint.

    Returns:
        What `train` returned.
    """

    def generator(_: HostTraining, purpose: int) -> torch.Generator | None:
        # Of sampling as `World.loader` seeds it; of noise the world's keys.
        return None if purpose else world.loader(list(range(RECORDS))).generator

    silent(trainer)
    with mock.patch.object(HostTraining, "_generator", generator):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return trainer.train(resume_from_checkpoint=resume)
        finally:
            world.engine = trainer.privacy_engine


def silent(trainer: Any) -> None:
    """Take the callback away that prints logs.

    Args:
        trainer: The trainer.
    """
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def releases_of(train: Callable[[World], None], **options: Any) -> list[dict[str, Tensor]]:
    """Return what a training without noise releases.

    Args:
        train: Trains in a world.
        options: Of the world.
    """
    seen = see(Loop("row", "", train), World(**({"clip": 0.5} | options)))
    assert not seen.error, f"{seen.error} ({seen.where})"
    return seen.releases


def own_losses(records: Sequence[Any], collate: Callable[[list[Any]], Any]) -> Callable[[nn.Module, list[int]], Tensor]:
    """Return the losses that a model itself has of single records, for the reference.

    Args:
        records: The records.
        collate: Makes a batch.

    Returns:
        From a model and numbers of records to losses.
    """

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        return torch.stack([model(**collate([dict(records[number])])).loss for number in numbers])

    return losses


def next_token_losses(records: Sequence[Any]) -> Callable[[nn.Module, list[int]], Tensor]:
    """Return the mean losses of single records' next tokens, in float64; transformers' own is in 32 bits.

    Args:
        records: With `input_ids`.

    Returns:
        From a model and numbers of records to losses.
    """

    def losses(model: nn.Module, numbers: list[int]) -> Tensor:
        found = []
        for number in numbers:
            ids = torch.tensor([records[number]["input_ids"]])
            scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            # A soft prompt comes before the tokens, and its end predicts the first of them.
            first = 1 if scores.shape[1] == ids.shape[1] else 0
            targets = ids[:, first:].flatten()
            found.append(nn.functional.cross_entropy(scores[:, -len(targets) - 1 : -1].flatten(0, 1), targets))
        return torch.stack(found)

    return losses
