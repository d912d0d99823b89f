"""When a session asks for evidence: of the model's outputs in its first forwards, of the first per-sample losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from ghostclip.capture.probe import Probe, ask, cotangents, loss_starts, starts
from ghostclip.capture.unchecked import LOSSES
from ghostclip.capture.usage import Site
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


def is_to_prove(session: "Session") -> bool:
    """Return whether the latest forward is one that evidence is asked for."""
    return session.probes and session.record.unproven and session.record.batch_size > 1


def probe_outputs(session: "Session", outputs: list[Tensor]) -> Probe | None:
    """Probe the latest forward from the model's outputs if it passed call sites that are not proven.

    Args:
        session: Whose forward it was.
        outputs: The model's output tensors.

    Returns:
        The probe with what it found; None where there was nothing to prove or no output to start from.

    Raises:
        BatchAxisError: No output has an axis that could hold the samples.
    """
    record = session.record
    if not is_to_prove(session):
        return None
    first: Probe | None = None
    states = [(site, site.chosen, site.attempts) for site in session.sites.table.values()]
    for begun in starts(outputs, record=record):
        probe = Probe(set(), session.describe_module)
        if first is not None:
            _restore(states)
        with _listening(session, probe):
            ask(probe, begun, batch_size=record.batch_size, run=session.run_backward)
        if not probe.failures:
            return probe
        first = first or probe
    return first


def _restore(states: list[tuple[Site, tuple[str, int] | None, int]]) -> None:
    """Forget what a wrong reading of the outputs seemed to show."""
    for site, chosen, attempts in states:
        site.chosen, site.attempts = chosen, attempts


def probe_losses(session: "Session", losses: Tensor) -> None:
    """Prove that one sample's loss touches that sample's rows only.

    Args:
        session: Whose forward the losses come from.
        losses: Per-sample losses, shape ``(B,)``, or a scalar: then what it was reduced from is asked, as far as that
            has one row for each sample.

    Raises:
        SampleMixingError: It touches others' (a loss that compares samples, or one normalised over the batch).
    """
    sample = session.record.batch_size // 2
    begun = loss_starts(losses, record=session.record)
    probe = Probe({sample}, session.describe_module)
    grads = cotangents(begun, batch_size=session.record.batch_size, samples={sample})
    outputs = [start.place.source for start in begun]
    with _listening(session, probe):
        if outputs and session.run_backward(outputs, grads) is None:
            session.run_backward(outputs, grads)
    if probe.failures:
        message = (
            "the loss of one sample depends on other samples' outputs (a contrastive loss, or one normalised over the "
            "batch), so removing a sample changes every other's gradient and no bound holds. Write the loss of each "
            "sample from its own outputs."
        )
        raise SampleMixingError(message)
    session.unchecked.ran(LOSSES) if outputs else session.unchecked.missed("the scalar loss hides them", LOSSES)
