"""When a session asks for evidence: of the model's outputs in its first forwards, of the first per-sample losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ghostclip.capture.probe import Probe, ask
from ghostclip.errors import SampleMixingError

if TYPE_CHECKING:
    from ghostclip.capture.session import Session


@contextmanager
def _listening(session: "Session", probe: Probe) -> Iterator[None]:
    session.listener = probe
    try:
        yield
    finally:
        session.listener = None


def probe_outputs(session: "Session", outputs: list[Tensor]) -> Probe | None:
    """Probe the latest forward from the model's outputs if it passed call sites that are not proven.

    Args:
        session: Whose forward it was.
        outputs: The model's output tensors.

    Returns:
        The probe with what it found; None where there was nothing to prove or no output to start from.
    """
    record = session.record
    if not session.probes or not record.unproven or record.batch_size < 2:
        return None
    probe = Probe(set(), session.describe_module)
    with _listening(session, probe):
        return probe if ask(probe, outputs, record=record, run=session.run_backward) else None


def probe_losses(session: "Session", losses: Tensor) -> None:
    """Prove that one sample's loss touches that sample's rows only.

    Args:
        session: Whose forward the losses come from.
        losses: Per-sample losses, shape ``(B,)``.

    Raises:
        SampleMixingError: It touches others' (a loss that compares samples, or one normalised over the batch).
    """
    sample = session.record.batch_size // 2
    grad = torch.zeros_like(losses)
    grad[sample] = 1.0
    probe = Probe({sample}, session.describe_module)
    with _listening(session, probe):
        if session.run_backward([losses], [grad]) is None:
            session.run_backward([losses], [grad])
    if probe.failures:
        message = (
            "the loss of one sample depends on other samples' outputs (a contrastive loss, or one normalised over the "
            "batch), so removing a sample changes every other's gradient and no bound holds. Write the loss of each "
            "sample from its own outputs."
        )
        raise SampleMixingError(message)
